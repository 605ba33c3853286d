"""Requests and tokens a minute, for each caller (ask 32, idea 19)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from martlet.server.error_replies import ApiError
from martlet.server.rates import Bucket, Rates
from martlet.server.settings import ServerSettings
from martlet.toy import spell
from tests.server.serving import serving, wait_until

PROMPT = len("u:hi;a:")  # tokens of "hi" in the scripted server's template: its bytes


class Clock:
    """Time that a test tells."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_bucket_fills_up() -> None:
    """60 a minute is one a second."""
    bucket = Bucket(60, 0.0)
    assert [bucket.wait_s(1, 0.0) for _ in range(61)] == [0.0] * 60 + [1.0]
    assert bucket.wait_s(1, 0.5) == 0.5
    assert bucket.wait_s(1, 1.0) == 0.0
    assert bucket.full_s(1.0) == 60.0
    assert bucket.wait_s(30, 11.0) == 20.0  # ten of thirty are there
    assert bucket.wait_s(1, 1000.0) == 0.0
    assert bucket.full_s(1000.0) == 1.0


def test_tokens_are_taken_and_what_is_left_is_put_back() -> None:
    """By hand: 600 a minute are 10 a second."""
    clock = Clock()
    rates = Rates(ServerSettings(tokens_per_minute=600), clock)
    a, b = rates.account("a"), rates.account("b")
    ended = a.take_tokens(500)
    with pytest.raises(ApiError, match=r"may use 200 .* 100 of 600 a minute are left") as refused:
        a.take_tokens(200)
    assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
    assert refused.value.headers == {"Retry-After": "10"}  # for a hundred more
    b.take_tokens(600)  # another's bucket
    ended(40)
    assert rates.account("a").headers() == {
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "560",
        "x-ratelimit-reset-tokens": "4s",
    }
    clock.now = 3.95
    assert a.headers()["x-ratelimit-reset-tokens"] == "50ms"
    clock.now = 1000.0
    a.take_tokens(10**6)(700)  # more than a bucket holds takes all of it, and leaves a debt
    assert a.headers()["x-ratelimit-remaining-tokens"] == "0"
    assert a.headers()["x-ratelimit-reset-tokens"] == "1m10s"
    clock.now = 1010.0
    with pytest.raises(ApiError) as refused:
        a.take_tokens(1)
    assert refused.value.headers == {"Retry-After": "1"}
    clock.now = 1010.2
    a.take_tokens(1)


def test_who_has_been_away_for_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("martlet.server.rates.MAX_CALLERS", 2)
    rates = Rates(ServerSettings(requests_per_minute=1), Clock())
    for caller in ("a", "b", "a", "c"):
        rates.account(caller)
    assert list(rates._accounts) == ["a", "c"]


def remaining(answer: httpx.Response) -> int:
    return int(answer.headers["x-ratelimit-remaining-tokens"])


def test_what_a_request_may_use_is_taken_and_what_it_did_not_is_put_back() -> None:
    """Seven tokens of prompt, three of an answer of at most 50 with its end; then there are 100 -
    11 left.
    """
    with serving(spell("abc"), tokens_per_minute=100, requests_per_minute=20) as served:
        answer = served.chat(max_tokens=50)
        assert answer.status_code == 200
        assert answer.json()["usage"]["total_tokens"] == PROMPT + 4
        assert answer.headers["x-ratelimit-limit-tokens"] == "100"
        assert answer.headers["x-ratelimit-limit-requests"] == "20"
        assert answer.headers["x-ratelimit-remaining-requests"] == "19"
        assert answer.headers["x-ratelimit-reset-requests"] == "3s"
        shown = remaining(served.http.get("/v1/models"))
        assert 100 - (PROMPT + 4) <= shown <= 100 - (PROMPT + 4) + 2  # it fills by 1.7 a second
        refused = served.chat(max_tokens=95)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert 1 <= int(refused.headers["retry-after"]) <= 8
        assert remaining(refused) >= shown  # it has taken nothing
        assert served.http.get("/health").headers.get("x-ratelimit-limit-tokens") is None


def test_streams_batches_and_refusals_are_settled() -> None:
    with serving(spell("abc"), tokens_per_minute=100_000) as served:
        for body in ({"stream": True}, {"n": 3}, {}, {"max_tokens": 2}):
            assert served.chat(**body).status_code == 200
        served.post("/v1/completions", {"prompt": ["aa", "bb"], "max_tokens": 4})
        assert served.chat("x" * 400).status_code == 400  # it can never run
        assert served.chat(best_of=2, stream=True).status_code == 400
        used = (PROMPT + 4) + (PROMPT + 12) + (PROMPT + 4) + (PROMPT + 2) + 2 * (2 + 4)
        wait_until(lambda: not served.service.bridge.open_tickets)
        assert served.service._refunds == {}
        # 1,667 come back a second, so that it may be full again: look at what was taken while
        # nothing has been.
        assert remaining(served.http.get("/v1/models")) >= 100_000 - used


def test_embeddings_count() -> None:
    with serving(spell("abc"), tokens_per_minute=60) as served:
        first: Any = served.post("/v1/embeddings", {"input": "x" * 50})
        second = served.post("/v1/embeddings", {"input": "x" * 50})
        assert (first.status_code, second.status_code) == (200, 429)


def test_embeddings_beyond_a_bucket_leave_a_debt() -> None:
    """150 of 60 tokens a minute: 90 are owed, so that one more may come after 91 s; with 10 a
    minute's worth is back.
    """
    with serving(spell("abc"), tokens_per_minute=60) as served:
        assert served.post("/v1/embeddings", {"input": ["x" * 50] * 3}).status_code == 200
        refused = served.post("/v1/embeddings", {"input": "x"})
        assert refused.status_code == 429
        assert 85 <= int(refused.headers["retry-after"]) <= 92


def test_what_can_never_run_is_refused_for_that() -> None:
    """Not with a 429 and a time after which it could come again; and what is cut to the context
    counts as it is cut.
    """
    with serving(spell("abc"), tokens_per_minute=400) as served:
        assert served.chat(max_tokens=5).status_code == 200  # the bucket is not full
        for answer in (served.chat("x" * 5000), served.post("/v1/completions", {"prompt": "x" * 500})):
            assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
        # 256 at most, in the scripted server's context
        assert served.chat(max_tokens=10**6).status_code == 200
        refused = served.chat(max_tokens=200, n=3)
        assert refused.status_code == 429
        assert "a larger request waits for a full bucket" in refused.json()["error"]["message"]


def test_pages_may_read_the_limits() -> None:
    origin = "http://page.example"
    for limits, seen in (({"tokens_per_minute": 9}, True), ({}, False)):
        with serving(spell("abc"), cors_origins=(origin,), **limits) as served:
            answer = served.http.get("/v1/models", headers={"Origin": origin})
            exposed = answer.headers["access-control-expose-headers"].split(", ")
            assert ("x-ratelimit-remaining-tokens" in exposed) is seen
            assert "Retry-After" in exposed


def test_a_caller_that_leaves_pays_for_what_it_got() -> None:
    with serving(spell("a" * 200), tokens_per_minute=1000, step_s=0.01) as served:
        with served.http.stream("POST", "/v1/chat/completions", json=body(True, max_tokens=180)) as answer:
            assert remaining(answer) <= 1000 - PROMPT - 180 + 5
            next(answer.iter_bytes())
        wait_until(lambda: not served.service.bridge.open_tickets)
        assert remaining(served.http.get("/v1/models")) > 1000 - PROMPT - 180 + 5


def body(stream: bool, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}], "stream": stream, **fields}


def test_one_key_that_floods_leaves_another_its_answers() -> None:
    """idea 19's check: while one key asks for all it can, the other's longest time to an answer
    stays what it was.
    """
    keys = {name: {"Authorization": f"Bearer {name}"} for name in ("loud", "quiet")}
    with serving(spell("abc"), api_keys=("loud", "quiet"), tokens_per_minute=400, step_s=0.002, n_pages=64) as served:

        def ask(name: str) -> tuple[int, float]:
            answer = served.post("/v1/chat/completions", body(False, max_tokens=20), headers=keys[name])
            return answer.status_code, answer.elapsed.total_seconds()

        alone = max(ask("quiet")[1] for _ in range(10))
        with ThreadPoolExecutor(8) as pool:
            flood = [pool.submit(ask, "loud") for _ in range(200)]
            beside = [ask("quiet") for _ in range(10)]
            codes = [job.result()[0] for job in flood]
        assert [code for code, _ in beside] == [200] * 10
        # 400 tokens are 400 / 27 requests at a time, of 11 each in the end
        assert codes.count(429) > 100
        assert max(seconds for _, seconds in beside) < alone + 0.5
