"""Rate limits per caller: requests and tokens a minute, as token buckets (read `gate.py` first).

A caller is an API key, or an address if there are no keys. Each has a bucket of requests and a
bucket of tokens; both refill at a constant rate. A request takes its prompt and the most that it
may generate out of the bucket when it is accepted, and returns the unused rest at its end. So no
caller has more than a minute's worth under way. Cached tokens count too.
"""

import math
import time
from collections import OrderedDict
from collections.abc import Callable

from martlet.server.error_replies import ApiError
from martlet.server.settings import ServerSettings

RATE_HEADERS = tuple(
    f"x-ratelimit-{what}-{of}" for what in ("limit", "remaining", "reset") for of in ("requests", "tokens")
)
MAX_CALLERS = 4096  # with buckets; the least recently used are dropped


class Bucket:
    """A token bucket with a capacity of one minute."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.size = per_minute
        self._level, self._then = float(per_minute), now

    def level(self, now: float) -> float:
        """The content; negative if requests used more than they had taken."""
        self._level = min(float(self.size), self._level + (now - self._then) * self.size / 60)
        self._then = now
        return self._level

    def wait_s(self, count: float, now: float) -> float:
        """Take `count`, at most a full bucket, and return 0.0; else return the seconds to wait."""
        missing = min(count, self.size) - self.level(now)
        if missing > 0:
            return missing * 60 / self.size
        self._level -= min(count, self.size)
        return 0.0

    def put_back(self, count: float) -> None:
        """Return the unused rest; a negative count takes more."""
        self._level = min(float(self.size), self._level + count)

    def full_s(self, now: float) -> float:
        """Seconds until it is full."""
        return (self.size - self.level(now)) * 60 / self.size


class Account:
    """A caller's buckets."""

    def __init__(self, requests: Bucket | None, tokens: Bucket | None, clock: Callable[[], float]) -> None:
        self._requests, self._tokens, self._clock = requests, tokens, clock

    def take_request(self) -> None:
        """Count a request; ApiError 429 above the limit."""
        if self._requests is not None and (wait := self._requests.wait_s(1, self._clock())):
            raise _too_many("Too many requests; see Retry-After.", wait)

    def take_tokens(self, count: int) -> Callable[[int], None]:
        """Take the tokens that a request may use; ApiError 429 above the limit.

        Call the result once, with the number of tokens that it has used.
        """
        bucket = self._tokens
        if bucket is None:
            return lambda used: None
        if wait := bucket.wait_s(count, self._clock()):
            left = max(0, math.floor(bucket.level(self._clock())))
            beyond = "" if count <= bucket.size else " (a larger request waits for a full bucket)"
            raise _too_many(
                f"Too many tokens: the request may use {count:,} (its prompt and max_tokens), and {left:,} of {bucket.size:,}"
                f" a minute are left{beyond}; see Retry-After, or ask for less.",
                wait,
            )
        taken = min(count, bucket.size)
        return lambda used: bucket.put_back(taken - used)

    def headers(self) -> dict[str, str]:
        """The state of the buckets under OpenAI's header names."""
        now, headers = self._clock(), {}
        for name, bucket in (("requests", self._requests), ("tokens", self._tokens)):
            if bucket is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(bucket.size)
                headers[f"x-ratelimit-remaining-{name}"] = str(max(0, math.floor(bucket.level(now))))
                headers[f"x-ratelimit-reset-{name}"] = _duration(bucket.full_s(now))
        return headers


class Rates:
    """The accounts of all callers."""

    def __init__(self, settings: ServerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = settings.requests_per_minute, settings.tokens_per_minute
        self._clock = clock
        self._accounts: OrderedDict[str, Account] = OrderedDict()  # least recently used first

    def account(self, caller: str) -> Account:
        """The buckets of a caller; a new caller's are full."""
        account = self._accounts.pop(caller, None)
        if account is None:
            requests, tokens = (None if limit is None else Bucket(limit, self._clock()) for limit in self._limits)
            account = Account(requests, tokens, self._clock)
        self._accounts[caller] = account
        if len(self._accounts) > MAX_CALLERS:
            self._accounts.popitem(last=False)
        return account


def _too_many(message: str, wait_s: float) -> ApiError:
    after = {"Retry-After": str(max(1, round(wait_s + 0.5)))}
    return ApiError(429, message, code="rate_limit_exceeded", headers=after)


def _duration(seconds: float) -> str:
    """A duration in OpenAI's form: 120ms, 1.5s, 6m0s."""
    if seconds < 1:
        return f"{math.ceil(1000 * seconds)}ms"
    minutes, rest = divmod(math.ceil(10 * seconds) / 10, 60)
    return f"{minutes:.0f}m{rest:g}s" if minutes else f"{rest:g}s"
