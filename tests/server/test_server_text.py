"""Completions, log-probabilities, embeddings, tool calls: what the replies hold, through the
official client too.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from martlet.toy import spell
from martlet.types import Sampled, TokenLogprobs
from tests.server.serving import Served, events, serving

TEXT = "/v1/completions"
TOOLS_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} write <tool_call> {% endif %}"
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALLS = 'Now.\n<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>\n<tool_call>{"name": "g", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("abc")) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)


def test_prompts_in_every_form(served: Served) -> None:
    for prompt, n_choices, n_tokens in (
        ("hi", 1, 2),
        (["hi", "you"], 2, 5),
        ([104, 105], 1, 2),
        ([[104, 105], [121]], 2, 3),
        (["hi", [121]], 2, 3),
    ):
        reply = served.post(TEXT, {"prompt": prompt}).json()
        assert [choice["index"] for choice in reply["choices"]] == list(range(n_choices))
        assert all(choice["text"] == "abc" and choice["finish_reason"] == "stop" for choice in reply["choices"])
        assert reply["usage"]["prompt_tokens"] == n_tokens
        assert reply["object"] == "text_completion"


def test_echo(served: Served, client: openai.OpenAI) -> None:
    reply = client.completions.create(model="scripted", prompt=["hi", "yo"], echo=True)
    assert [choice.text for choice in reply.choices] == ["hiabc", "yoabc"]
    chunks = list(client.completions.create(model="scripted", prompt=["hi", "yo"], echo=True, stream=True))
    for index, text in enumerate(("hiabc", "yoabc")):
        assert "".join(c.choices[0].text for c in chunks if c.choices[0].index == index) == text


def test_default_length_is_openais(served: Served) -> None:
    with serving(spell("x" * 40)) as other:
        assert other.post(TEXT, {"prompt": "hi"}).json()["usage"]["completion_tokens"] == 16
        # to its end, not to a default
        assert other.chat().json()["usage"]["completion_tokens"] == 41


def test_text_begins_with_what_was_generated(served: Served) -> None:
    """Fault DET-05: the prompt's ids end within a character."""
    ids = [*b"Hello world ", *"🌶".encode()[:2]]
    pieces = [chunk["choices"][0]["text"] for chunk in events(served.post(TEXT, {"prompt": ids, "stream": True}))]
    assert "".join(pieces) == "abc"


class Scored:
    """An executor whose tokens have log-probabilities: the token itself -0.5, rank 2; "!" is best;
    "?" impossible.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def run(self, plan: Any, started: Any = ()) -> Any:
        from dataclasses import replace

        result = self.inner.run(plan, started)
        found = []
        for one in result.sampled:
            logprobs = None if one.token_id is None else TokenLogprobs(
                one.token_id, -0.5, 2, ((33, -0.25), (one.token_id, -0.5), (63, float("-inf")))
            )  # fmt: skip
            found.append(Sampled(one.seq, one.token_id, logprobs, one.prompt_logprobs, one.error))
        return replace(result, sampled=tuple(found))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.fixture(scope="module")
def scored() -> Iterator[Served]:
    with serving(spell("Hello é there END of it")) as server:
        server.service.built.engine.executor = Scored(server.executor)
        yield server


def strict(text: str) -> Any:
    def no(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=no)


@pytest.mark.parametrize("stop", [None, ["END"], ["there E"], ["ére"]])
def test_logprobs_are_those_of_the_text(scored: Served, stop: object) -> None:
    """Faults DET-17, DET-19: one entry a token of the text, the chosen one, in the stream with its
    text.
    """
    fields = {"logprobs": True, "top_logprobs": 3, "stop": stop}
    whole = strict(scored.chat(**fields).text)["choices"][0]
    text = whole["message"]["content"]
    entries = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert all(entry["logprob"] == -0.5 for entry in entries)
    assert [(top["token"], top["logprob"]) for top in entries[0]["top_logprobs"]] == [
        ("!", -0.25),
        ("H", -0.5),
        ("?", -9999.0),
    ]
    streamed, so_far = [], ""
    for chunk in events(scored.chat(**fields, stream=True)):
        choice = chunk["choices"][0]
        so_far += choice["delta"].get("content", "")
        streamed += (choice["logprobs"] or {"content": []})["content"]
        assert b"".join(bytes(entry["bytes"]) for entry in streamed).decode() == so_far
    assert streamed == entries
    assert so_far == text


def test_logprobs_of_completions(scored: Served) -> None:
    body = {"prompt": "hi", "logprobs": 1, "max_tokens": 2, "echo": True}
    found = strict(scored.post(TEXT, body).text)["choices"][0]
    assert found["text"] == "hiHe"
    assert found["logprobs"]["tokens"] == ["h", "i", "H", "e"]
    assert found["logprobs"]["token_logprobs"] == [None, -1.0, -0.5, -0.5]
    assert found["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert found["logprobs"]["top_logprobs"][0] is None
    chunks = events(scored.post(TEXT, body | {"stream": True}))
    joined = [
        value for c in chunks if c["choices"][0]["logprobs"] for value in c["choices"][0]["logprobs"]["text_offset"]
    ]
    assert joined == [0, 1, 2, 3]
    # Nothing generated: what evaluation harnesses ask for.
    only = scored.post(TEXT, body | {"max_tokens": 0}).json()["choices"][0]
    assert (only["text"], only["logprobs"]["token_logprobs"]) == ("hi", [None, -1.0])


def test_best_of(scored: Served) -> None:
    reply = scored.post(TEXT, {"prompt": "hi", "best_of": 3, "n": 1, "max_tokens": 2}).json()
    assert [choice["text"] for choice in reply["choices"]] == ["He"]
    assert reply["usage"]["completion_tokens"] == 6  # all that was generated


def test_embeddings(served: Served, client: openai.OpenAI) -> None:
    """The scripted model's vector is (number of tokens, 0), so scaled it is (1, 0)."""
    reply = client.embeddings.create(model="scripted", input=["hi", "you"])  # base64 under the hood
    assert [entry.embedding for entry in reply.data] == [[1.0, 0.0], [1.0, 0.0]]
    assert [entry.index for entry in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == 5
    plain = served.post("/v1/embeddings", {"input": [104]}).json()["data"][0]["embedding"]
    coded = served.post("/v1/embeddings", {"input": [104], "encoding_format": "base64"}).json()["data"][0]["embedding"]
    assert list(struct.unpack("<2f", base64.b64decode(coded))) == plain == [1.0, 0.0]
    for body, param in (
        ({"input": "hi", "dimensions": 1}, "dimensions"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": "x" * 300}, "input"),
        ({"input": "hi", "encoding_format": "hex"}, "encoding_format"),
    ):
        response = served.post("/v1/embeddings", body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_tool_calls() -> None:
    """Faults SRV-23, SRV-25: index 0 and 1, ids of their own, "tool_calls", whole and streamed
    alike.
    """
    with serving(spell(CALLS), template=TOOLS_TEMPLATE) as served:
        whole = served.chat(tools=[TOOL]).json()["choices"][0]
        client = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
        with client.chat.completions.stream(
            model="scripted",
            messages=[{"role": "user", "content": "hi"}],
            tools=[TOOL],  # type: ignore[list-item]
        ) as stream:
            for _ in stream:
                pass
            final = stream.get_final_completion().choices[0]
        without = served.chat(tools=[TOOL], tool_choice="none").json()["choices"][0]
        plain = served.chat().json()["choices"][0]
    assert whole["finish_reason"] == final.finish_reason == "tool_calls"
    assert whole["message"]["content"] == final.message.content == "Now."
    calls = whole["message"]["tool_calls"]
    assert [(call["type"], call["function"]["name"]) for call in calls] == [("function", "f"), ("function", "g")]
    assert [json.loads(call["function"]["arguments"]) for call in calls] == [{"x": "é"}, {}]
    assert len({call["id"] for call in calls}) == 2
    assert final.message.tool_calls is not None
    assert [call.function.arguments for call in final.message.tool_calls] == [  # type: ignore[union-attr]
        call["function"]["arguments"] for call in calls
    ]
    assert len({call.id for call in final.message.tool_calls}) == 2
    # Tools that may not be used are not read out of the text, and none were given here.
    assert without["finish_reason"] == plain["finish_reason"] == "stop"
    assert without["message"]["content"] == plain["message"]["content"] == CALLS


def test_tools_that_the_template_does_not_write_are_refused() -> None:
    with serving(spell("a")) as served:
        response = served.chat(tools=[TOOL])
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


def test_reasoning_is_kept_apart() -> None:
    template = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:{# </think> #}"
    with serving(spell("<think>Hm.</think>\n\nYes."), template=template) as served:
        message = served.chat().json()["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
        deltas = [chunk["choices"][0]["delta"] for chunk in events(served.chat(stream=True))]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
        assert "".join(delta.get("content", "") for delta in deltas) == "Yes."
        hidden = served.chat(include_reasoning=False).json()["choices"][0]["message"]
        assert hidden == {"role": "assistant", "content": "Yes."}
    with serving(spell("<think>Hm.</think>Yes."), template=template, reasoning_parser="none") as served:
        assert served.chat().json()["choices"][0]["message"]["content"] == "<think>Hm.</think>Yes."
