"""Chat completions over HTTP: the official client, the bytes of a stream, choices,
log-probabilities, ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

from martlet.toy import END, Script, spell
from tests.server.serving import Served, events, serving


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(spell("Hello there")) as server:
        yield server


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)


MESSAGES = [{"role": "user", "content": "hi"}]


def test_whole_reply_through_the_official_client(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="scripted", messages=MESSAGES)  # type: ignore[arg-type]
    assert reply.id.startswith("chatcmpl-")
    assert reply.object == "chat.completion"
    assert reply.model == "scripted"
    [choice] = reply.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "Hello there", "stop")
    assert reply.usage is not None
    # "u:hi;a:" is 7 bytes, "Hello there" 11 and the end token.
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (7, 12, 19)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_stream_through_the_official_client(client: openai.OpenAI) -> None:
    """Fault DET-15: with include_usage, one last chunk without choices."""
    stream = client.chat.completions.create(
        model="scripted",
        messages=MESSAGES,  # type: ignore[arg-type]
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    *rest, last = chunks
    assert "".join(chunk.choices[0].delta.content or "" for chunk in rest) == "Hello there"
    assert rest[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in rest if chunk.choices[0].finish_reason] == ["stop"]
    assert rest[-1].choices[0].finish_reason == "stop"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in rest)


def test_bytes_of_a_stream(served: Served) -> None:
    """Faults DET-13, DET-15: every choice has finish_reason, one is not null, [DONE] comes once, no
    empty choices.
    """
    response = served.chat(stream=True, max_tokens=2)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert response.text.count("[DONE]") == 1
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks[:-1])
    found = [json.loads(block.removeprefix("data: ")) for block in blocks[:-2]]
    assert all(set(chunk["choices"][0]) >= {"index", "delta", "finish_reason"} for chunk in found)
    assert [chunk["choices"][0]["finish_reason"] for chunk in found] == [None, None, None, "length"]
    assert [chunk["choices"][0]["delta"] for chunk in found] == [
        {"role": "assistant", "content": ""},
        {"content": "H"},
        {"content": "e"},
        {},
    ]
    assert all("usage" not in chunk for chunk in found)


@pytest.mark.parametrize("text", ["👩‍👩‍👧‍👦 é", "a🎉"])
def test_no_half_characters(text: str) -> None:
    """Fault DET-01: a byte a token, and no piece has half a character."""
    with serving(spell(text)) as served:
        pieces = [chunk["choices"][0]["delta"].get("content", "") for chunk in events(served.chat(stream=True))]
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)
        # Fault DET-03: cut within the last character, stream and whole agree.
        n = len(text.encode()) - 1
        cut = served.chat(max_tokens=n).json()["choices"][0]
        streamed = events(served.chat(max_tokens=n, stream=True))
        assert cut["finish_reason"] == streamed[-1]["choices"][0]["finish_reason"] == "length"
        assert (
            "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in streamed) == cut["message"]["content"]
        )


@pytest.mark.parametrize(
    ("answer", "stop", "shown"),
    [
        ("ABC DEFGHIJ", ["DEFGHIJ"], "ABC "),  # fault DET-07
        ("foo\n\nbar", ["\n\n"], "foo"),  # fault DET-09
        ("xabc", ["abc", "b"], "xa"),  # fault DET-09: what is complete first ends it
        ("Hello there", "there", "Hello "),
        ("Hello there", ["Helloxxx"], "Hello there"),
    ],
)
def test_stop_strings_never_leak(answer: str, stop: object, shown: str) -> None:
    with serving(spell(answer)) as served:
        whole = served.chat(stop=stop).json()["choices"][0]
        pieces = events(served.chat(stop=stop, stream=True))
    assert (whole["message"]["content"], whole["finish_reason"]) == (shown, "stop")
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in pieces) == shown
    assert pieces[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stop", ["", ["", "END"]])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_empty_stop_string_is_refused(served: Served, path: str, stop: object) -> None:
    """Fault DET-11: alike on both endpoints."""
    body = {"messages": MESSAGES} if "chat" in path else {"prompt": "hi"}
    response = served.post(path, {**body, "stop": stop})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stop"


def by_index(texts: list[str]) -> Script:
    scripts = [spell(text) for text in texts]
    return lambda seq, number: scripts[seq.index](seq, number)


def test_choices_keep_apart() -> None:
    """Fault SRV-21: deltas carry their index, each begins with a role and ends once, joined texts
    are the whole's.
    """
    texts = ["one", "second", "3"]
    with serving(by_index(texts)) as served:
        whole = served.chat(n=3, seed=1).json()["choices"]
        chunks = events(served.chat(n=3, seed=1, stream=True))
    assert [(choice["index"], choice["message"]["content"]) for choice in whole] == list(enumerate(texts))
    for index, text in enumerate(texts):
        own = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert own[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in own if choice["finish_reason"]] == ["stop"]
        assert own[-1]["finish_reason"] == "stop"
        assert "".join(choice["delta"].get("content", "") for choice in own) == text


def test_an_error_in_a_stream_is_its_last_event() -> None:
    """Fault DET-21: an error event, the stream ends, the next request is served."""
    script: Script = lambda seq, number: "it broke" if seq.n_prompt > 7 and number == 2 else spell("abcd")(seq, number)  # noqa: E731
    with serving(script) as served:
        response = served.chat("fail", stream=True)
        assert response.status_code == 200
        *_, last = events(response)
        assert last == {
            "error": {
                "message": "The request failed: it broke",
                "type": "server_error",
                "param": None,
                "code": "engine_error",
            }
        }
        assert "[DONE]" not in response.text
        assert served.chat("fail").status_code == 500
        assert served.chat("hi").json()["choices"][0]["message"]["content"] == "abcd"
        client = openai.OpenAI(base_url=f"{served.base}/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError, match="it broke"):
            list(
                client.chat.completions.create(
                    model="scripted", messages=[{"role": "user", "content": "fail"}], stream=True
                )
            )


def test_request_id_is_the_clients(served: Served) -> None:
    response = served.http.post(
        "/v1/chat/completions", json={"messages": MESSAGES, "max_tokens": 1}, headers={"X-Request-Id": "my-1"}
    )
    assert response.json()["id"] == "chatcmpl-my-1"
    assert response.headers["x-request-id"] == "my-1"


def test_ids_of_the_end() -> None:
    with serving(lambda seq, number: 65 if number < 3 else END) as served:
        choice = served.chat(stop_token_ids=[65]).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == ("", "stop", 65)
