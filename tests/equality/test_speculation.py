"""Guesses change when a token comes, and never which: drafters that are wrong, right, and both, on
all ends of a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import write_kind

from martlet import LLM, SamplingParams, toy
from martlet.errors import RequestError
from martlet.speculate.drafter import Draft, DraftRequest
from martlet.structured import Structured
from martlet.toy import END

HALF = (65, 66)


class Oracle:
    """Knows the answers; every `wrong`-th guess is another token (0: none). Counts what it was
    asked.
    """

    costless = True
    priors = (0.5,)

    def __init__(self, answers: dict[tuple[int, ...], list[int]], wrong: int = 0) -> None:
        self.answers, self.wrong, self.n_asked = answers, wrong, 0

    def read(self, seq: Any, ids: Sequence[int], most: int) -> int:
        return 0

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft | None]:
        return [self._guess(request) for request in requests]

    def forget(self, seqs: Any) -> None: ...

    def _guess(self, request: DraftRequest) -> Draft | None:
        for prompt, answer in self.answers.items():
            if tuple(request.ids[: len(prompt)]) == prompt:
                done = len(request.ids) - len(prompt)
                ids = answer[done : done + request.most]
                for place in range(len(ids)):
                    self.n_asked += 1
                    if self.wrong and self.n_asked % self.wrong == 0:
                        ids[place] ^= 1
                return Draft(tuple(ids), (0,) * len(ids)) if ids else None
        return None


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), draft="ngram", threads=1, max_context=200, max_seqs=4) as llm:
        yield llm


def ask(llm: LLM, prompts: Sequence[str], params: SamplingParams, drafter: Oracle | None) -> list[Any]:
    """What came: ids, text, ends, log-probabilities, of each completion; and how many tokens and
    gaps were counted.
    """
    speculator: Any = llm.engine._speculator
    before = speculator._drafter
    speculator._drafter = drafter or before
    try:
        outputs = llm.generate(list(prompts), params)
    finally:
        speculator._drafter = before
    for output in outputs:
        assert output.metrics.n_generated == sum(len(c.token_ids) for c in output.outputs)
        assert len(output.metrics.gaps_s) == output.metrics.n_generated - len(output.outputs)
    return [(c.token_ids, c.text, c.finish_reason, c.stop_reason, repr(c.logprobs)) for o in outputs for c in o.outputs]


def vars_of(params: SamplingParams) -> dict[str, Any]:
    return {f: getattr(params, f) for f in params.__dataclass_fields__}


def with_guesses(params: SamplingParams, n: int) -> SamplingParams:
    return SamplingParams(**{**vars_of(params), "draft_tokens": n})


CASES = [
    {"temperature": 0.0, "ignore_eos": True},
    {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": 2},
    {"temperature": 1.3, "seed": 4, "top_p": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "logprobs": 0},
    {"temperature": 1.0, "seed": 5, "mirostat": 2, "ignore_eos": True},
    {"temperature": 1.0, "seed": 6, "no_repeat_ngram_size": 2, "logit_bias": {END: 3.0}, "min_tokens": 9},
]


@pytest.mark.parametrize("more", CASES, ids=lambda more: "-".join(f"{k}" for k in more))
@pytest.mark.parametrize("wrong", [0, 1, 3], ids=["right", "wrong", "now and then"])
def test_answers_are_those_without_guesses(llm: LLM, more: dict[str, Any], wrong: int) -> None:
    """Fault SPD-01: a first guess that is wrong is refused like any other; all are counted as what
    they were.
    """
    prompts = ["The harbour", "Two friends"]
    params = SamplingParams(max_tokens=40, draft_tokens=0, **more)
    plain = ask(llm, prompts, params, None)
    known = {tuple(llm._parts.tokenizer.encode(p)): list(found[0]) for p, found in zip(prompts, plain, strict=True)}
    totals = llm.engine.totals.speculation
    n_drafted, n_accepted = totals.n_drafted, totals.n_accepted
    assert ask(llm, prompts, with_guesses(params, 5), Oracle(known, wrong)) == plain
    drafted, accepted = totals.n_drafted - n_drafted, totals.n_accepted - n_accepted
    if wrong == 1:
        assert drafted > 0
        assert accepted == 0
    else:
        assert accepted > drafted / 8 > 0
    if wrong == 0 and more.get("ignore_eos"):
        assert accepted == drafted


@pytest.mark.parametrize("n", [1, 2, 7, 40])
@pytest.mark.parametrize("end", [{"max_tokens": 17}, {"max_tokens": None}, {"stop": ("Q",)}, {"stop_token_ids": (81,)}])
def test_an_end_inside_the_guesses(llm: LLM, n: int, end: dict[str, Any]) -> None:
    """max_tokens, the context, a stop string and a stop token in the middle of guesses that are all
    right.
    """
    params = SamplingParams(**{"temperature": 1.0, "seed": 9, "ignore_eos": True, "max_tokens": 60, **end})
    plain = ask(llm, ["abc"], with_guesses(params, 0), None)
    longer = ask(llm, ["abc"], SamplingParams(temperature=1.0, seed=9, ignore_eos=True, max_tokens=None), None)
    known = {tuple(llm._parts.tokenizer.encode("abc")): list(longer[0][0])}
    assert ask(llm, ["abc"], with_guesses(params, n), Oracle(known)) == plain
    llm.engine.scheduler.check()


def test_guesses_beyond_a_stop_string_are_not_counted(llm: LLM) -> None:
    """The answer ends at the second of seven guesses: what came after it is in no count."""
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=40, allowed_token_ids=tuple(range(65, 91)))
    [(ids, text, *_)] = ask(llm, ["abc"], with_guesses(params, 0), None)
    assert text == "".join(map(chr, ids))  # a token is a letter
    params = SamplingParams(**{**vars_of(params), "stop": (text[:3],)})
    [plain] = ask(llm, ["abc"], with_guesses(params, 0), None)
    assert plain[0] == ids[:3]
    known = {tuple(llm._parts.tokenizer.encode("abc")): ids}
    assert ask(llm, ["abc"], with_guesses(params, 7), Oracle(known)) == [plain]


def test_two_tokens_of_equal_logits_come_equally_often(tiny: Path) -> None:
    """Fault SPD-05: a sampled request is verified by sampling. 400 ± 4 standard deviations of 10
    would be 360 … 440 in 800.
    """
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=180, allowed_token_ids=HALF, ignore_eos=True, n=5)
    found = {}
    for draft in ("off", "ngram"):
        with LLM(str(tiny), backend="null", draft=draft, threads=1, max_context=200) as llm:
            [output] = llm.generate(["x"], with_guesses(params, 4) if draft == "ngram" else params)
            found[draft] = [completion.token_ids for completion in output.outputs]
            if draft == "ngram":
                assert output.metrics is not None
                assert output.metrics.n_drafted > output.metrics.n_accepted > 100
    assert found["off"] == found["ngram"]
    ids = np.array(found["ngram"])
    assert abs(int((ids == HALF[0]).sum()) - ids.size / 2) < 4 * ids.size**0.5 / 2


def test_guesses_that_are_asked_of_nobody_are_refused(tiny: Path) -> None:
    with LLM(str(tiny), draft="off", threads=1, max_context=64) as llm:
        with pytest.raises(RequestError, match="guesses nothing") as refused:
            llm.generate("x", SamplingParams(draft_tokens=2))
        assert refused.value.param == "draft_tokens"
        llm.generate("x", SamplingParams(draft_tokens=0, max_tokens=1))


def test_a_draft_model_of_another_vocabulary_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no file or folder") as refused:
        LLM(str(tiny), draft=f"model={tmp_path / 'none.gguf'}", threads=1)
    assert refused.value.param == "draft"


def test_a_draft_model_that_is_the_model_guesses_greedy_answers(tmp_path: Path) -> None:
    """Every guess is right, so with three of them an answer of 41 tokens takes the prompt's step
    and ten more.
    """
    path = write_kind("quantised", tmp_path)
    with LLM(str(path), draft=f"model={path}", threads=1, max_context=200) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=41, ignore_eos=True)
        [plain] = llm.generate("some words", with_guesses(params, 0))
        before = llm.engine.totals.n_steps
        [output] = llm.generate("some words", with_guesses(params, 3))
        assert llm.engine.totals.n_steps - before == 11
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics is not None
    assert output.metrics.n_accepted == output.metrics.n_drafted == 30


def test_guesses_and_a_grammar(llm: LLM) -> None:
    """Fault SPD-03: guesses that a schema does not allow are refused; text that it forces comes
    several tokens a step.
    """
    schema = (
        '{"type": "object", "properties": {"temperature": {"type": "integer"}, "name": {"enum": ["north", "south"]}},'
    )
    schema += ' "required": ["temperature", "name"], "additionalProperties": false}'
    params = SamplingParams(temperature=1.0, seed=8, max_tokens=90, structured=Structured(json=schema), draft_tokens=0)
    plain = ask(llm, ["abc"], params, None)
    assert plain[0][1].startswith('{"temperature":')
    wrong = [*b'{"temperature":}}}', *plain[0][0][18:]]  # illegal in the middle
    known = {tuple(llm._parts.tokenizer.encode("abc")): wrong}
    totals = llm.engine.totals
    before, n_accepted = totals.n_steps, totals.speculation.n_accepted
    assert ask(llm, ["abc"], with_guesses(params, 6), Oracle(known)) == plain
    # {"temperature": and ,"name":" are forced
    assert totals.speculation.n_accepted - n_accepted >= 15
    assert totals.n_steps - before < len(plain[0][0]) - 10
