"""Fields of other engines and newer clients: honoured, left out with a warning, or refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from martlet.toy import spell
from tests.server.serving import Served, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} write <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content.replace('~', '') }}"
    "{% if not loop.last or add_generation_prompt %};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
USER = {"role": "user", "content": "hi"}
FORMAT = {"type": "json_schema", "schema": {"enum": [7]}}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("abcdef"), template=TEMPLATE, context=1024) as server:
        yield server


@pytest.fixture(scope="module")
def strict() -> Iterator[Served]:
    with serving(spell("abcdef"), template=TEMPLATE, context=1024, strict=True) as server:
        yield server


def messages(served: Served, *turns: dict[str, Any], **fields: Any) -> Any:
    response = served.post("/v1/messages", {"messages": list(turns), "max_tokens": 8, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_developer_is_written_as_system(served: Served) -> None:
    reply = served.post("/v1/chat/completions", {"messages": [{"role": "developer", "content": "x"}, USER]}).json()
    assert reply["usage"]["prompt_tokens"] == len("s:x;u:hi;a:")
    tokens = served.post("/tokenize", {"messages": [{"role": "developer", "content": "x"}]}).json()["tokens"]
    assert tokens == served.post("/tokenize", {"messages": [{"role": "system", "content": "x"}]}).json()["tokens"]


def test_messages_output_config(served: Served) -> None:
    body = {"messages": [USER], "max_tokens": 8, "output_config": {"format": FORMAT}}
    refused = served.post("/v1/messages", body)  # this engine has no grammars: never dropped
    assert (refused.status_code, "response_format" in refused.text) == (400, True)
    reply = messages(served, USER, output_config={"task_budget": 3})
    assert any("output_config.task_budget" in warning for warning in reply["warnings"])


def test_messages_go_on_with_the_assistants(served: Served) -> None:
    reply = messages(served, USER, {"role": "assistant", "content": "one,"})
    assert reply["usage"]["input_tokens"] == len("u:hi;a:one,")


def test_messages_system_between(served: Served) -> None:
    reply = messages(served, USER, {"role": "system", "content": "b"}, USER)
    assert reply["usage"]["input_tokens"] == len("u:hi;s:b;u:hi;a:")


def test_messages_thinking(served: Served) -> None:
    assert "warnings" not in messages(served, USER, thinking={"type": "adaptive"})
    response = served.post("/v1/messages", {"messages": [USER], "max_tokens": 8, "thinking": {"type": "x"}})
    assert response.status_code == 400


def test_hosted_tools_are_left_out(served: Served, strict: Served) -> None:
    body = {"input": "hi", "tools": [FUNCTION, {"type": "web_search"}]}
    reply = served.post("/v1/responses", body).json()
    assert any("tools[1].type" in warning for warning in reply["warnings"])
    assert strict.post("/v1/responses", body).status_code == 400
    assert served.post("/v1/responses", {**body, "tool_choice": {"type": "web_search"}}).status_code == 400
    body = {"messages": [USER], "max_tokens": 8, "tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}
    assert any("tools[1].type" in warning for warning in messages(served, USER, tools=body["tools"])["warnings"])
    assert strict.post("/v1/messages", body).status_code == 400


def test_response_echoes_what_was_asked(served: Served, strict: Served) -> None:
    body = {"input": "hi", "parallel_tool_calls": False, "include": ["x"], "text": {"verbosity": "low"}}
    reply = served.post("/v1/responses", body).json()
    assert reply["parallel_tool_calls"] is False
    assert [warning.split()[0] for warning in reply["warnings"]] == ["text.verbosity", "include"]
    assert strict.post("/v1/responses", body).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
def test_cut_item_is_incomplete(served: Served, stream: bool) -> None:
    text = served.post("/v1/responses", {"input": "hi", "max_output_tokens": 2, "stream": stream}).text
    assert '"status":"incomplete"' in text
    assert '"status":"completed"' not in text


def test_not_given_of_other_clients(served: Served) -> None:
    reply = served.chat(seed=-1, logit_bias=[], max_tokens=-1)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "abcdef"


def test_two_names_of_a_limit(served: Served) -> None:
    reply = served.chat(max_completion_tokens=3, max_tokens=9).json()
    assert (reply["choices"][0]["message"]["content"], len(reply["warnings"])) == ("abc", 1)


def test_key_schemes() -> None:
    with serving(spell("a"), api_keys=("o1",)) as keyed:
        for given, status in (("bearer o1", 200), ("BEARER  o1", 200), ("o1", 401), ("Basic o1", 401)):
            assert keyed.http.get("/v1/models", headers={"Authorization": given}).status_code == status, given
