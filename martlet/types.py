"""The spine: the types that one request passes through (read `engine/engine.py` next).

    Request → Sequence → Span → StepPlan → StepResult → Event

A request is what a caller asked for; a sequence is its state in the engine; a span is a run of
positions to compute in one step; a plan is the list of spans of a step; a result is what the step
sampled; an event is what the caller sees. Scheduler and cache see integers only: no array type
appears in this file.

None of them changes once it is made, but for the sequence. Spans, samples and events are not frozen
nevertheless: a step makes one of each for every sequence that runs, and freezing them takes longer
than planning them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from martlet.errors import RequestError
from martlet.sampling_params import SamplingParams

SeqId = NewType("SeqId", int)
PageId = NewType("PageId", int)
SlotId = NewType("SlotId", int)  # a place for one page in the second tier

# the stop reason of an answer in which a string was ended because it was too long
GRAMMAR_LIMIT = "grammar_limit"


class FinishReason(StrEnum):
    """Why a sequence ended; every accepted request ends in exactly one of these."""

    STOP = "stop"  # an end-of-sequence token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up
    ABORT = "abort"  # the caller asked for it
    ERROR = "error"  # it failed; the event carries the message


class MissReason(StrEnum):
    """Why a prompt's cached prefix ends where it ends."""

    END = "end"  # all of it was cached, but for the last token, which is always computed
    # the cache ends there: nothing that goes on like it, or begins like it, was ever computed
    EMPTY = "empty"
    DIFFERS = "differs"  # another token stands there in the cache
    EVICTED = "evicted"  # it was cached, and had to make room
    SALT = "salt"  # it is cached under another cache salt only
    SCORED = "scored"  # its log-probabilities were asked for, so it is computed
    OFF = "off"  # the prefix cache is off


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What the prefix cache gave a sequence when it was admitted."""

    n_tokens: int = 0  # positions that were not computed again
    n_loaded: int = 0  # of them, from the second tier
    reason: MissReason = MissReason.EMPTY  # why not more
    # DIFFERS: the token that stands in the cache at position differs_at
    cached_id: int | None = None
    differs_at: int | None = (
        None  # n_tokens, or after it: tokens between the two are cached where they cannot be shared
    )


MOST_PRIORITY = 1 << 31  # in size: beyond it times of arrival would be lost in a policy's sums
MOST_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class Scheduling:
    """When a request wants to run, and with whom it shares. Times in seconds from its arrival.

    Raises RequestError, naming the field, for a value that is not one.
    """

    priority: int = 0  # lower runs first, as in vLLM; used by the priority policy
    tenant: str = ""  # who gets a fair share, under the fair policy
    cache_salt: str = ""  # cached prefixes are shared between requests of the same salt only
    ttft_target_s: float | None = None  # time to first token
    itl_target_s: float | None = None  # time between tokens
    queue_timeout_s: float | None = None  # it fails if it has not started by then

    def __post_init__(self) -> None:
        level = self.priority
        if isinstance(level, bool) or not isinstance(level, int) or abs(level) > MOST_PRIORITY:
            raise RequestError(
                f"priority is {level!r:.40}; expected a whole number from {-MOST_PRIORITY:,} to {MOST_PRIORITY:,}.",
                param="priority",
            )
        for name in ("tenant", "cache_salt"):
            text = getattr(self, name)
            if not isinstance(text, str) or not _is_unicode(text):
                raise RequestError(f"{name} is {text!r:.40}; expected Unicode text.", param=name)
        for name in ("ttft_target_s", "itl_target_s", "queue_timeout_s"):
            time = getattr(self, name)
            if time is not None and (
                isinstance(time, bool) or not isinstance(time, int | float) or not 0 < time <= MOST_SECONDS
            ):
                raise RequestError(
                    f"{name} is {time!r:.40}; expected seconds, above 0 and at most {MOST_SECONDS:,.0f}, or None.",
                    param=name,
                )


def _is_unicode(text: str) -> bool:
    """Whether it can be encoded: half a surrogate pair cannot."""
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True, slots=True)
class Request:
    """What a caller asked for. `prompt` is the text, if any; the engine uses `prompt_ids`."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    arrival_s: float = 0.0
    scheduling: Scheduling = Scheduling()
    adapter: str = ""  # the digest of the adapter that it runs with (`models/lora.py`); "": none
    # the last ids of the prompt that are part of the answer: a form begins before them
    n_answered: int = 0

    @property
    def cache_salt(self) -> str:
        """What the prefix cache knows its pages by: the salt, and the adapter that makes their keys
        and values.

        No salt without an adapter looks like one with it.
        """
        salt = self.scheduling.cache_salt
        if self.adapter:
            return f"adapter:{self.adapter}:{salt}"
        return f"salt:{salt}" if salt.startswith(("adapter:", "salt:")) else salt


def stop_ids(params: SamplingParams, eos_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a sequence; `eos_ids` are the model's."""
    return frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else eos_ids)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence being generated: its token ids, and how many positions are in the KV cache.

    It has an identity: two sequences are never equal.
    """

    seq_id: SeqId
    request: Request
    index: int = 0  # which of the request's n completions
    ids: list[int] = field(default_factory=list)  # prompt, then generated
    limit: int = 0  # it ends when this many ids are there
    stop_ids: frozenset[int] = frozenset()  # it ends after one of these
    n_cached: int = 0  # positions whose keys and values are in the cache
    n_scored: int = 0  # prompt positions whose log-probabilities have been reported
    pages: list[PageId] = field(default_factory=list)
    n_sent: int = 0  # of its pages, those that a span has handed out
    cache_use: CacheUse = CacheUse()  # of its first admission
    arrival_s: float = 0.0
    key: float = 0.0  # its place in the policy's order; lower is sooner
    n_preempted: int = 0
    parent: SeqId | None = None  # the sequence that it was forked from
    n_common: int = 0  # ids that it shares with its parent
    # positions from n_cached on that have been through the first layers, `n_layers` of them
    n_between_layers: int = 0
    n_layers: int = 0

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @property
    def n_generated(self) -> int:
        """Number of generated tokens so far."""
        return len(self.ids) - self.n_prompt


@dataclass(slots=True)
class Span:
    """Compute positions [start, start + count) of one sequence in this step.

    Decode is count 1, a prefill chunk is n. Verifying k drafted tokens is k + 1 rows, each with
    logits: the last known id, then the draft's. `new_pages` go to the sequence's page table from
    `first_page` on, and the table ends after them: 0 hands out a new table, one less than its
    length replaces the last page.

    A prefill chunk may go through the layers in several steps: a span then says which this step
    computes, and comes again until its last one has.
    """

    seq: SeqId
    start: int  # tokens already in the cache
    count: int
    ids: tuple[int, ...]  # of its rows, `count` of them, a draft's last
    new_pages: tuple[PageId, ...]
    n_logits: int  # last rows that need logits; 0 inside a prefill
    first_page: int = 0  # where new_pages go; of no meaning when there are none
    n_draft: int = 0  # how many of the ids are guesses: the last ones
    first_layer: int = 0
    stop_layer: int | None = None  # None: up to the last one, and what comes after it

    @property
    def draft(self) -> tuple[int, ...]:
        """The guesses of the ids after the last known one."""
        return self.ids[self.count - self.n_draft :]

    @property
    def is_layered(self) -> bool:
        """Whether this is not all layers."""
        return self.first_layer > 0 or self.stop_layer is not None

    @property
    def place(self) -> str:
        """Start and count, and the layers if they are not all, for people."""
        if not self.is_layered:
            return f"{self.start}+{self.count}"
        last = "the last" if self.stop_layer is None else self.stop_layer - 1
        return f"{self.start}+{self.count}, layers {self.first_layer} to {last}"


@dataclass(frozen=True, slots=True)
class Added:
    """A sequence that a plan names for the first time: what all ranks know of it. `request_id` and
    `index` are for people.
    """

    seq: SeqId
    request_id: str
    index: int = 0
    adapter: str = ""  # a digest; "": none


@dataclass(frozen=True, slots=True)
class Started:
    """What sampling is told of a sequence that a plan has added. It never goes to other ranks."""

    seq: SeqId
    request: Request
    index: int = 0  # which of the request's n completions
    stop_ids: frozenset[int] = frozenset()  # it ends after one of these

    @property
    def n_prompt(self) -> int:
        """Number of prompt tokens."""
        return len(self.request.prompt_ids)

    @classmethod
    def of(cls, seq: Sequence) -> Started:
        """The record of a sequence."""
        return cls(seq.seq_id, seq.request, seq.index, seq.stop_ids)


@dataclass(frozen=True, slots=True)
class Save:
    """Write a page to a slot of the second tier, with what identifies it there."""

    page: PageId
    slot: SlotId
    key: bytes  # of the page's tokens and all before them
    parent: bytes  # the key of the page before; of a first page, the salt's
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Read a slot of the second tier, which must hold `key`, into a page."""

    slot: SlotId
    page: PageId
    key: bytes


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy a whole page."""

    source: PageId
    target: PageId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: pages to save, load and copy, in this order, then the spans to compute together.

    It is numbers and names only, and complete: a rank needs nothing else. A sequence is in `added`
    of the plan in which it first has a span, and in `dropped` of one after its end. Between the two
    a rank keeps its page table.
    """

    step: int
    spans: tuple[Span, ...]
    added: tuple[Added, ...] = ()
    dropped: tuple[SeqId, ...] = ()
    preempted: tuple[SeqId, ...] = ()  # lost their pages; a later span hands out a new table
    saves: tuple[Save, ...] = ()
    loads: tuple[Load, ...] = ()  # for sequences that have no span yet
    copies: tuple[Copy, ...] = ()

    @property
    def n_tokens(self) -> int:
        """Positions that this step computes, those whose chunk has layers to come not counted."""
        return sum(span.count for span in self.spans if span.stop_layer is None)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one position: the token's own, its rank (1 is best), and the best `top`
    as (id, logprob).
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class Sampled:
    """What one span produced: the sampled token, or an error that ends this sequence only.

    After a draft there may be `more` tokens: one for each drafted id that was the sampled one.
    """

    seq: SeqId
    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    error: str | None = None
    more: tuple[tuple[int, TokenLogprobs | None], ...] = ()
    # ids that will come next, most likely: a grammar allows no other text
    forced: tuple[int, ...] = ()
    limit: str | None = None  # GRAMMAR_LIMIT once a string was ended because it was too long


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step computed, an entry a span with logits, and what the second tier could not do."""

    step: int
    sampled: tuple[Sampled, ...]
    failed_saves: tuple[SlotId, ...] = ()
    failed_loads: tuple[SlotId, ...] = ()  # their pages hold nothing
    load_s: float = 0.0  # time that the loads took, all together
    save_s: float = 0.0  # the same of the saves


@dataclass(slots=True)
class Event:
    """One thing that happened to a request: a new token, or its end (`finish` is set exactly once
    per sequence).
    """

    request_id: str
    index: int
    token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    # the stop token id or stop string that ended it, or another reason
    stop_reason: int | str | None = None
    error: str | None = None
