"""Rank 0's second half: rows of logits in, tokens out (read `sample/sampler.py` next).

It keeps, for every sequence that runs, its ids and its sampler. A draft is verified by the model's
own draws: a guess is right if it is what was drawn. Of a span that verifies one, row 0 has the
logits after the last known id, row i those after guess i - 1. Each row is drawn from with the
random numbers of its own position, so every token is the one that decoding alone gives, whatever
the guesses (docs/speculation.md compares this with rejection sampling, arXiv:2211.17192).
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from martlet.errors import SampleError
from martlet.sample.sampler import Sampler, SequenceSampler, token_logprobs
from martlet.types import GRAMMAR_LIMIT, Sampled, SeqId, Span, Started, TokenLogprobs

F32 = NDArray[np.float32]


class _Running:
    """What sampling keeps of a sequence."""

    __slots__ = ("ids", "min_tokens", "n_prompt", "prompt_logprobs", "sampler", "stop_ids")

    def __init__(self, started: Started, shared: Sampler) -> None:
        request, params = started.request, started.request.params
        self.ids = list(request.prompt_ids)
        self.n_prompt = len(self.ids)
        self.prompt_logprobs = params.prompt_logprobs
        # Before min_tokens no end is sampled, unless a grammar's text is complete and nothing else
        # can follow.
        self.stop_ids, self.min_tokens = started.stop_ids, 0 if params.structured is not None else params.min_tokens
        # of a request that wants no token, only its prompt's logprobs
        self.sampler: SequenceSampler | None = None
        if params.max_tokens != 0:
            self.sampler = shared.start(params, request.prompt_ids, started.index, request.n_answered)

    @property
    def has_ended(self) -> bool:
        """Whether the last id ends the sequence: nothing is sampled after it."""
        return self.ids[-1] in self.stop_ids and len(self.ids) - self.n_prompt >= self.min_tokens


class Sampling:
    """Samples for the spans of steps. `sampler` is what all sequences share."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._sequences: dict[SeqId, _Running] = {}
        self._mask_thread: ThreadPoolExecutor | None = None
        self._masks: Future[None] | None = None  # of the step that runs

    def begin(self, dropped: Iterable[SeqId], started: Iterable[Started]) -> None:
        """Forget sequences, and take in new ones."""
        for seq_id in dropped:
            self._sequences.pop(seq_id, None)
        for new in started:
            self._sequences[new.seq] = _Running(new, self._sampler)

    def prepare(self, spans: Iterable[Span]) -> None:
        """Compute what grammars allow in a thread of its own, while the layers run.

        Only for sequences that will sample, and whose mask is not one that was kept: copying that
        takes microseconds.
        """
        new = [
            sampler
            for span in spans
            if span.n_logits
            and (sampler := self._sequences[span.seq].sampler) is not None
            and sampler.needs_mask
            and span.start + span.count - span.n_draft == len(self._sequences[span.seq].ids)
        ]
        self._masks = None
        if new:
            if self._mask_thread is None:
                self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="martlet-masks")
            self._masks = self._mask_thread.submit(_prepare, new)

    def sample(self, spans: Iterable[Span], logits: F32) -> list[Sampled]:
        """Sample for the spans that have rows of logits [L, V], which are in the spans' order."""
        if self._masks is not None:
            self._masks.result()
            self._masks = None
        sampled: list[Sampled] = []
        row = 0
        for span in spans:
            if span.n_logits:
                sampled.append(self._sample(span, logits[row : row + span.n_logits]))
                row += span.n_logits
        return sampled

    def ids(self, seq: SeqId) -> list[int]:
        """A sequence's ids, prompt and generated: the list that grows as it is sampled for."""
        return self._sequences[seq].ids

    def close(self) -> None:
        """Forget everything and stop the thread. Idempotent."""
        self._sequences.clear()
        if self._mask_thread is not None:
            self._mask_thread.shutdown()

    def _sample(self, span: Span, logits: F32) -> Sampled:
        """Read logits [n, V] of a span's last rows: first for the prompt, then the next token."""
        running = self._sequences[span.seq]
        end = span.start + span.count
        scored: tuple[TokenLogprobs, ...] = ()
        try:
            if running.prompt_logprobs is not None and end - span.n_logits < running.n_prompt - 1:
                scored = _score(running, end - span.n_logits, logits)
            if end < len(running.ids) or running.sampler is None:
                return Sampled(span.seq, None, prompt_logprobs=scored)
            token_id, logprobs = running.sampler.sample(logits[0 if span.n_draft else -1])
        except SampleError as error:  # it ends this sequence only
            return Sampled(span.seq, None, error=str(error))
        running.ids.append(token_id)
        more = _verify(running, running.sampler, span.draft, logits) if span.n_draft else ()
        constraint = running.sampler.constraint
        forced = running.sampler.forced_ids() if constraint is not None else ()
        limit = GRAMMAR_LIMIT if constraint is not None and constraint.is_limited() else None
        return Sampled(span.seq, token_id, logprobs, scored, more=more, forced=forced, limit=limit)


def _verify(
    running: _Running, sampler: SequenceSampler, draft: Sequence[int], logits: F32
) -> tuple[tuple[int, TokenLogprobs | None], ...]:
    """Go on sampling after the first row as long as the guess before a row is what was drawn."""
    drawn: list[tuple[int, TokenLogprobs | None]] = []
    for row, guess in enumerate(draft, 1):
        if guess != running.ids[-1] or running.has_ended:
            break
        try:
            token_id, logprobs = sampler.sample(logits[row])
        except SampleError:  # the next step meets it again, and says so
            break
        running.ids.append(token_id)
        drawn.append((token_id, logprobs))
    return tuple(drawn)


def _score(running: _Running, start: int, logits: F32) -> tuple[TokenLogprobs, ...]:
    """Log-probabilities of prompt tokens from start + 1 on; row i: position start + i + 1."""
    assert running.prompt_logprobs is not None
    stop = min(start + len(logits), running.n_prompt - 1)
    return tuple(
        token_logprobs(logits[position - start], running.ids[position + 1], running.prompt_logprobs)
        for position in range(start, stop)
    )


def _prepare(samplers: Sequence[SequenceSampler]) -> None:
    for sampler in samplers:
        sampler.prepare()
