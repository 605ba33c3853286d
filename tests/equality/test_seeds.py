"""Seeds that nobody gave: an answer says which was drawn, and that seed gives the same tokens
again.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from martlet import toy
from martlet.config import Origin, Setting
from martlet.llm import LLM
from martlet.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, threads=1) as made:
        yield made


def tokens(llm: LLM, **given: object) -> tuple[list[list[int]], Setting]:
    params = {"max_tokens": 12, "temperature": 1.5, "ignore_eos": True, **given}
    [output] = llm.generate("hello", params)
    [seed] = [setting for setting in output.settings if setting.name == "seed"]
    return [answer.token_ids for answer in output.outputs], seed


@pytest.mark.parametrize("n", [1, 3])
def test_a_drawn_seed_is_shown_and_repeats_the_answer(llm: LLM, n: int) -> None:
    first, drawn = tokens(llm, n=n)
    assert drawn.origin is Origin.DRAWN
    again, given = tokens(llm, n=n, seed=drawn.value)
    assert (again, given.origin) == (first, Origin.OPTION)
    other, another = tokens(llm, n=n)
    assert another.value != drawn.value
    assert other != first
    assert len({tuple(answer) for answer in first}) == n  # completions of one seed are not copies


def test_the_engines_seed_gives_the_same_seeds_in_the_order_of_requests(model: str) -> None:
    found = []
    for _ in range(2):
        with LLM(model, threads=1, seed=5) as llm:
            found.append([tokens(llm), tokens(llm, seed=9), tokens(llm)])
    assert found[0] == found[1]
    assert found[0][0][1].value != found[0][2][1].value
    assert "engine" in found[0][0][1].note


def test_a_greedy_request_draws_no_seed(llm: LLM) -> None:
    _, seed = tokens(llm, temperature=0.0)
    assert (seed.value, seed.origin) == (None, Origin.DEFAULT)
    # a stream's answer says it from the start
    with llm.stream("x", SamplingParams(max_tokens=1)) as stream:
        assert next(s.origin for s in stream.output.settings if s.name == "seed") is Origin.DRAWN
