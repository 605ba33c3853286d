"""OpenAI's responses and Anthropic's messages, through their official clients: whole and streamed
alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from martlet.toy import spell
from tests.server.serving import Served, events, serving

TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} write <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %};{% endfor %}a:"
    "{# </think> #}"
)
ANSWER = (
    '<think>Hm.</think>Now.<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'
    '<tool_call>{"name": "g", "arguments": {}}</tool_call>'
)
FUNCTION: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOOL: Any = {"name": "f", "description": "d", "input_schema": {"type": "object"}}


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with serving(spell("Hello there"), template=TEMPLATE, context=1024) as served:
        yield served


@pytest.fixture(scope="module")
def calling() -> Iterator[Served]:
    with serving(spell(ANSWER), template=TEMPLATE, context=1024) as served:
        yield served


def openai_of(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)


def anthropic_of(served: Served) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=served.base, api_key="none", max_retries=0)


# -- OpenAI's responses ----------------------------------------------------------------------------
def test_response(plain: Served) -> None:
    reply = openai_of(plain).responses.create(model="scripted", input="hi", instructions="Be brief.")
    assert reply.output_text == "Hello there"
    assert (reply.status, reply.object, reply.error) == ("completed", "response", None)
    assert reply.usage is not None
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len("s:Be brief.;u:hi;a:"), 12)
    cut = openai_of(plain).responses.create(model="scripted", input="hi", max_output_tokens=2)
    assert (cut.status, cut.output_text) == ("incomplete", "He")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_response_stream(calling: Served) -> None:
    with openai_of(calling).responses.stream(model="scripted", input="hi", tools=[FUNCTION]) as stream:
        found = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert [event.type for event in found][:2] == ["response.created", "response.in_progress"]
    assert found[-1].type == "response.completed"
    whole = openai_of(calling).responses.create(model="scripted", input="hi", tools=[FUNCTION])
    for reply in (whole, final):
        assert [item.type for item in reply.output] == ["reasoning", "message", "function_call", "function_call"]
        assert reply.output_text == "Now."
        calls = [item for item in reply.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("f", {"x": 1}), ("g", {})]
        assert len({call.call_id for call in calls}) == 2
    # Each item is added, grows and is done, one after the other.
    kinds = [(e.type.removeprefix("response."), getattr(e, "output_index", None)) for e in found]
    assert [index for kind, index in kinds if kind == "output_item.added"] == [0, 1, 2, 3]
    assert [index for kind, index in kinds if kind == "output_item.done"] == [0, 1, 2, 3]
    assert "".join(e.delta for e in found if e.type == "response.output_text.delta") == "Now."


def test_response_goes_on_after_a_call(plain: Served) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c", "output": "ok"},
    ]
    reply = openai_of(plain).responses.create(model="scripted", input=items)  # type: ignore[arg-type]
    assert reply.usage is not None
    assert reply.usage.input_tokens == len('u:hi;a:[f {"x": 1}];t:ok;a:')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": 5}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": 5}, "input"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_a_response_cannot_do_is_refused(plain: Served, fields: dict[str, Any], param: str) -> None:
    response = plain.post("/v1/responses", {"input": "hi", **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_failed_response() -> None:
    script = lambda seq, number: "it broke" if number == 2 else 97  # noqa: E731
    with serving(script) as served:
        last = events(served.post("/v1/responses", {"input": "hi", "stream": True}))[-1]
        assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
        assert "it broke" in last["response"]["error"]["message"]
        assert served.post("/v1/responses", {"input": "hi"}).status_code == 500


# -- Anthropic's messages --------------------------------------------------------------------------
def test_message(plain: Served) -> None:
    client = anthropic_of(plain)
    reply = client.messages.create(
        model="scripted", max_tokens=50, system="Be brief.", messages=[{"role": "user", "content": "hi"}]
    )
    assert (reply.type, reply.role, reply.stop_reason, reply.stop_sequence) == (
        "message",
        "assistant",
        "end_turn",
        None,
    )
    [block] = reply.content
    assert (block.type, block.text) == ("text", "Hello there")  # type: ignore[union-attr]
    assert (reply.usage.input_tokens, reply.usage.output_tokens) == (len("s:Be brief.;u:hi;a:"), 12)
    cut = client.messages.create(model="scripted", max_tokens=2, messages=[{"role": "user", "content": "hi"}])
    assert cut.stop_reason == "max_tokens"
    stopped = client.messages.create(
        model="scripted", max_tokens=50, stop_sequences=["there"], messages=[{"role": "user", "content": "hi"}]
    )
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "there")
    assert stopped.content[0].text == "Hello "  # type: ignore[union-attr]


def test_message_stream(calling: Served) -> None:
    client = anthropic_of(calling)
    ask: Any = {
        "model": "scripted",
        "max_tokens": 500,
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [TOOL],
    }
    with client.messages.stream(**ask) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    whole = client.messages.create(**ask)
    for reply in (whole, final):
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
        assert reply.stop_reason == "tool_use"
        assert reply.content[0].thinking == "Hm."  # type: ignore[union-attr]
        assert reply.content[1].text == "Now."  # type: ignore[union-attr]
        assert [block.input for block in reply.content[2:]] == [{"x": 1}, {}]  # type: ignore[union-attr]
        assert len({block.id for block in reply.content[2:]}) == 2  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    raw = events(calling.post("/v1/messages", {**ask, "stream": True}))
    starts = [event["index"] for event in raw if event["type"] == "content_block_start"]
    stops = [event["index"] for event in raw if event["type"] == "content_block_stop"]
    assert starts == stops == [0, 1, 2, 3]


def test_message_goes_on_after_a_call(plain: Served) -> None:
    conversation: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [
            {"type": "text", "text": "Now."},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"x": 1}},
        ]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "ok"}]},
            {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
        ]},
    ]  # fmt: skip
    client = anthropic_of(plain)
    expected = len('u:hi;a:Now.[f {"x": 1}];t:ok;u:And?;a:')
    assert client.messages.count_tokens(model="scripted", messages=conversation).input_tokens == expected
    reply = client.messages.create(model="scripted", max_tokens=1, messages=conversation)
    assert reply.usage.input_tokens == expected


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": None},
        {"max_tokens": "5"},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": []},
        {"tool_choice": {"type": "any"}},
        {"stream": 1},
        {"metadata": {"user_id": 5}},
    ],
)
def test_what_a_message_cannot_do_is_refused(plain: Served, fields: dict[str, Any]) -> None:
    body = {"model": "scripted", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}], **fields}
    response = plain.post("/v1/messages", body)
    assert response.status_code == 400, response.text
    assert response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_message_errors_reach_the_client(plain: Served) -> None:
    with pytest.raises(anthropic.NotFoundError, match="no model"):
        anthropic_of(plain).messages.create(model="claude", max_tokens=5, messages=[{"role": "user", "content": "hi"}])
    script = lambda seq, number: "it broke" if number == 2 else 97  # noqa: E731
    with serving(script) as served:
        ask: Any = {"model": "scripted", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
        with (
            pytest.raises(anthropic.APIStatusError, match="it broke"),
            anthropic_of(served).messages.stream(**ask) as s,
        ):
            list(s)
