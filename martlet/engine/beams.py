"""Beam search: the likeliest continuations, kept k at a time (read `driver.py` next).

In every step each beam gives its 2k likeliest next tokens, and of all continuations the k of the
best score live on. A beam is a request for one token whose prompt is all that the beam has so far.
The prefix cache gives it the pages of its parent, shared but for the last, which is copied: so a
step computes one position of each beam. Names and algorithm are those of vLLM's offline API; the
score is that of Hugging Face transformers:

    log-probability of the generated tokens / (their number ** length_penalty)

With a form (docs/structured.md) only allowed tokens are considered, with their log-probabilities
among all tokens. So the beams are those of a free search that the form allows, and a beam ends only
where the text is complete.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from martlet.engine.driver import Driver, Prepared
from martlet.engine.outputs import RequestOutput
from martlet.errors import MartletError, RequestError
from martlet.sampling_params import SamplingParams
from martlet.structured import Structured
from martlet.tokenizer.tokenizer import Tokenizer
from martlet.types import GRAMMAR_LIMIT, Request, Scheduling

MAX_WIDTH = 256
# likeliest tokens; GRAMMAR_LIMIT if a string was cut
_Next = tuple[list[tuple[int, float]], str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """How to search. Raises RequestError, naming the field, for a value out of range."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False  # an end token is a token like any other
    temperature: float = 0.0  # only 0: there is nothing to draw
    structured: Structured | None = None  # the form of every beam; also a mapping of its fields
    # above 1 favours long answers, below 1 short ones; 0: log-probability
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        for name, most in (("beam_width", MAX_WIDTH), ("max_tokens", 1 << 31)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise RequestError(f"{name} is {value!r}; expected a whole number from 1 to {most:,}.", param=name)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos is {self.ignore_eos!r}; expected True or False.", param="ignore_eos")
        object.__setattr__(self, "structured", Structured.from_value(self.structured))
        if self.temperature != 0:
            raise RequestError(
                f"temperature is {self.temperature!r}; beam search draws nothing, so only 0 has a meaning.",
                param="temperature",
            )
        penalty = self.length_penalty
        if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not abs(penalty) <= 100:
            raise RequestError(
                f"length_penalty is {penalty!r}; expected a number from -100 to 100.", param="length_penalty"
            )
        self.one_token()  # it refuses parameters that contradict a form

    def one_token(self) -> SamplingParams:
        """The parameters of a beam's request for its likeliest next tokens."""
        return SamplingParams(
            max_tokens=1,
            temperature=0,
            ignore_eos=self.ignore_eos and self.structured is not None,
            structured=self.structured,
            logprobs=2 * self.beam_width,
            logprobs_mode="raw" if self.structured is None else "allowed",
            detokenize=False,
        )


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A beam. `token_ids` are the generated tokens, with the one that ended it; `text` omits it.

    It ends with "length" at max_tokens, or if a string in its form reached the form's
    `string_limit`.
    """

    token_ids: tuple[int, ...] = ()
    cum_logprob: float = 0.0
    text: str = ""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | None = None  # "grammar_limit" if a string reached its limit

    def score(self, length_penalty: float) -> float:
        """The score that ranks beams."""
        return self.cum_logprob / math.pow(max(1, len(self.token_ids)), length_penalty)


@dataclass(slots=True)
class BeamSearchOutput:
    """The beams of one prompt, the best first."""

    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[BeamSearchSequence] = field(default_factory=list)


class _Search:
    """The search of one prompt."""

    def __init__(self, output: BeamSearchOutput, params: BeamSearchParams, eog_ids: frozenset[int], room: int) -> None:
        self.output = output
        self.params = params
        self.beams = [BeamSearchSequence()]
        self._ends = frozenset() if params.ignore_eos else eog_ids
        self._done: list[BeamSearchSequence] = []
        self._most = min(params.max_tokens, room)

    def advance(self, candidates: Sequence[_Next]) -> None:
        """Choose the beams that live on from the likeliest next tokens of each beam."""
        penalty, width = self.params.length_penalty, self.params.beam_width
        longer: list[BeamSearchSequence] = []
        for beam, (tokens, limit) in zip(self.beams, candidates, strict=True):
            for token_id, logprob in tokens:
                ends = token_id in self._ends
                made = BeamSearchSequence(
                    (*beam.token_ids, token_id),
                    beam.cum_logprob + logprob,
                    finish_reason="stop" if ends and limit is None else "length",
                    stop_reason=limit if ends else None,
                )
                (self._done if ends else longer).append(made)
        self._done = self._best(self._done)
        self.beams = sorted(longer, key=lambda beam: beam.score(penalty), reverse=True)[:width]
        if not self.beams or len(self.beams[0].token_ids) == self._most:
            self.output.sequences = self._best([*self._done, *self.beams])
            self.beams = []

    def _best(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=lambda beam: beam.score(self.params.length_penalty), reverse=True)[
            : self.params.beam_width
        ]


def search_beams(
    driver: Driver,
    tokenizer: Tokenizer,
    prompts: Sequence[tuple[str | None, Sequence[int], Scheduling, str]],
    params: BeamSearchParams,
    context: int,
    name: str,
) -> list[BeamSearchOutput]:
    """Search for all prompts at once; RequestError if one cannot run. `name` starts their ids.

    A prompt is its text, its ids, its scheduling, and the digest of its adapter.
    """
    if not isinstance(params, BeamSearchParams):
        raise RequestError(
            f"params is of type {type(params).__name__}; expected BeamSearchParams(beam_width=…, max_tokens=…).",
            param="params",
        )
    if 2 * params.beam_width > tokenizer.vocab_size:
        raise RequestError(
            f"beam_width is {params.beam_width}; the vocabulary has {tokenizer.vocab_size} tokens, and two for"
            " each beam are needed.",
            param="beam_width",
        )
    searches = [
        _Search(BeamSearchOutput(text, list(ids)), params, tokenizer.eog_ids, max(1, context - len(ids)))
        for text, ids, *_ in prompts
    ]
    request_params = params.one_token()
    numbers = itertools.count()
    while live := [(search, prompt) for search, prompt in zip(searches, prompts, strict=True) if search.beams]:
        requests = [
            Prepared(
                replace(_request(f"{name}-{next(numbers)}", ids, beam, request_params, scheduling), adapter=adapter)
            )
            for search, (_, ids, scheduling, adapter) in live
            for beam in search.beams
        ]
        answers = iter(driver.run(requests))
        for search, _ in live:
            search.advance([_likeliest(next(answers)) for _ in search.beams])
    for search in searches:
        search.output.sequences = [_with_text(beam, tokenizer) for beam in search.output.sequences]
    return [search.output for search in searches]


def _request(
    name: str, prompt: Sequence[int], beam: BeamSearchSequence, params: SamplingParams, scheduling: Scheduling
) -> Request:
    ids = beam.token_ids
    return Request(name, (*prompt, *ids), params, scheduling=scheduling, n_answered=len(ids))


def _likeliest(answer: RequestOutput) -> _Next:
    [completion] = answer.outputs
    if answer.error is not None or completion.logprobs is None:
        raise MartletError(f"The beam search failed: {answer.error or completion.finish_reason}")
    tokens = [(token_id, entry.logprob) for token_id, entry in completion.logprobs[0].items()]
    return tokens, GRAMMAR_LIMIT if completion.stop_reason == GRAMMAR_LIMIT else None


def _with_text(beam: BeamSearchSequence, tokenizer: Tokenizer) -> BeamSearchSequence:
    ends = beam.finish_reason == "stop" or beam.stop_reason is not None
    ids = beam.token_ids[:-1] if ends else beam.token_ids
    return replace(beam, text=tokenizer.decode(ids, skip_special=True))
