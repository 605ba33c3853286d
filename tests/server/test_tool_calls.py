"""Tool calls and reasoning: what each family writes, and that no way of cutting the text changes
what is found.
"""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from martlet.errors import RequestError
from martlet.server.tools.call_formats import REASONING, TOOLS, reasoning_format, tool_format
from martlet.server.tools.harmony import HarmonyParser
from martlet.server.tools.reply import Parts, ReplyParser, delta_of

# format, text, content, [(name, arguments)]
FIXTURES = [
    ("hermes", "Hello there", "Hello there", []),
    ("hermes", " a < b and <tool> \n", " a < b and <tool> \n", []),
    (
        "hermes",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "n": [1, {"a": "}"}]}}\n</tool_call>',
        "",
        [("get_weather", '{"city": "Zürich", "n": [1, {"a": "}"}]}')],
    ),
    (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"x": "\\"</tool_call>"}, "name": "b"}\n</tool_call> done\n',
        "Let me see.done",
        [("a", "{}"), ("b", '{"x": "\\"</tool_call>"}')],
    ),
    ("hermes", '<tool_call>{"name": "a"}</tool_call>', "", [("a", "{}")]),
    ("hermes", '<tool_call>{"name": "a", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("a", '{"x": 1}')]),
    ("hermes", '<tool_call>{"name": "a", "arguments": {"x": 1', "", [("a", '{"x": 1')]),
    ("hermes", "see <tool_call> for more", "see <tool_call> for more", []),
    ("hermes", 'x <tool_call>{"color": 1}</tool_call>', 'x <tool_call>{"color": 1}</tool_call>', []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", "and <tool_ca", "and <tool_ca", []),
    ("hermes", 'and <tool_call>{"na', 'and <tool_call>{"na', []),
    ("llama", '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        "llama",
        '<|python_tag|>{"type": "function", "name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}',
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    ("llama", '{"city": "Bern"} is JSON', '{"city": "Bern"} is JSON', []),
    ("llama", ' {"name": "f"', ' {"name": "f"', []),
    ("llama", "Plain text {", "Plain text {", []),
    (
        "mistral",
        '[TOOL_CALLS][{"name": "f", "arguments": {"a": [1]}}, {"name": "g", "arguments": {}}]',
        "",
        [("f", '{"a": [1]}'), ("g", "{}")],
    ),
    (
        "mistral",
        'I call. [TOOL_CALLS]get_weather[ARGS]{"city": "Bern"}[TOOL_CALLS]g[CALL_ID]abc123def[ARGS]{}',
        "I call.",
        [("get_weather", '{"city": "Bern"}'), ("g", "{}")],
    ),
    ("mistral", "a [list] of [TOOL", "a [list] of [TOOL", []),
    (
        "deepseek",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"x": "`"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("f", '{"x": "`"}'), ("g", "{}")],
    ),
    (
        "deepseek",
        'Hm. <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"x": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "Hm.",
        [("f", '{"x": 1}')],
    ),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
    (
        "granite",
        '<|tool_call|>[{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"y": null}}]<|/tool_call|>',
        "",
        [("f", "{}"), ("f", '{"y": null}')],
    ),
    ("phi", 'functools[{"name": "f", "arguments": {"x": 1}}]', "", [("f", '{"x": 1}')]),
    ("phi", "functools is a module", "functools is a module", []),
    (
        "qwen3_coder",
        "I look.\n<tool_call>\n<function=f>\n<parameter=city>\nBern\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "<parameter=code>\nif a < 1:\n    b()\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=g>\n"
        "</function>\n</tool_call>",
        "I look.",
        [("f", '{"city": "Bern", "days": 3, "code": "if a < 1:\\n    b()"}'), ("g", "{}")],
    ),
    ("qwen3_coder", "a <tool_call> is a tag", "a <tool_call> is a tag", []),
    ("qwen3_coder", "<tool_call><function=f><parameter=days>\nten\n</parameter>", "", [("f", '{"days": "ten"')]),
    (
        "glm",
        "<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>3</arg_value>\n<arg_key>days</arg_key>\n"
        '<arg_value>{"a": [1]}</arg_value>\n</tool_call> Done.',
        "Done.",
        [("f", '{"city": "3", "days": {"a": [1]}}')],
    ),
    ("glm", "<tool_call>f</tool_call>", "", [("f", "{}")]),
    ("pythonic", '[f(a=1, b="x, (y)"), g.h()]', "", [("f", '{"a": 1, "b": "x, (y)"}'), ("g.h", "{}")]),
    ("pythonic", "[1, 2, 3]", "[1, 2, 3]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    ("pythonic", "[f(a=1)", "[f(a=1)", []),
    ("pythonic", "No call.", "No call.", []),
]
THOUGHTS = [  # prompt, text, reasoning, content
    ("", "<think>\nHm, <b>.\n</think>\n\nYes.", "Hm, <b>.", "Yes."),
    ("<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
    ("", "Yes <think>no</think>", "", "Yes <think>no</think>"),
    ("", " <think></think> a ", "", "a "),
    ("", "<think>never ends </thi", "never ends </thi", ""),
    ("", "  <thin", "", "  <thin"),
    ("", "\n Plain", "", "\n Plain"),
]


def parser(form: str | None, *, reasoning: str | None = None, prompt: str = "") -> ReplyParser:
    numbers = itertools.count()
    return ReplyParser(
        None if reasoning is None else REASONING[reasoning],
        None if form is None else TOOLS[form],
        prompt=prompt,
        new_id=lambda length: f"{next(numbers)}",
        schemas={"f": {"properties": {"city": {"type": "string"}, "days": {"type": ["integer", "object"]}}}},
    )


def joined(found: ReplyParser, pieces: list[str]) -> Parts:
    return Parts.of([part for piece in pieces for part in found.feed(piece)] + found.finish())


def cut(text: str, borders: list[int]) -> list[str]:
    ends = [0, *sorted(borders), len(text)]
    return [text[start:stop] for start, stop in itertools.pairwise(ends)]


@pytest.mark.parametrize(("form", "text", "content", "calls"), FIXTURES)
def test_calls(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    found = joined(parser(form), [text])
    assert found.content == content
    assert [(call.name, arguments) for call, arguments in found.calls] == calls
    assert [call.index for call, _ in found.calls] == list(range(len(calls)))
    assert len({call.call_id for call, _ in found.calls}) == len(calls)


@pytest.mark.parametrize(("form", "text", "content", "calls"), FIXTURES)
def test_no_cut_changes_them(form: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Every single cut, and character by character (ask 20)."""
    whole = joined(parser(form), [text])
    for at in range(len(text) + 1):
        assert joined(parser(form), [text[:at], text[at:]]) == whole, f"cut after {text[:at]!r}"
    assert joined(parser(form), list(text)) == whole


@given(st.sampled_from(FIXTURES), st.data())
def test_no_cuts_change_them(fixture: tuple[str, str, str, object], data: st.DataObject) -> None:
    form, text, _, _ = fixture
    borders = data.draw(st.lists(st.integers(0, len(text)), max_size=12))
    assert joined(parser(form), cut(text, borders)) == joined(parser(form), [text])


PIECES = ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {"a": 1}}', '{"name":', " ", "\n", "x", "}", "[", "]",
          "[TOOL_CALLS]", "[ARGS]", "f", "functools", ";", '"', "<|python_tag|>", "<think>", "</think>", "<", "(a=1)"]  # fmt: skip


@given(st.sampled_from(sorted(TOOLS)), st.lists(st.sampled_from(PIECES), max_size=9), st.data())
def test_any_text_is_cut_alike(form: str, pieces: list[str], data: st.DataObject) -> None:
    text = "".join(pieces)
    borders = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    make = lambda: parser(form, reasoning="think")  # noqa: E731
    assert joined(make(), cut(text, borders)) == joined(make(), [text])


@given(st.lists(st.sampled_from(PIECES), max_size=9))
def test_without_calls_nothing_is_lost(pieces: list[str]) -> None:
    text = "".join(pieces)
    for form in TOOLS:
        found = joined(parser(form), [text])
        assert found.calls or found.content == text


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content"), THOUGHTS)
def test_reasoning(prompt: str, text: str, reasoning: str, content: str) -> None:
    for at in range(len(text) + 1):
        found = joined(parser(None, reasoning="think", prompt=prompt), [text[:at], text[at:]])
        assert (found.reasoning, found.content) == (reasoning, content)
    assert joined(parser(None, reasoning="think", prompt=prompt), list(text)).content == content


def test_reasoning_then_a_call() -> None:
    text = '<think>It has a <tool_call> tool.</think>\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    found = joined(parser("hermes", reasoning="think"), [text])
    assert found.reasoning == "It has a <tool_call> tool."
    assert [call.name for call, _ in found.calls] == ["f"]


def test_arguments_stream() -> None:
    """The call comes as soon as it must be one, the arguments as they are written."""
    found = parser("hermes")
    feed = lambda text: [delta_of(part) for part in found.feed(text)]  # noqa: E731
    assert feed('<tool_call>{"name": "f", "arguments": ') == []
    assert feed('{"te') == [
        {"tool_calls": [{"index": 0, "id": "call_0", "type": "function", "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"te'}}]},
    ]
    assert feed('xt": "a') == [{"tool_calls": [{"index": 0, "function": {"arguments": 'xt": "a'}}]}]


def test_text_is_not_held_back_longer_than_needed() -> None:
    found = parser("hermes")
    assert [delta_of(part) for part in found.feed("Hello <b")] == [{"content": "Hello <b"}]
    assert [delta_of(part) for part in found.feed("r> ")] == [{"content": "r>"}]
    assert [delta_of(part) for part in found.feed("<t")] == []
    assert [delta_of(part) for part in found.feed("d>")] == [{"content": " <td>"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", "deepseek"),
        ("<|tool_call|>", "granite"),
        ("<tool_call>\n<function=example>", "qwen3_coder"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        ('{"name": function name, "parameters": dictionary}', "llama"),
        ("plain {{ messages }}", None),
    ],
)
def test_format_is_chosen_by_the_template(template: str, expected: str | None) -> None:
    found = tool_format("auto", template)
    assert (found.name if found else None) == expected
    assert tool_format("none", template) is None
    assert tool_format("phi", template) is TOOLS["phi"]
    assert reasoning_format("auto", template) is None
    assert reasoning_format("auto", template + "</think>") is REASONING["think"]


def test_unknown_formats_are_refused() -> None:
    with pytest.raises(RequestError, match="hermes"):
        tool_format("hermez", "")
    with pytest.raises(RequestError, match="think"):
        reasoning_format("thinks", "")


def test_message() -> None:
    message = joined(parser("hermes"), ['<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>']).message()
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert (call["type"], call["function"]["name"]) == ("function", "f")
    assert json.loads(call["function"]["arguments"]) == {"x": 1}


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, 5),
        ({"type": "string"}, "5"),
        ({"type": ["string", "null"]}, "5"),
        ({"anyOf": [{"type": "number"}, {"type": "null"}]}, 5),
        ({}, "5"),
        (True, "5"),
        ({"type": [{"a": 1}, ["b"]]}, "5"),
        ({"type": 3, "anyOf": 7, "oneOf": [4, {"type": ["integer"]}]}, 5),
    ],
)
def test_the_type_of_an_argument_in_tags(schema: object, value: object) -> None:
    """By its schema, whatever a request has put there."""
    found = ReplyParser(None, TOOLS["qwen3_coder"], schemas={"f": {"properties": {"a": schema}}})
    text = "<tool_call><function=f><parameter=a>\n5\n</parameter></function></tool_call>"
    [(_, arguments)] = joined(found, [text]).calls
    assert json.loads(arguments) == {"a": value}


def test_harmony_is_chosen_by_its_channels() -> None:
    template = "<|start|>assistant<|channel|>final<|message|>{{ content }}<|end|>"
    assert (tool_format("auto", template), reasoning_format("auto", template)) == (
        TOOLS["harmony"],
        REASONING["harmony"],
    )


ANSWERS = [  # prompt, answer of gpt-oss, reasoning, content, calls
    (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>Hm, <b>.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>",
        "Hm, <b>.",
        "Yes.",
        [],
    ),
    (
        "<|start|>assistant",
        "<|channel|>analysis<|message|>A.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"x": 1}<|call|>',
        "A.",
        "",
        [("f", '{"x": 1}')],
    ),
    (
        "<|start|>assistant",
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.g.h<|channel|>commentary json"
        "<|message|>{}<|call|>",
        "",
        "I look.",
        [("g.h", "{}")],
    ),
    ("<|start|>assistant<|channel|>final<|message|>", "Yes.<|return|>", "", "Yes.", []),
    ("<|start|>assistant", "Plain text < | of no format.", "", "Plain text < | of no format.", []),
    ("<|start|>assistant", "<|channel|>analysis<|message|>never ends <|en", "never ends <|en", "", []),
    ("<|start|>assistant", "<|channel|>final", "", "<|channel|>final", []),
]


@pytest.mark.parametrize(("prompt", "text", "reasoning", "content", "calls"), ANSWERS)
def test_channels_however_they_are_cut(
    prompt: str, text: str, reasoning: str, content: str, calls: list[tuple[str, str]]
) -> None:
    for size in (1, 2, 3, 7, len(text)):
        parser = HarmonyParser(prompt)
        pieces = [text[i : i + size] for i in range(0, len(text), size)]
        parts = Parts.of([part for piece in pieces for part in parser.feed(piece)] + parser.finish())
        assert (parts.reasoning, parts.content) == (reasoning, content)
        assert [(call.name, arguments) for call, arguments in parts.calls] == calls
