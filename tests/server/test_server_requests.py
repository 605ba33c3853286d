"""Odd bodies: each is honoured, or refused with the name of the field, in a small answer; the
server goes on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from martlet.toy import spell
from tests.server.serving import Served, serving

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("Hello there"), max_n=8) as server:
        yield server
        server.check_idle()


def refused(response: Any, param: str | None, status: int = 400) -> dict[str, Any]:
    """An error in OpenAI's shape that names `param`."""
    assert response.status_code == status, response.text
    assert len(response.content) < 10_000  # fault SRV-13
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param, error
    return error


def test_null_is_absent(served: Served) -> None:
    """Fault SRV-01."""
    names = ["temperature", "max_tokens", "stop", "tools", "stream_options", "n", "seed", "logprobs", "response_format",
             "stream", "user", "tool_choice", "logit_bias", "top_logprobs", "max_completion_tokens", "reasoning_effort"]  # fmt: skip
    reply = served.chat(**dict.fromkeys(names))
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["message"]["content"] == "Hello there"
    assert "warnings" not in reply.json()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("stream", "true"),
        ("max_tokens", "256"),
        ("messages", {}),
        ("messages", "hi"),
        ("temperature", []),
        ("temperature", "0.5"),
        ("temperature", -1),
        ("top_p", 2),
        ("n", 1.5),
        ("seed", "1"),
        ("stop", 5),
        ("stop", [5]),
        ("logprobs", 1),
        ("logit_bias", {"a": 1}),
        ("stream_options", []),
        ("tools", {}),
        ("user", 7),
        ("priority", "high"),
        ("model", 5),
        ("max_completion_tokens", 1.5),
        ("chat_template_kwargs", []),
        ("stop_token_ids", [-1]),
        ("min_tokens", 20_000),
    ],
)
def test_wrong_types_are_refused(served: Served, field: str, value: object) -> None:
    """Fault SRV-03."""
    body = {"messages": MESSAGES, "max_tokens": 10} | {field: value}
    refused(served.post(CHAT, body), field)


def test_nested_field_is_named(served: Served) -> None:
    refused(served.chat(stream_options={"include_usage": "yes"}), "stream_options.include_usage")
    refused(served.post(CHAT, {"messages": [{"role": "user", "content": "a"}, "b"]}), "messages[1]")
    refused(served.post(CHAT, {}), "messages")
    refused(served.post(CHAT, {"messages": []}), "messages")
    refused(served.post(CHAT, {"messages": [{"role": "user"}]}), "messages[0].content")


@pytest.mark.parametrize("n", [1_000_000, 0, -1])
@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_n_is_bounded(served: Served, path: str, n: int) -> None:
    """Fault SRV-09."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    refused(served.post(path, {**body, "n": n}), "n")
    refused(served.post(path, {**body, "best_of": 10**6}), "best_of")


def test_more_answers_than_allowed(served: Served) -> None:
    refused(served.chat(n=9), "n")
    refused(served.post(TEXT, {"prompt": ["a"] * 9}), "prompt")
    refused(served.post(TEXT, {"prompt": ["a"] * 3, "n": 3}), "prompt")


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 20_000 + b"]" * 20_000,
        b'{"messages":' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"messages": [' + b'{"a":' * 100 + b"1" + b"}" * 100 + b"]}",
        b"",
        b"null",
        b"[]",
        b'"text"',
        b"{",
        b'{"messages": NaN}',
        b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
        b'{"prompt": "a\\ud83d b"}',  # fault SRV-15: half a character
        b"\x00" * 100,
    ],
    ids=[
        "deep",
        "deep field",
        "100 levels",
        "empty",
        "null",
        "list",
        "string",
        "cut",
        "NaN",
        "not UTF-8",
        "half",
        "zeros",
    ],
)
def test_what_is_no_request_is_refused(served: Served, body: bytes) -> None:
    """Faults SRV-05, SRV-15."""
    error = refused(served.post(CHAT, body), None)
    assert error["code"] == "invalid_json"


def test_pair_of_surrogates_is_one_character(served: Served) -> None:
    """Fault SRV-15."""
    assert served.post("/tokenize", b'{"prompt": "\\ud83d\\ude00"}').json()["tokens"] == list("😀".encode())


def test_many_faults_make_a_small_answer(served: Served) -> None:
    """Fault SRV-13."""
    refused(served.post(CHAT, {"messages": [{"role": 1}] * 10_000}), "messages[0].role")
    refused(served.post(CHAT, {"messages": [5] * 10_000}), "messages[0]")
    refused(served.post(CHAT, {"messages": MESSAGES, "stop": ["x" * 100_000]}), "stop")
    refused(served.post(CHAT, {"messages": MESSAGES, "model": "x" * 100_000}), "model", 404)


def test_body_is_bounded() -> None:
    with serving(spell("a"), max_body_bytes=1000) as served:
        refused(served.post(CHAT, b" " * 1001), None, 413)

        def parts() -> Iterator[bytes]:  # in chunks, the size not announced
            for _ in range(100):
                yield b" " * 100

        assert served.http.post(CHAT, content=parts()).status_code == 413
        served.check_idle()


@pytest.mark.parametrize("prompt", [[-1], [[-1]], [257], [[0], [1 << 40]], [], "", [[]], [""], [1, "a"], {"a": 1}])
def test_prompts_that_are_none(served: Served, prompt: object) -> None:
    """Fault SRV-19: token ids below zero, or beyond the vocabulary."""
    response = served.post(TEXT, {"prompt": prompt})
    assert response.status_code == 400
    assert str(response.json()["error"]["param"]).startswith("prompt")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"suffix": "x"}, "suffix"),
        (CHAT, {"tool_choice": "required"}, "tool_choice"),
        (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"tool_choice": "sometimes"}, "tool_choice"),
        (CHAT, {"response_format": {"type": "json_object"}}, "response_format"),
        (TEXT, {"response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {"guided_regex": "foo**"}, "guided_regex"),  # fault STR-19
        # STR-23
        (CHAT, {"guided_grammar": "root ::= " + "(" * 60_000 + '"a"' + ")" * 60_000}, "guided_grammar"),
        (CHAT, {"guided_regex": ""}, "guided_regex"),
        (CHAT, {"guided_json": ""}, "guided_json"),
        (TEXT, {"guided_grammar": ""}, "guided_grammar"),
        (CHAT, {"guided_choice": []}, "guided_choice"),
        (CHAT, {"tools": [{"type": "function"}]}, "tools[0]"),
        (CHAT, {"tools": [TOOL, {"type": "function", "function": {"name": ""}}]}, "tools[1]"),
        (CHAT, {"tools": [TOOL, {"type": "custom", "name": "g"}]}, "tools[1]"),
        (CHAT, {"tools": [TOOL, TOOL]}, "tools[1]"),
        (CHAT, {"tools": [TOOL, TOOL], "tool_choice": "none"}, "tools[1]"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"modalities": ["audio"]}, "modalities"),
        (CHAT, {"top_logprobs": 3}, "top_logprobs"),
        (CHAT, {"chat_template": "{{ ''.__class__.__mro__ }}"}, "chat_template"),
        (CHAT, {"best_of": 3, "stream": True}, "best_of"),
        (CHAT, {"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    served: Served, path: str, fields: dict[str, Any], param: str
) -> None:
    """Ask 33, and faults STR-19 and STR-23: nothing is ignored in silence."""
    body = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    assert param in refused(served.post(path, {**body, **fields}), param)["message"]


def test_unknown_fields_are_listed(served: Served) -> None:
    """Ask 33."""
    response = served.chat(temprature=1, zzz=None, qqq=[])
    assert response.status_code == 200
    assert response.headers["x-martlet-ignored"] == "temprature, qqq"
    assert response.json()["warnings"][0] == (
        "The field 'temprature' is not known and was ignored. Did you mean 'temperature'?"
    )
    last = json.loads(served.chat(temprature=1, stream=True).text.split("\n\n")[-3].removeprefix("data: "))
    assert "temprature" in last["warnings"][0]
    assert "x-martlet-ignored" not in served.chat().headers


def test_strict_refuses_them() -> None:
    with serving(spell("a"), strict=True) as served:
        assert "'temperature'" in refused(served.chat(temprature=1), "temprature")["message"]
        assert served.chat(temperature=1).status_code == 200


def test_context_overflow_is_said_in_numbers(served: Served) -> None:
    """Ask 35: before any work."""
    error = refused(served.chat("x" * 300), "prompt")
    assert "305" in error["message"]
    assert "256" in error["message"]


def test_more_tokens_than_the_context_holds(served: Served) -> None:
    """Ask 35: clients ask for round numbers, so it is said; with --strict it is refused."""
    reply = served.chat(max_tokens=1000).json()
    assert reply["choices"][0]["message"]["content"] == "Hello there"
    assert reply["warnings"] == [
        "max_tokens is 1,000 and the prompt has 7 tokens: 751 more than the context of 256 holds. The answer ends there."
    ]
    with serving(spell("a"), strict=True) as other:
        refused(other.chat(max_tokens=1000), "max_tokens")


def test_unknown_model_and_paths(served: Served) -> None:
    refused(served.chat(model="gpt-5"), "model", 404)
    assert served.chat(model="scripted").status_code == 200
    refused(served.http.get("/nothing"), None, 404)
    refused(served.http.get(CHAT), None, 405)


def test_what_a_template_says_is_passed_on() -> None:
    """Fault TPL-06: the template's words only."""
    template = "{{ raise_exception('Only one user message, please.') }}"
    with serving(spell("a"), template=template) as served:
        assert refused(served.chat(), "messages")["message"] == "Only one user message, please."


def test_parts_are_joined(served: Served) -> None:
    """Fault TPL-14."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    ids = [
        served.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json()["tokens"]
        for content in (parts, "ab")
    ]
    assert ids[0] == ids[1] == list(b"u:ab;a:")
    image = {"type": "image_url", "image_url": {"url": "x"}}
    refused(served.post(CHAT, {"messages": [{"role": "user", "content": [image]}]}), "messages[0].content[0].type")


def test_explain_is_what_would_run(served: Served) -> None:
    """Ask 43."""
    body = {"messages": MESSAGES, "stop": ["x"], "temperature": 0.5, "stop_token_ids": [3]}
    found = served.post("/v1/explain", body).json()
    assert found["prompt"] == "u:hi;a:"
    assert found["prompt_token_ids"] == list(b"u:hi;a:")
    assert found["stop"] == ["x"]
    assert found["stop_token_ids"] == [3, 256]
    assert found["settings"]["temperature"] == {"value": 0.5, "origin": "option"}
    assert found["settings"]["top_p"] == {"value": 1.0, "origin": "default"}
    assert "for m in messages" in found["chat_template"]
    text = served.post("/v1/explain", {"prompt": [104, 105]}).json()
    assert (text["prompt"], text["prompt_token_ids"], text["chat_template"]) == ("hi", [104, 105], None)
    assert served.gauge("request_success_total") == served.gauge("request_success_total")


def test_tokenize_and_back(served: Served) -> None:
    reply = served.post("/tokenize", {"prompt": "hé", "return_token_strs": True}).json()
    assert reply["tokens"] == [0x68, 0xC3, 0xA9]
    assert reply["count"] == 3
    assert served.post("/detokenize", {"tokens": [0x68, 0xC3, 0xA9]}).json() == {"prompt": "hé"}
    assert served.post("/detokenize", {"tokens": [-1]}).status_code == 400
    refused(served.post("/tokenize", {}), "prompt")
    refused(served.post("/detokenize", {"tokens": ["a"]}), "tokens[0]")


def test_openapi_describes_every_route(served: Served) -> None:
    found = served.http.get("/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    assert set(found["paths"]) >= {CHAT, TEXT, "/v1/messages", "/v1/models/{name}", "/metrics"}
    body = found["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    own, sampling = (found["components"]["schemas"][part["$ref"].rsplit("/", 1)[1]] for part in body["allOf"])
    assert own["required"] == ["messages"]
    assert own["properties"]["stream"]["type"] == "boolean"
    assert {"temperature", "top_k", "stop", "seed"} <= set(sampling["properties"])
