"""The exception tree: every error that a caller may see (read `types.py` next).

A message gives the value, the expectation and what to do. We raise for the mistakes of files,
requests and machines, and assert against our own.
"""

import difflib
from collections.abc import Iterable
from pathlib import Path

ADAPTER_GONE = "adapter_gone"  # code of a RequestError: the adapter was unloaded before the request
# The message of a SampleError if the request's own settings contradict each other: the client's
# fault.
NOTHING_LEFT = (
    "No token may be sampled: the grammar, allowed_token_ids, bad_words, logit_bias and min_tokens of the request leave"
    " none."
)


class MartletError(Exception):
    """Base of every error that Martlet raises on purpose."""


class FormatError(MartletError):
    """A file is not what its format says: truncated, inconsistent or hostile.

    `offset` is the byte of the file where the fault was seen, None if it has no single position.
    """

    def __init__(self, path: str | Path, message: str, *, offset: int | None = None) -> None:
        self.path = str(path)
        self.offset = offset
        self.reason = message
        where = self.path if offset is None else f"{self.path}, at byte {offset:,}"
        super().__init__(f"{where}: {message}")


class UnsupportedError(MartletError):
    """A well-formed input needs a feature that Martlet lacks; `supported` lists the ones it has."""

    def __init__(self, what: str, supported: Iterable[str] = ()) -> None:
        self.what = what
        self.supported = tuple(supported)
        listed = f" Supported: {', '.join(self.supported)}." if self.supported else ""
        super().__init__(f"{what}.{listed}" if not what.endswith((".", "?")) else f"{what}{listed}")


class RequestError(MartletError):
    """A request cannot be accepted (HTTP 400); `param` names the field, `code` is for programs."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        self.param = param
        self.code = code
        super().__init__(message)


class CapacityError(MartletError):
    """There is not enough memory, pages or queue for a request (HTTP 503).

    `retry_after_s` is when to try again, in seconds; None where waiting does not help.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(message)


class OracleError(MartletError):
    """An operation and its reference disagree by more than the stated bound (`--oracle`)."""


class SampleError(MartletError):
    """A sequence's next token cannot be chosen (NaN logits, none allowed); it alone ends."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the known name closest to `name`, or "" if none is close."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""


def shown(value: object, most: int) -> str:
    """The first `most` characters of a value's repr; a few words if it is nested too deep."""
    try:
        return repr(value)[:most]
    except RecursionError:
        return "nested too deep to be shown"
