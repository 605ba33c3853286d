"""Calls in a form that nothing opens (Llama 3): what an answer that begins as one is held to."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from martlet.errors import RequestError
from martlet.grammar.compile import compile_state
from martlet.grammar.matcher import Grammar
from martlet.server.protocol import ChatRequest
from martlet.server.response_format import asked_tools, joined
from martlet.server.tools.call_formats import TOOLS
from martlet.server.tools.calls import Arguments, Call, CallParser
from martlet.structured import Structured
from tests.grammar.schema_texts import EOS, accepts, runs, vocabulary

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}


def auto(n: int = 3, form: str = "llama", **more: Any) -> tuple[Structured | None, bool]:
    tools = [{"type": "function", "function": {"name": f"tool_{i}", "parameters": POINT}} for i in range(n)]
    return asked_tools(
        ChatRequest(model="m", messages=[{"role": "user", "content": "x"}], tools=tools, **more), TOOLS[form]
    )


CALLS = [
    '{"name": "tool_2", "parameters": {"x": 3}}',
    '{"name":"tool_1","parameters":{"x": 1}}',
    '{"type": "function", "name": "tool_1", "parameters": {"x": 1}}',
    '<|python_tag|>{"name": "tool_2", "parameters": {"x": -2}}',
]
FREE = [
    "",
    "Hello",
    "{",
    '{"a":1}',
    '{"name": "tool_2',
    '{"name": "nobody", "parameters": {}}',
    'x {"name": "tool_2", "y',
]
WRONG = [
    '{"name": "tool_2", "parameters": {"x": "3"}}',
    '{"name": "tool_2", "parameters": {}}',
    '{"name": "tool_2", "arg',
    '{"name": "tool_2", "parameters": {"x": 3}} and more',
]  # fmt: skip


def test_an_answer_that_begins_as_a_call_is_one_and_all_others_are_free() -> None:
    structured, must = auto()
    assert structured is not None
    assert not must
    start = compile_state(structured)
    for text in CALLS + FREE:
        assert accepts(start, text), text
    for text in WRONG:
        assert not accepts(start, text), text
    for text in CALLS:
        parser = CallParser(TOOLS["llama"])
        call, *arguments = [*parser.feed(text), *parser.finish()]
        assert isinstance(call, Call)
        assert "x" in json.loads("".join(part.text for part in arguments if isinstance(part, Arguments)))


def test_masks_are_what_stepping_says_where_a_call_and_a_form_begin_alike() -> None:
    """With a form of the answer as well, both are followed side by side until they are told
    apart.
    """
    structured, _ = auto()
    assert structured is not None
    form = {"type": "object", "properties": {"name": {"type": "string"}, "n": {"type": "integer"}}, "required": ["n"]}
    both = joined(Structured(json=json.dumps(form)), structured)
    assert both is not None
    tokens = vocabulary(
        ['{"', '{"name', "name", '": "', '", "', "tool_", '_2",', "parameters", '{"x', '"}}', "1}", "}}"]
    )
    for asked, texts in ((both, [CALLS[0], '{"name":"tool_2","n":1}', '{"n":5}']), (structured, CALLS + FREE)):
        start = compile_state(asked)
        matcher = Grammar(start, tokens).matcher()
        for text in texts:
            for n, byte in enumerate(text.encode()):
                state = runs(start, text.encode()[:n])
                assert state is not None
                expected = {t for t, own in enumerate(tokens.tokens) if own and runs(state, own) is not None}
                assert {t for t in range(len(tokens.tokens)) if matcher.allows(t)} - {EOS} == expected
                found = Grammar(state, tokens)
                assert set(mask_ids(found)) == expected | ({EOS} if state.accepts else set())
                assert matcher.advance(1 + byte)
            matcher.rollback(len(text.encode()))
    assert accepts(compile_state(both), '{"name":"tool_2","n":1}')
    assert not accepts(compile_state(both), '{"name":"tool_2"}')


def mask_ids(grammar: Grammar) -> list[int]:
    words = np.zeros(grammar.vocabulary.n_words, np.uint32)
    grammar.matcher().mask(words)
    return [t for t in range(len(grammar.vocabulary.tokens)) if words[t >> 5] >> (t & 31) & 1]


def test_other_choices() -> None:
    structured, must = auto(tool_choice="required")
    assert structured is not None
    assert must
    assert not accepts(compile_state(structured), "Hello")
    assert auto(form="pythonic") == (None, False)  # nothing tells its calls from a list
    assert auto(200) == (None, False)  # more beginnings than are looked for
    with pytest.raises(RequestError, match="one of the formats"):
        auto(form="pythonic", tool_choice="required")
