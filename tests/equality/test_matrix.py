"""The equality matrix: what else the engine does never changes a request's tokens or log-probabilities, bit for bit.

Each feature alone and each pair of features is compared with the plain run: one request at a time, the whole prompt in
one step, two threads. A new feature of the engine is a new entry of FEATURES.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from martlet import LLM, SamplingParams

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea, there lived an old fisherman who " * 6,
    "3333+777? é 東京 \t\n",
]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3),
    SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, logprobs=3, repetition_penalty=1.1),
    SamplingParams(temperature=1.2, top_k=40, min_p=0.02, seed=11, max_tokens=12, logprobs=3, prompt_logprobs=2),
    SamplingParams(temperature=0.0, max_tokens=12, logprobs=3, min_tokens=5),
]
CONTEXT = 256
# Feature → options of the engine that turn it on; "batch" means that all requests are given at once, "again" that they
# were all answered before, so that their prefixes are cached.
FEATURES: dict[str, dict[str, Any]] = {
    "one thread": {"threads": 1},
    "four threads": {"threads": 4},
    "chunks of 7": {"max_step_tokens": 7, "max_seqs": 4},
    "batch": {},
    "again": {},
    "chunks by time": {"stall_ms": 1.0, "policy": "shortest"},  # no step is as short: the smallest chunks there are
    "no prefix cache": {"prefix_cache": False},
    "few pages": {"kv_memory": 9 * 32 * 23_040},  # of 32 tokens; all four requests need 10: somebody is preempted
}
PAIRS = [(name,) for name in FEATURES] + [
    pair
    for pair in itertools.combinations(FEATURES, 2)
    if pair not in (("one thread", "four threads"), ("again", "no prefix cache"))
]

Answers = list[Any]


def answers(path: Path, batch: bool, again: bool = False, **options: Any) -> Answers:
    """Everything that the requests got, in a form that only equal bits make equal; `again`: when they come again."""
    with LLM(str(path), **{"max_context": CONTEXT, "threads": 2, **options}) as llm:
        if again:
            llm.generate(PROMPTS, PARAMS)
        if batch:
            outputs = llm.generate(PROMPTS, PARAMS)
        else:
            outputs = [llm.generate(prompt, params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    return [
        (o.prompt_token_ids, o.prompt_logprobs, [(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in o.outputs])
        for o in outputs
    ]


@pytest.fixture(scope="module")
def plain(smollm2_path: Path) -> Answers:
    return answers(smollm2_path, batch=False)


@pytest.mark.model
@pytest.mark.parametrize("features", PAIRS, ids=" + ".join)
def test_a_feature_or_a_pair_changes_nothing(smollm2_path: Path, plain: Answers, features: tuple[str, ...]) -> None:
    options: dict[str, Any] = {}
    for feature in features:
        options |= FEATURES[feature]
    if "kv_memory" in options:
        options["max_context"] = 224  # what seven pages hold: any one request fits, all together do not
    batch = "batch" in features or "few pages" in features
    assert answers(smollm2_path, batch, "again" in features, **options) == plain


@pytest.mark.model
@pytest.mark.parametrize(("kv_dtype", "token_bytes"), [("q8", 12_240), ("q4", 7_200)])
def test_compressed_kv_is_as_exact_at_its_precision(
    smollm2_path: Path, plain: Answers, kv_dtype: str, token_bytes: int
) -> None:
    alone = answers(smollm2_path, batch=False, kv_dtype=kv_dtype)
    assert alone != plain
    few_pages = {"max_context": 224, "kv_memory": 9 * 32 * token_bytes}
    for options in ({"threads": 4}, {"max_step_tokens": 7, "max_seqs": 4}, few_pages):
        assert answers(smollm2_path, batch=True, kv_dtype=kv_dtype, **options) == alone


@pytest.mark.model
def test_several_samples_of_a_request_are_what_each_would_be_alone(smollm2_path: Path) -> None:
    """n > 1: completion i has its own random numbers, whatever its siblings do."""
    many = SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=4)
    with LLM(str(smollm2_path), max_context=CONTEXT) as llm:
        four = llm.generate(PROMPTS[0], many)[0].outputs
        two = llm.generate(PROMPTS[0], SamplingParams(temperature=1.0, seed=3, max_tokens=8, n=2))[0].outputs
    assert [c.token_ids for c in four[:2]] == [c.token_ids for c in two]
    assert len({tuple(c.token_ids) for c in four}) > 1


STEM = "In a small village by the sea there lived an old fisherman who had never learned to swim. " * 5  # 95 tokens
LONG = [STEM + "He said:", STEM + "One day", STEM[90:] + "A ship", STEM + STEM[:40], STEM + "He said: never"]
LONG_PARAMS = [SamplingParams(temperature=t, seed=5, max_tokens=16, logprobs=2) for t in (0.0, 0.8, 1.0, 0.0, 0.7)]


def long_answers(llm: LLM, batch: bool) -> tuple[Answers, int]:
    """What the long prompts got, and how many tokens of them came from the second tier."""
    if batch:
        outputs = llm.generate(LONG, LONG_PARAMS)
    else:
        outputs = [llm.generate(prompt, params)[0] for prompt, params in zip(LONG, LONG_PARAMS, strict=True)]
    loaded = sum(o.metrics.n_loaded for o in outputs if o.metrics is not None)
    return [[(c.token_ids, c.text, c.logprobs, c.finish_reason) for c in o.outputs] for o in outputs], loaded


@pytest.fixture(scope="module")
def plain_long(smollm2_path: Path) -> Answers:
    with LLM(str(smollm2_path), max_context=CONTEXT, threads=2, prefix_cache=False) as llm:
        return long_answers(llm, batch=False)[0]


@pytest.mark.model
@pytest.mark.parametrize("feature", ["alone", "one thread", "four threads", "chunks of 7", "batch"])
def test_pages_from_the_second_tier_change_nothing(
    smollm2_path: Path, plain_long: Answers, tmp_path: Path, feature: str
) -> None:
    """The tier, alone and with each feature: in a pool that pushes pages out, and in a process that starts with them."""
    options: dict[str, Any] = {"threads": 2, "kv_memory": 9 * 32 * 23_040, "max_context": 224, "kv_disk": str(tmp_path)}
    options |= FEATURES.get(feature, {})
    loaded = []
    for _ in range(2):
        with LLM(str(smollm2_path), **options) as llm:
            for _ in range(2):
                found, n_loaded = long_answers(llm, batch=feature == "batch")
                assert found == plain_long
                loaded.append(n_loaded)
    assert loaded[2] > 0  # of the process before
    assert loaded[1] > 0 or feature in ("chunks of 7", "batch")  # evicted, and back; or the pool keeps what they share
