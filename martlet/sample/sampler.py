"""The sampler: a row of logits in, a token out.

    logits [V] → masks and bias → steps in the order of `samplers` → draw

`Sampler` is shared by a model's sequences. A `SequenceSampler` is one sequence: its parameters, ids
and mirostat's mu. Nothing else enters a sample, so rows are independent of each other, and a
sequence can be taken back to any earlier length. docs/sampling.md has the formulas and the meaning
of every parameter. Read `logits.py` next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from martlet.errors import NOTHING_LEFT, RequestError, SampleError
from martlet.grammar.states import Constraint, n_mask_words
from martlet.sample import logits as steps
from martlet.sample.logits import Candidates, candidate_logprobs, token_logprobs
from martlet.sample.random import LANE_XTC, SeedSource, uniform
from martlet.sampling_params import SamplingParams, validate_for_vocab
from martlet.structured import Structured
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import TokenLogprobs

__all__ = ["Sampler", "SequenceSampler", "bad_word_ids", "token_logprobs"]

F32 = NDArray[np.float32]
I64 = NDArray[np.int64]
Mask = NDArray[np.bool_]

_BANNED_BIAS = -100.0
# With the token before them they fill a tile of rows, which reads the weights once.
MOST_FORCED = 15
LEAST_FORCED = 3  # bytes


class Sampler:
    """What a model's sequences share: the vocabulary, and the seeds of requests without a seed.

    `n_logits` is the width of the model's output; an id is sampled only if both tokenizer and
    output have it. With `seed` None, unseeded requests ask the operating system; otherwise the k-th
    unseeded sequence gets the k-th number of a `SeedSource`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        n_logits: int | None = None,
        seed: int | None = None,
        constraints: Callable[[Structured], Constraint] | None = None,
    ) -> None:
        self.vocab = min(tokenizer.vocab_size, n_logits or tokenizer.vocab_size)
        # The current row, raw and in float64; reused, since new arrays cost page faults. Only one
        # thread samples.
        self.row, self.row64 = np.zeros(self.vocab, np.float32), np.zeros(self.vocab)
        self.eog_ids = self._known(tokenizer.eog_ids)
        # [V], shared by all sequences without further bans.
        self.banned = np.zeros(self.vocab, np.bool_)
        self.banned[self._known(tokenizer.unused_ids)] = True
        self.ids = np.flatnonzero(~self.banned)
        self.bad_words = lru_cache(maxsize=64)(partial(bad_word_ids, tokenizer))
        self.breakers = lru_cache(maxsize=8)(partial(breaker_mask, tokenizer))
        self.seeds = SeedSource(seed)
        self._constraints = constraints
        self.tokens_of = lru_cache(maxsize=1024)(partial(_tokens_of, tokenizer))

    def _known(self, ids: Iterable[int]) -> I64:
        return np.array(sorted(token for token in ids if token < self.vocab), dtype=np.int64)

    def check(self, params: SamplingParams) -> None:
        """Refuse what this model cannot do, before the request is accepted.

        RequestError names the parameter.
        """
        validate_for_vocab(params, self.vocab)
        self.bad_words(params.bad_words)
        if "dry" in params.active_steps:
            self.breakers(params.dry_sequence_breakers)
        self.constraint_of(params)

    def constraint_of(self, params: SamplingParams) -> Constraint | None:
        """The answer's constraint at its beginning, if any.

        RequestError if it cannot be compiled.
        """
        if params.structured is None:
            return None
        if self._constraints is None:
            raise RequestError("structured: this engine has no grammars.", param="structured")
        return self._constraints(params.structured)

    def start(
        self, params: SamplingParams, prompt_ids: Sequence[int], index: int = 0, n_answered: int = 0
    ) -> SequenceSampler:
        """Begin a sequence, the `index`-th of its request.

        The last `n_answered` ids of the prompt are part of the constrained answer.
        """
        return SequenceSampler(self, params, prompt_ids, index, n_answered)

    def seed_of(self, params: SamplingParams) -> int:
        """The request's seed, or a seed drawn for it."""
        return self.seeds.draw() if params.seed is None else params.seed


class SequenceSampler:
    """Samples one sequence, token after token; `seed` determines its random numbers."""

    def __init__(
        self, shared: Sampler, params: SamplingParams, prompt_ids: Sequence[int], index: int = 0, n_answered: int = 0
    ) -> None:
        self.params = params
        self.index = index
        self.seed = shared.seed_of(params)
        self._shared = shared
        # Grows by doubling; the first _n_ids are in use.
        self._ids = np.array(prompt_ids, dtype=np.int64)
        self._n_ids = self._n_prompt = len(prompt_ids)
        self._mu = [2 * params.mirostat_tau]  # before each generated token, if mirostat is on
        self._steps = [_STEPS[name] for name in params.active_steps]
        self._mirostat = params.mirostat == 2 and not params.greedy
        self.constraint = shared.constraint_of(params)
        if self.constraint is not None:
            for token_id in prompt_ids[len(prompt_ids) - n_answered :]:
                _take(self.constraint, token_id)
        self._bits = np.zeros(n_mask_words(shared.vocab), np.uint32) if self.constraint is not None else None
        self._bits_at = -1  # the number of ids that the bits are for
        # Position → (token, position where it was known).
        self._coming: dict[int, tuple[int, int]] = {}
        self._set_masks()
        self._bans = bool(
            params.logit_bias or params.allowed_token_ids or self._bad_words or params.no_repeat_ngram_size
        )
        self._lists_allowed = params.logprobs_mode == "allowed" and params.logprobs is not None
        self._look_ahead()

    def _set_masks(self) -> None:
        """Decide once what is never sampled, and whether the best logit can be taken directly."""
        params, shared = self.params, self._shared
        bias = params.logit_bias or {}
        self._bad_words = shared.bad_words(params.bad_words)
        self._bias = {token: amount for token, amount in bias.items() if amount > _BANNED_BIAS}
        self._banned, self._allowed_ids = shared.banned, shared.ids
        if params.ignore_eos or params.allowed_token_ids is not None or len(self._bias) < len(bias):
            self._banned = shared.banned.copy()
            if params.allowed_token_ids is not None:
                self._banned[:] = True
                allowed = list(params.allowed_token_ids)
                self._banned[allowed] = shared.banned[allowed]
            self._banned[list(bias.keys() - self._bias.keys())] = True
            if params.ignore_eos:
                self._banned[shared.eog_ids] = True
            self._allowed_ids = np.flatnonzero(~self._banned)
        self._end_ids = np.array(sorted({*shared.eog_ids.tolist(), *params.stop_token_ids}), np.int64)
        changed = {"penalties", "dry"} & set(params.active_steps)
        self._takes_best = params.greedy and not (
            changed or self._bias or self._bad_words or params.no_repeat_ngram_size
        )

    # -- the sequence so far -----------------------------------------------------------------------
    @property
    def n_generated(self) -> int:
        """Number of generated tokens."""
        return self._n_ids - self._n_prompt

    @property
    def ids(self) -> I64:
        """Prompt and generated tokens, int64 [n]."""
        return self._ids[: self._n_ids]

    def append(self, token_id: int) -> None:
        """Take a token that was not sampled here (forced, or sampled on another rank)."""
        self._advance(token_id, self._mu[-1])

    def truncate(self, n_generated: int) -> None:
        """Go back to the first `n_generated` generated tokens, as if there had never been more."""
        assert 0 <= n_generated <= self.n_generated
        n_back = self.n_generated - n_generated
        self._n_ids = self._n_prompt + n_generated
        if self._mirostat:
            del self._mu[n_generated + 1 :]
        if self.constraint is not None and n_back:
            self.constraint.rollback(n_back)
            self._bits_at = -1
            self._coming = {at: known for at, known in self._coming.items() if known[1] <= n_generated}

    def _advance(self, token_id: int, mu: float) -> None:
        if self.constraint is not None:
            _take(self.constraint, token_id)
        if self._n_ids == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros(max(64, self._n_ids), np.int64)))
        self._ids[self._n_ids] = token_id
        self._n_ids += 1
        if self._mirostat:
            self._mu.append(mu)
        self._look_ahead()

    # -- the grammar -------------------------------------------------------------------------------
    def prepare(self) -> None:
        """Compute the mask for the next token, at any time before `sample`.

        It depends on the tokens before it only.
        """
        if self.constraint is not None and self._bits is not None and self._bits_at != self._n_ids:
            self.constraint.mask(self._bits)
            self._bits_at = self._n_ids

    @property
    def needs_mask(self) -> bool:
        """Whether the next token's mask is needed and takes more than copying.

        A greedy request needs only the bit of one token.
        """
        return (
            self.constraint is not None
            and self._bits_at != self._n_ids
            and not self._takes_best
            and self.n_generated not in self._coming
            and not self.constraint.has_mask()
        )

    def forced_ids(self) -> tuple[int, ...]:
        """The next ids, as far as they are known without logits."""
        ids: list[int] = []
        while (known := self._coming.get(self.n_generated + len(ids))) is not None and len(ids) < MOST_FORCED:
            ids.append(known[0])
        return tuple(ids)

    def _look_ahead(self) -> None:
        """Where the grammar leaves no choice of text, note the tokenizer's tokens for it as known.

        The last token is left out: with the text after it, it may be part of a longer token. The
        ids are the same whether a step computes one of them or many, since they follow from the ids
        before them.
        """
        at = self.n_generated
        if self.constraint is None or self._bans or self._lists_allowed or at in self._coming:
            return
        text = self.constraint.forced()
        if len(text) >= LEAST_FORCED:
            ids = self._shared.tokens_of(text)[:-1]
            if not self._banned[list(ids)].any():
                self._coming |= {at + i: (token, at) for i, token in enumerate(ids)}

    def _mask(self) -> Mask | None:
        """The grammar's mask, bool [V]; None without a grammar."""
        if self._bits is None:
            return None
        self.prepare()
        return np.unpackbits(self._bits.view(np.uint8), count=self._shared.vocab, bitorder="little").view(np.bool_)

    # -- sampling ----------------------------------------------------------------------------------
    def sample(self, logits: F32, mask: Mask | None = None) -> tuple[int, TokenLogprobs | None]:
        """Choose the next token and append it; the logits stay as they are.

        `logits` is float32 [V or more]; rows beyond the tokenizer's vocabulary are never sampled.
        `mask`, bool [V], is False for forbidden tokens. SampleError, with nothing appended, if no
        token can be chosen.
        """
        known = logits[: self._shared.vocab]
        best = int(known.argmax())  # of a row with NaN: the first NaN
        if not math.isfinite(known[best]):
            raise SampleError(f"The model's logits are not usable: token {best} has {known[best]}.")
        params, mu = self.params, self._mu[-1]
        forced = self._coming.get(self.n_generated)
        if forced is not None:
            token_id, c = forced[0], None
        elif self._takes_best and self._may(best, mask):
            token_id, c = best, None
        else:
            c = self._candidates(known, mask)
            for step in self._steps:
                c = step(self, c)
            if self._mirostat:
                c = steps.mirostat_keep(c, mu)
            token_id = steps.draw(c, 0.0 if len(c.ids) == 1 else uniform(self.seed, self.index, self.n_generated))
            if self._mirostat:
                mu = steps.mirostat_mu(c, token_id, mu, params.mirostat_tau, params.mirostat_eta)
        entry = None if params.logprobs is None else self._logprobs(logits, c, token_id, mask)
        self._advance(token_id, mu)
        return token_id, entry

    def _logprobs(self, logits: F32, c: Candidates | None, token_id: int, mask: Mask | None) -> TokenLogprobs:
        top = self.params.logprobs or 0
        if self.params.logprobs_mode == "raw":
            return token_logprobs(logits, token_id, top)
        if self._lists_allowed:
            return token_logprobs(logits, token_id, top, self._candidates(logits[: self._shared.vocab], mask).ids)
        c = Candidates(np.array([token_id]), np.zeros(1)) if c is None else c
        return candidate_logprobs(c, token_id, top)

    def _may(self, token_id: int, mask: Mask | None) -> bool:
        """Whether a token passes the masks of the direct way for greedy requests."""
        return not (
            self._banned[token_id]
            or (self.n_generated < self.params.min_tokens and token_id in self._end_ids)
            or (mask is not None and not mask[token_id])
            or (self.constraint is not None and not self.constraint.allows(token_id))
        )

    def _candidates(self, logits: F32, mask: Mask | None) -> Candidates:
        """All tokens that may be sampled, with bias. A grammar's mask replaces `mask`."""
        ids, mask = self._allowed_ids, mask if self.constraint is None else self._mask()
        if mask is not None:
            ids = np.flatnonzero(mask[: self._shared.vocab] & ~self._banned)
        n = len(ids)
        row, x = self._shared.row[:n], self._shared.row64[:n]
        # "clip" writes to `out` without a copy; all ids are in range.
        np.take(logits, ids, out=row, mode="clip")
        x[:] = row
        c = Candidates(ids, x)
        for token, amount in self._bias.items():
            c.add(np.array([token]), amount)
        if self.n_generated < self.params.min_tokens:
            c.add(self._end_ids, -np.inf)
        if self._bad_words or self.params.no_repeat_ngram_size:
            c.add(self._completing(), -np.inf)
        if n and x.min() == -np.inf:
            c = self._left(c, x)
        if len(c.ids) == 0:
            raise SampleError(NOTHING_LEFT)
        return c

    def _left(self, c: Candidates, x: NDArray[np.float64]) -> Candidates:
        """The candidates that are not forbidden.

        If a grammar's text is complete, min_tokens cannot lengthen it.
        """
        left = c.take(x > -np.inf)
        if not len(left.ids) and self.constraint is not None and self.constraint.is_done():
            ends = np.intersect1d(c.ids, self._shared.eog_ids)
            return Candidates(ends, np.zeros(len(ends)))
        return left

    def _completing(self) -> I64:
        """Tokens that would complete a bad word, or an n-gram for the second time; int64 [n]."""
        tokens: list[int] = []
        ids, start = self.ids, self._n_prompt
        for *head, last in self._bad_words:
            if not head or (self.n_generated >= len(head) and ids[max(start, len(ids) - len(head)) :].tolist() == head):
                tokens.append(last)
        if self.params.no_repeat_ngram_size:
            tokens += steps.ngram_followers(ids, self.params.no_repeat_ngram_size).tolist()
        return np.unique(np.array(tokens, dtype=np.int64))

    def window(self, last_n: int) -> int:
        """Index of the first of the last `last_n` ids; -1 means all ids."""
        return 0 if last_n < 0 else max(0, self._n_ids - last_n)


def _take(constraint: Constraint, token_id: int) -> None:
    if not constraint.advance(token_id):
        raise SampleError(f"Token {token_id} is not allowed by the grammar here.")


def _tokens_of(tokenizer: Tokenizer, text: bytes) -> tuple[int, ...]:
    """The ids of a text that continues another text.

    Empty for a text that ends inside a character, or that its ids do not give back.
    """
    try:
        ids = tuple(tokenizer.encode(text.decode(), add_special=False))
    except UnicodeDecodeError:
        return ()
    return ids if b"".join(map(tokenizer.token_bytes, ids)) == text else ()


def _penalties(seq: SequenceSampler, c: Candidates) -> Candidates:
    """Repetition counts prompt and answer; presence and frequency count the answer only.

    All count within `penalty_last_n`.
    """
    p, start = seq.params, seq.window(seq.params.penalty_last_n)
    if p.repetition_penalty != 1:
        c = steps.repetition_penalty(c, np.unique(seq.ids[start:]), p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        generated = seq.ids[max(start, len(seq.ids) - seq.n_generated) :]
        ids, counts = np.unique(generated, return_counts=True)
        c = steps.presence_frequency_penalty(c, ids, counts, p.presence_penalty, p.frequency_penalty)
    return c


def _dry(seq: SequenceSampler, c: Candidates) -> Candidates:
    p, ids = seq.params, seq.ids[seq.window(seq.params.dry_penalty_last_n) :]
    if len(ids) == 0:
        return c
    breakers = seq._shared.breakers(p.dry_sequence_breakers)
    return steps.dry(c, ids, breakers, p.dry_multiplier, p.dry_base, p.dry_allowed_length)


def _xtc(seq: SequenceSampler, c: Candidates) -> Candidates:
    u = uniform(seq.seed, seq.index, seq.n_generated, LANE_XTC)
    return steps.xtc(c, seq.params.xtc_probability, seq.params.xtc_threshold, u)


def _temperature(seq: SequenceSampler, c: Candidates) -> Candidates:
    p = seq.params
    return steps.temperature(c, p.temperature, p.dynatemp_range, p.dynatemp_exponent)


# The step of each name in `samplers`; it reads its numbers from the sequence's parameters.
_STEPS: Mapping[str, Callable[[SequenceSampler, Candidates], Candidates]] = MappingProxyType(
    {
        "penalties": _penalties,
        "dry": _dry,
        "top_n_sigma": lambda seq, c: steps.top_n_sigma(c, seq.params.top_n_sigma),
        "top_k": lambda seq, c: steps.top_k(c, seq.params.top_k),
        "typical_p": lambda seq, c: steps.typical_p(c, seq.params.typical_p),
        "top_p": lambda seq, c: steps.top_p(c, seq.params.top_p),
        "min_p": lambda seq, c: steps.min_p(c, seq.params.min_p),
        "xtc": _xtc,
        "temperature": _temperature,
    }
)


def bad_word_ids(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """The token sequences that spell each word, with a leading space and without.

    A word can be cut into tokens in more ways; sequences from other ways are not included.
    """
    spellings: dict[tuple[int, ...], None] = {}
    for word in words:
        bare, spaced = word.lstrip(" ") or word, " " + word.lstrip(" ")
        for text in (bare, spaced):
            spellings[tuple(tokenizer.encode(text, add_special=False))] = None
        # After a line break such a tokenizer puts no space before a word.
        if tokenizer.strips_space:
            line = tokenizer.encode("\n", add_special=False)
            after = tokenizer.encode("\n" + bare, add_special=False)
            if after[: len(line)] == line:
                spellings[tuple(after[len(line) :])] = None
    return tuple(ids for ids in spellings if ids)


def breaker_mask(tokenizer: Tokenizer, breakers: tuple[str, ...]) -> NDArray[np.bool_]:
    """Which tokens hold one of the breakers in their text, bool [V].

    RequestError for a breaker that no token holds: it could never break a repetition.
    """
    mask = np.zeros(tokenizer.vocab_size, np.bool_)
    if not breakers:
        return mask
    texts = [tokenizer.token_bytes(token) for token in range(tokenizer.vocab_size)]
    for breaker in dict.fromkeys(breakers):
        sought = breaker.encode()
        holds = np.fromiter((sought in text for text in texts), np.bool_, len(texts))
        if not holds.any():
            raise RequestError(
                f"dry_sequence_breakers: no token of this model holds {breaker!r}; use a shorter text, which fits in one"
                " token.",
                param="dry_sequence_breakers",
            )
        mask |= holds
    return mask
