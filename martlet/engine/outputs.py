"""From events to what a caller reads: text, log-probabilities, finish reasons (read `tokenizer/detok.py` next).

The engine knows token ids only. Text, and so stop strings, belong to the outside: one `OutputBuilder` a request turns
its events into text as they come and tells the engine when a stop string ends a sequence early.
"""

from __future__ import annotations

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

__all__ = ["CompletionOutput", "EmbeddingOutput", "Logprob", "Logprobs", "OutputBuilder", "Piece", "RequestOutput"]


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """A prompt's embedding: the mean of the last hidden states of all its tokens, scaled to length 1; float32 [C]."""

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

    Entries are made when they are asked for: logprobs=-1 means one for each token of the vocabulary.
    """

    __slots__ = ("_entry", "_places", "_texts")

    def __init__(self, entry: TokenLogprobs, texts: Mapping[int, str]) -> None:
        self._entry = entry
        self._texts = texts
        self._places: dict[int, int] | None = None  # of ids in entry.top

    def __getitem__(self, token_id: int) -> Logprob:
        entry = self._entry
        if token_id == entry.token_id:
            return Logprob(entry.logprob, entry.rank, self._texts[token_id])
        place = self._found[token_id]
        return Logprob(entry.top[place][1], place + 1, self._texts[token_id])

    def __iter__(self) -> Iterator[int]:
        own = self._entry.token_id
        yield own
        yield from (token_id for token_id in self._found if token_id != own)

    def __len__(self) -> int:
        return len(self._entry.top) + (self._entry.token_id not in self._found)

    def __repr__(self) -> str:
        return repr(dict(self))

    @property
    def _found(self) -> dict[int, int]:
        if self._places is None:
            self._places = {token_id: place for place, (token_id, _) in enumerate(self._entry.top)}
        return self._places


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers. `token_ids` has the token that ended it; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    n_shown: int = 0  # the first so many token_ids have their text, or a part of it, in `text`
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: str | None = None  # "stop", "length", "abort", "error"; None while it runs
    stop_reason: int | str | None = None  # the stop token's id or stop string; None for the model's own end


@dataclass(slots=True)
class RequestOutput:
    """The answer to one prompt."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[Logprobs | None] | None = None  # one entry a token; the first has nothing before it
    metrics: RequestMetrics | None = None
    settings: tuple[Setting, ...] = ()  # the sampling parameters in effect, with their origins
    warnings: tuple[str, ...] = ()  # what the caller should know of how the prompt was read
    finished: bool = False
    error: str | None = None
    cache: CacheReport | None = None  # how much of the prompt was cached, and why not more; once it has finished


@dataclass(frozen=True, slots=True)
class Piece:
    """What came of one answer since the last piece: text, and the tokens whose text is out by now."""

    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Logprobs, ...] = ()  # of these tokens, if they were asked for
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Answer:
    """The text side of one sequence."""

    __slots__ = ("ended", "pending", "taken", "text")

    def __init__(self, request: Request, tokenizer: Tokenizer, stopper: StopChecker | None) -> None:
        params = request.params
        after = request.prompt_ids[-1] if request.prompt_ids else None
        detokenizer = Detokenizer(tokenizer, skip_special=params.skip_special_tokens, after=after)
        self.text = TextStream(detokenizer, copy(stopper))  # the automaton is shared, its state is not
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
        self.request = request = _with_rivals(request)  # what the engine is to run
        self._tokenizer = tokenizer
        self._stop = stop
        self._stopped: list[
            tuple[int, str]
        ] = []  # answers that have reached a stop string, and still run in the engine
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
                self.output.metrics.disown_token()  # it came with the one that ended the answer
            return
        completion = self.output.outputs[event.index]
        if event.prompt_logprobs:
            assert self.output.prompt_logprobs is not None
            self.output.prompt_logprobs.extend(
                Logprobs(entry, self._tokenizer.texts_alone) for entry in event.prompt_logprobs
            )
        stop = None
        if event.token_id is not None:
            completion.token_ids.append(event.token_id)
            if event.logprobs is not None and completion.logprobs is not None:
                completion.logprobs.append(Logprobs(event.logprobs, self._tokenizer.texts_alone))
                completion.cumulative_logprob = (completion.cumulative_logprob or 0.0) + event.logprobs.logprob
            if (
                event.finish is not FinishReason.STOP and self.request.params.detokenize
            ):  # the token that ends an answer is not part of its text
                stop = self._add(completion, self._answers[event.index].text.feed(event.token_id))
        if event.finish is not None and stop is None:
            stop = self._add(completion, self._answers[event.index].text.finish())
        if stop is not None:
            completion.finish_reason, completion.stop_reason = FinishReason.STOP.value, stop
            if event.finish is None:
                self._stopped.append((event.index, stop))
        elif event.finish is not None:
            cut = event.stop_reason == GRAMMAR_LIMIT  # it may be complete in form, but a string in it is not
            finish = FinishReason.LENGTH if cut else event.finish
            completion.finish_reason, completion.stop_reason = finish.value, event.stop_reason
        self.output.error = self.output.error or event.error
        self.output.finished = all(entry.finish_reason is not None for entry in self.output.outputs)
        if self.output.finished and self.output.metrics is not None:
            self.output.cache = explain_cache(self.request.prompt_ids, self.output.metrics, self._tokenizer)
        if self.output.finished and len(self.output.outputs) > self._n:
            self._choose_best()

    def end_stopped(self) -> None:
        """End in the engine the sequences that have reached a stop string, once a step's events are taken in."""
        while self._stopped:
            self._stop(self.request.request_id, *self._stopped.pop())

    def take(self, index: int = 0) -> str:
        """The text that came since the last call."""
        answer = self._answers[index]
        text, answer.pending = answer.pending, ""
        return text

    def pieces(self) -> list[Piece]:
        """What came since the last call, at most one piece an answer; not for best_of > n, which is known at the end."""
        found = []
        for answer, completion in zip(self._answers, self.output.outputs, strict=True):
            start, stop = answer.taken, completion.n_shown
            ends = completion.finish_reason is not None and not answer.ended
            if stop == start and not ends and not answer.pending:
                continue
            logprobs = () if completion.logprobs is None else tuple(completion.logprobs[start:stop])
            text, ids = self.take(completion.index), tuple(completion.token_ids[start:stop])
            answer.taken, answer.ended = stop, answer.ended or ends
            found.append(Piece(completion.index, text, ids, logprobs, completion.finish_reason, completion.stop_reason))
        return found

    def raise_error(self) -> None:
        """Raise what made the request fail, if anything did."""
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
        """Add new text; return the stop string that it has reached, if any."""
        completion.text += delta.text
        completion.n_shown += delta.tokens - delta.hidden
        self._answers[completion.index].pending += delta.text
        return delta.stop


def _with_rivals(request: Request) -> Request:
    """A request for the best n of best_of answers is one for all of them, with what ranks them."""
    params = request.params
    if params.best_of is None or params.best_of == params.n:
        return request
    logprobs = 0 if params.logprobs is None else params.logprobs
    return replace(request, params=replace(params, n=params.best_of, best_of=None, logprobs=logprobs))


def _mean_logprob(completion: CompletionOutput) -> float:
    """The OpenAI API's measure of the best answer; one that failed comes last."""
    if completion.finish_reason == FinishReason.ERROR or not completion.token_ids:
        return -math.inf
    return (completion.cumulative_logprob or 0.0) / len(completion.token_ids)
