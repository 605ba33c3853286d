"""Bodies made at random of the right names and any values: each is answered, or refused in the
right form; never a 500.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from martlet.server.body import SAMPLING_FIELDS
from martlet.server.openapi import _BODIES
from martlet.server.protocol import REFUSED
from martlet.toy import spell
from tests.server.serving import Served, serving
from tests.server.test_server_apis import TEMPLATE

# the script has no logits to show
MANY = {"n", "best_of", "logprobs", "prompt_logprobs", "max_tokens", "min_tokens"}
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 300), st.floats(allow_nan=False, allow_infinity=False, width=32),
    st.text(max_size=8), st.sampled_from(["auto", "none", "text", "user", "function", 2**70, -1, ""]),
)  # fmt: skip
KEYS = ["role", "content", "type", "text", "name", "function", "tool_calls", "arguments", "input", "id", "thinking",
        "tool_use_id", "call_id", "output", "parameters", "input_schema", "include_usage", "effort", "format"]  # fmt: skip
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.sampled_from(KEYS), st.text(max_size=4)), inner, max_size=4),
    ),
    max_leaves=8,
)
words = st.sampled_from(["hi", "", "é", "a b"])
kinds = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "input_text", "message", "function_call",
                         "function_call_output", "reasoning"])  # fmt: skip
blocks = st.fixed_dictionaries({"type": kinds}, optional=dict.fromkeys(KEYS[3:14], values) | {"text": words})
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer"])},
    optional={"content": st.one_of(words, st.lists(blocks, max_size=3), values), "tool_calls": values, "type": kinds},
)
RIGHT: dict[str, st.SearchStrategy[Any]] = {
    "messages": st.one_of(st.just([{"role": "user", "content": "hi"}]), st.lists(message, min_size=1, max_size=3)),
    "input": st.one_of(words, st.lists(st.one_of(message, blocks), max_size=3)),
    "prompt": st.one_of(words, st.lists(st.integers(0, 256), max_size=4), st.lists(words, max_size=2)),
    "tokens": st.lists(st.integers(0, 256), max_size=4),
    "model": st.just("scripted"),
    "max_tokens": st.integers(0, 5),
    "stream": st.booleans(),
}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("Hello there"), template=TEMPLATE, max_n=4, context=512) as server:
        yield server
        server.check_idle()


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    [(_, model, has_sampling)] = [entry for entry in _BODIES if entry[0] == path]
    names = {*model.model_fields, *((SAMPLING_FIELDS if has_sampling else set()) - MANY), *REFUSED, "unheard_of"}
    right = {name: RIGHT[name] for name in model.model_fields if name in RIGHT}
    if path == "/tokenize":  # it takes one of the two
        del right["prompt"]
    odd = st.dictionaries(st.sampled_from(sorted(names - set(right))), values, max_size=2)
    one_wrong = st.dictionaries(st.sampled_from(sorted(names)), values, max_size=1)
    return st.builds(lambda *parts: {k: v for part in parts for k, v in part.items()}, st.fixed_dictionaries(right),
                     st.one_of(st.just({}), odd), st.one_of(st.just({}), one_wrong))  # fmt: skip


@pytest.mark.parametrize("path", [path for path, _, _ in _BODIES])
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_body_is_answered_or_refused(served: Served, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    try:
        text = json.dumps(body, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        text = json.dumps(body).encode()
    response = served.post(path, text)
    assert response.status_code in (200, 400, 403, 404), (response.status_code, response.text[:300])
    if response.status_code == 200:
        assert '"error":{' not in response.text or response.headers["content-type"] == "application/json", response.text
        return
    error = response.json()["error"]
    assert error["message"]
    assert len(response.content) < 10_000
    if not path.startswith("/v1/messages"):
        assert set(error) == {"message", "type", "param", "code"}
