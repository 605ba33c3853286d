"""The equality matrix of compressed KV pages: at equal precision a request's answer is the same
bits, whatever else runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from martlet import toy
from martlet.kv_types import parse_kv_types
from martlet.llm import LLM, RequestOutput
from martlet.runtime.kv import kv_bytes_per_token
from martlet.sampling_params import SamplingParams

PROMPTS = [
    "a",
    "The quick brown fox jumps over the lazy dog. " * 3,  # beyond the first group of 64
    "group of 64 tokens, and no more: " + "x" * 31,  # exactly a group
    "".join(chr(97 + number * 7 % 26) for number in range(100)),
]
PARAMS = [
    SamplingParams(max_tokens=90, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=1.0, seed=11, ignore_eos=True, logprobs=2, prompt_logprobs=2),
    SamplingParams(max_tokens=70, temperature=1.5, top_k=40, seed=5, n=2, logprobs=1),
    SamplingParams(max_tokens=50, temperature=0, logprobs=1, ignore_eos=True),
]
TYPES = ["q8", "q4", "q4,q8:0,f16:2"]
ROWS: dict[str, dict[str, Any]] = {
    "batch": {},
    "three threads": {"threads": 3},
    "chunks of 16": {"max_step_tokens": 16},
    "chunks of 7 on two threads": {"max_step_tokens": 7, "max_seqs": 3, "threads": 2},
    "preemption": {"pages": 8},
    "preemption in chunks of 7": {"pages": 8, "max_step_tokens": 7, "max_seqs": 6},
    "no prefix cache": {"prefix_cache": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def essence(output: RequestOutput) -> tuple[Any, ...]:
    """All that may not change."""
    answers = [(a.token_ids, a.text, a.logprobs, a.finish_reason, a.stop_reason) for a in output.outputs]
    return answers, output.prompt_logprobs, output.error


def open_llm(model: Path, kv_dtype: str, pages: int = 64, **options: Any) -> LLM:
    """An engine with so many pages."""
    with LLM(str(model), backend="null", threads=1) as llm:
        per_token = kv_bytes_per_token(llm._parts.spec, parse_kv_types(kv_dtype))
    options = {"threads": 1, "max_seqs": 8, "kv_memory": pages * 32 * per_token, **options}
    return LLM(str(model), kv_dtype=kv_dtype, **options)


@pytest.fixture(scope="module", params=TYPES)
def plain(request: pytest.FixtureRequest, model: Path) -> tuple[str, list[tuple[Any, ...]]]:
    with open_llm(model, request.param, max_seqs=2, prefix_cache=False) as llm:
        answers = [essence(llm.generate(prompt, params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    return request.param, answers


@pytest.mark.parametrize("row", ROWS)
def test_the_same_bits(row: str, model: Path, plain: tuple[str, list[tuple[Any, ...]]]) -> None:
    kv_dtype, expected = plain
    with open_llm(model, kv_dtype, **ROWS[row]) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        preempted = llm._parts.engine.scheduler.n_preempted
        llm._parts.engine.scheduler.check()
    assert [essence(output) for output in outputs] == expected
    assert (preempted > 0) == ("preemption" in row)


def test_the_precision_is_really_another(model: Path, plain: tuple[str, list[tuple[Any, ...]]]) -> None:
    with open_llm(model, "f16") as llm:
        answers = [essence(output) for output in llm.generate(PROMPTS, PARAMS)]
    assert answers != plain[1]


def test_what_the_prefix_cache_gives_is_exact(model: Path, plain: tuple[str, list[tuple[Any, ...]]]) -> None:
    """q4 sequences resume at multiples of their group, q8 anywhere; a chat goes on from what was
    generated.
    """
    kv_dtype, expected = plain
    with open_llm(model, kv_dtype) as llm:
        for _ in range(2):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [essence(output) for output in outputs] == expected
        used = outputs[3].metrics.cache if outputs[3].metrics else None
        assert used is not None
        assert used.n_tokens == (99 if kv_dtype == "q8" else 64)
        ids = [*outputs[3].prompt_token_ids, *outputs[3].outputs[0].token_ids]
        params = SamplingParams(max_tokens=9, temperature=0, logprobs=2)
        for cut in (1, 33, 63, 64, 65, 100, 128, 129, 140):
            again = llm.generate([ids[:cut]], params)[0]
            other_end = llm.generate([[*ids[: cut - 1], 7, 8]], params)[0]
            with open_llm(model, kv_dtype, prefix_cache=False) as alone:
                assert essence(again) == essence(alone.generate([ids[:cut]], params)[0]), cut
                assert essence(other_end) == essence(alone.generate([[*ids[: cut - 1], 7, 8]], params)[0]), cut


def test_pages_kept_on_disk_are_exact(model: Path, tmp_path: Path, plain: tuple[str, list[tuple[Any, ...]]]) -> None:
    kv_dtype, expected = plain
    for _ in range(2):
        with open_llm(model, kv_dtype, pages=12, kv_disk=tmp_path) as llm:
            for number in (3, 1, 3, 0):
                assert essence(llm.generate(PROMPTS[number], PARAMS[number])[0]) == expected[number]


def test_embeddings_do_not_depend_on_chunks(model: Path, plain: tuple[str, list[tuple[Any, ...]]]) -> None:
    found = []
    for tokens in (512, 16):
        with open_llm(model, plain[0], max_step_tokens=tokens) as llm:
            found.append([output.embedding for output in llm.encode(PROMPTS)])
    for one, other in zip(*found, strict=True):
        assert abs(one - other).max() < 1e-6


@pytest.mark.parametrize("kv_dtype", ["q8", "q4"])
def test_the_oracle_finds_nothing(model: Path, kv_dtype: str) -> None:
    with open_llm(model, kv_dtype, oracle=True, max_step_tokens=16) as llm:
        outputs = llm.generate(PROMPTS[1:3], PARAMS[1:3])
    assert all(output.error is None for output in outputs)
