"""From events to outputs: text, log-probabilities, finish reasons (read `tokenizer/detok.py` next).

The engine knows token ids only. Text, and so stop strings, belong to the caller's side: an
`OutputBuilder` for each request turns its events into text as they come, and tells the engine when
a stop string ends a sequence early.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from martlet.config import Setting
from martlet.errors import MartletError
from martlet.metrics import RequestMetrics
from martlet.observe.cache_report import CacheReport, explain_cache
from martlet.tokenizer.detok import Delta, Detokenizer, StopChecker, TextStream
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import GRAMMAR_LIMIT, Event, FinishReason, Request, TokenLogprobs


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's embedding, float32 [C]: the mean of its last hidden states, scaled to length 1."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token, its rank (1 is the most likely), and its text."""

    logprob: float
    rank: int | None
    decoded_token: str


class Logprobs(Mapping[int, Logprob]):
    """By token id: the token itself first, then the most likely ones.

    Entries are made on access: logprobs=-1 means an entry for each token of the vocabulary.
    """

    __slots__ = ("_entry", "_ranks", "_texts")

    def __init__(self, entry: TokenLogprobs, texts: Mapping[int, str]) -> None:
        self._entry = entry
        self._texts = texts
        self._ranks: dict[int, int] | None = None  # by token id: its index in entry.top

    def __getitem__(self, token_id: int) -> Logprob:
        entry = self._entry
        if token_id == entry.token_id:
            return Logprob(entry.logprob, entry.rank, self._texts[token_id])
        index = self._index[token_id]
        return Logprob(entry.top[index][1], index + 1, self._texts[token_id])

    def __iter__(self) -> Iterator[int]:
        own = self._entry.token_id
        yield own
        yield from (token_id for token_id in self._index if token_id != own)

    def __len__(self) -> int:
        return len(self._entry.top) + (self._entry.token_id not in self._index)

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def _index(self) -> dict[int, int]:
        if self._ranks is None:
            self._ranks = {token_id: index for index, (token_id, _) in enumerate(self._entry.top)}
        return self._ranks


@dataclass(slots=True)
class CompletionOutput:
    """An answer to a request. `token_ids` has the token that ended it; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    n_shown: int = 0  # how many of token_ids have (part of) their text in `text`
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    # the stop token's id or the stop string; None: the model's end
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    # an entry for each token; None for the first
    prompt_logprobs: list[Logprobs | None] | None = None
    metrics: RequestMetrics | None = None
    settings: tuple[Setting, ...] = ()  # the sampling parameters in effect, with their origins
    warnings: tuple[str, ...] = ()  # on how the prompt was read
    finished: bool = False
    error: str | None = None
    cache: CacheReport | None = None  # how much of the prompt was cached; once finished


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an answer since the last piece: text, and the tokens whose text it completes."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # of token_ids, if requested
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer:
    """The text side of one sequence."""

    __slots__ = ("ended", "pending", "taken", "text")

    def __init__(self, request: Request, tokenizer: Tokenizer, stopper: StopChecker | None) -> None:
        params = request.params
        after = request.prompt_ids[-1] if request.prompt_ids else None
        detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens, after=after)
        # the automaton is shared, its state is not
        self.text = TextStream(detokenizer, copy(stopper))
        self.pending = ""  # text that the caller has not taken yet
        self.taken = 0  # tokens that the caller has taken
        self.ended = False  # the caller knows that it has ended


class OutputBuilder:
    """Builds the `RequestOutput` of one request. `stop` ends one of its sequences in the engine."""

    def __init__(
        self,
        request: Request,
        tokenizer: Tokenizer,
        stop: Callable[[str, int, str], object],
        settings: tuple[Setting, ...] = (),
    ) -> None:
        self._n, self._shows_logprobs = request.params.n, request.params.logprobs is not None
        self.request = request = _with_rivals(request)  # the engine runs all best_of answers
        self._tokenizer = tokenizer
        self._stop = stop
        # (answer, stop string) that still run in the engine
        self._stopped: list[tuple[int, str]] = []
        params = request.params
        stopper = StopChecker(params.stop, include=params.include_stop_str_in_output) if params.stop else None
        self._answers = [_Answer(request, tokenizer, stopper) for _ in range(params.n)]
        self.output = RequestOutput(
            request.request_id,
            request.prompt,
            list(request.prompt_ids),
            [CompletionOutput(index) for index in range(params.n)],
            prompt_logprobs=None if params.prompt_logprobs is None else [None],
            settings=settings,
        )
        if params.logprobs is not None:
            for completion in self.output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0

    def accept(self, event: Event) -> None:
        """Take in one event of this request."""
        if self.output.finished or self.output.outputs[event.index].finish_reason is not None:
            if event.token_id is not None and self.output.metrics is not None:
                # sampled in the same step as the answer's last token
                self.output.metrics.disown_token()
            return
        completion = self.output.outputs[event.index]
        if event.prompt_logprobs:
            assert self.output.prompt_logprobs is not None
            self.output.prompt_logprobs.extend(
                Logprobs(entry, self._tokenizer.texts_alone) for entry in event.prompt_logprobs
            )
        stop = self._extend(completion, event)
        if stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop
            if event.finish is None:
                self._stopped.append((event.index, stop))
        elif event.finish is not None:
            # the form is complete, but a string in it is cut
            cut = event.stop_reason == GRAMMAR_LIMIT
            finish = FinishReason.LENGTH if cut else event.finish
            completion.finish_reason, completion.stop_reason = finish.value, event.stop_reason
        self.output.error = self.output.error or event.error
        self.output.finished = all(entry.finish_reason is not None for entry in self.output.outputs)
        if self.output.finished and self.output.metrics is not None:
            self.output.cache = explain_cache(self.request.prompt_ids, self.output.metrics, self._tokenizer)
        if self.output.finished and len(self.output.outputs) > self._n:
            self._choose_best()

    def _extend(self, completion: CompletionOutput, event: Event) -> str | None:
        """Add the event's token and text to an answer; return the stop string that it completes."""
        text, stop = self._answers[event.index].text, None
        if event.token_id is not None:
            completion.token_ids.append(event.token_id)
            if event.logprobs is not None and completion.logprobs is not None:
                completion.logprobs.append(Logprobs(event.logprobs, self._tokenizer.texts_alone))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + event.logprobs.logprob
            # the token that ends an answer is not part of its text
            if event.finish is not FinishReason.STOP and self.request.params.detokenize:
                stop = self._add(completion, text.feed(event.token_id))
        if event.finish is not None and stop is None:
            stop = self._add(completion, text.finish())
        return stop

    def end_stopped(self) -> None:
        """End the sequences that reached a stop string; after all events of a step are accepted."""
        while self._stopped:
            self._stop(self.request.request_id, *self._stopped.pop())

    def take(self, index: int = 0) -> str:
        """An answer's text since the last call."""
        answer = self._answers[index]
        text, answer.pending = answer.pending, ""
        return text

    def pieces(self) -> list[Piece]:
        """The new parts since the last call, at most one for each answer; not for best_of > n."""
        pieces = []
        for answer, completion in zip(self._answers, self.output.outputs, strict=True):
            start, stop = answer.taken, completion.n_shown
            ends = completion.finish_reason is not None and not answer.ended
            if stop == start and not ends and not answer.pending:
                continue
            logprobs = () if completion.logprobs is None else tuple(completion.logprobs[start:stop])
            text, ids = self.take(completion.index), tuple(completion.token_ids[start:stop])
            answer.taken, answer.ended = stop, answer.ended or ends
            pieces.append(
                Piece(completion.index, text, ids, logprobs, completion.finish_reason, completion.stop_reason)
            )
        return pieces

    def raise_error(self) -> None:
        """Raise MartletError if the request failed."""
        if self.output.error is not None:
            raise MartletError(f"Request {self.request.request_id} failed: {self.output.error}")

    def _choose_best(self) -> None:
        """Keep the n answers of the highest mean log-probability, the best first."""
        ranked = sorted(self.output.outputs, key=_mean_logprob, reverse=True)
        self.output.outputs = ranked[: self._n]
        for index, completion in enumerate(self.output.outputs):
            completion.index = index
            if not self._shows_logprobs:
                completion.logprobs = completion.cumulative_logprob = None

    def _add(self, completion: CompletionOutput, delta: Delta) -> str | None:
        """Add new text; return the stop string that it completes, or None."""
        completion.text += delta.text
        completion.n_shown += delta.tokens - delta.hidden
        self._answers[completion.index].pending += delta.text
        return delta.stop


def _with_rivals(request: Request) -> Request:
    """The request with n = best_of, and the log-probabilities that rank the answers."""
    params = request.params
    if params.best_of is None or params.best_of == params.n:
        return request
    logprobs = 0 if params.logprobs is None else params.logprobs
    return replace(request, params=replace(params, n=params.best_of, best_of=None, logprobs=logprobs))


def _mean_logprob(completion: CompletionOutput) -> float:
    """The mean log-probability of a token, as OpenAI's API ranks answers; failures come last."""
    if completion.finish_reason == FinishReason.ERROR or not completion.token_ids:
        return -math.inf
    return (completion.cumulative_logprob or 0.0) / len(completion.token_ids)
