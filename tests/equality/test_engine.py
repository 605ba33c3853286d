"""The equality matrix: tokens and log-probabilities of a request are the same bits whatever else
the engine does.

The plain run computes one request at a time, in one chunk, on one thread. Every row changes one
thing, or two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import NAN_ID, write_nan_model

from martlet import toy
from martlet.errors import CapacityError, FormatError, OracleError, RequestError
from martlet.formats.checkpoint import open_checkpoint
from martlet.llm import LLM, RequestOutput
from martlet.models.decoder import forward
from martlet.models.weights import load_model
from martlet.ops.interface import StepInputs, StepLimits
from martlet.ops.oracle import OracleBackend
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import RawTensor
from martlet.sampling_params import SamplingParams

PAGE_BYTES = 32 * 3 * 2 * 2 * 16 * 2  # tokens, layers, K and V, KV heads, head dim, f16

PROMPTS = [
    "a",
    "The quick brown fox jumps over the lazy dog.",
    "page" * 8,  # exactly a page
    "page" * 8 + "!",
    "".join(chr(97 + number * 7 % 26) for number in range(100)),
]
PARAMS = [
    SamplingParams(max_tokens=60, temperature=0, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=1.0, seed=11, ignore_eos=True, logprobs=2, prompt_logprobs=2),
    SamplingParams(max_tokens=60, temperature=0.8, top_p=0.9, seed=3, repetition_penalty=1.2, logprobs=0),
    SamplingParams(max_tokens=60, temperature=1.5, top_k=40, seed=5, n=2, logprobs=1),
    SamplingParams(max_tokens=50, temperature=0, logprobs=1, prompt_logprobs=0, ignore_eos=True),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy.write_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


def essence(output: RequestOutput) -> tuple[Any, ...]:
    """All that may not change: tokens, text, every log-probability, how it ended."""
    answers = [(a.token_ids, a.text, a.logprobs, a.finish_reason, a.stop_reason) for a in output.outputs]
    return answers, output.prompt_logprobs, output.error


@pytest.fixture(scope="module")
def plain(model: Path) -> Iterator[list[tuple[Any, ...]]]:
    with LLM(str(model), threads=1, max_seqs=2) as llm:
        yield [essence(llm.generate(prompt, params)[0]) for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


ROWS: dict[str, dict[str, Any]] = {
    "batch": {},
    "two threads": {"threads": 2},
    "four threads": {"threads": 4},
    "chunks of 16": {"max_step_tokens": 16},
    "chunks of 7": {"max_step_tokens": 7, "max_seqs": 3},
    "two at a time": {"max_seqs": 2},
    "preemption": {"kv_memory": 5 * PAGE_BYTES},
    "preemption in chunks of 16": {"kv_memory": 5 * PAGE_BYTES, "max_step_tokens": 16, "max_seqs": 8},
    "preemption on two threads": {"kv_memory": 5 * PAGE_BYTES, "threads": 2},
}


@pytest.mark.parametrize("row", ROWS)
def test_the_same_bits(row: str, model: Path, plain: list[tuple[Any, ...]]) -> None:
    """faults SCH-03, SCH-07, KVC-09, SMP-11"""
    with LLM(str(model), **{"threads": 1, "max_seqs": 8, "kv_memory": 64 * PAGE_BYTES, **ROWS[row]}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        preempted = llm._parts.engine.scheduler.n_preempted
    assert [essence(output) for output in outputs] == plain
    assert (preempted > 0) == ("preemption" in row)


def test_what_the_prefix_cache_gives_is_exact(model: Path, plain: list[tuple[Any, ...]]) -> None:
    """ask 11; faults KVC-01, KVC-07: again, all at once, with other ends, and with what was
    generated going on.
    """
    with LLM(str(model), threads=1, max_seqs=8, kv_memory=64 * PAGE_BYTES) as llm:
        for round_number in range(3):
            outputs = llm.generate(PROMPTS, PARAMS)
            assert [essence(output) for output in outputs] == plain, f"round {round_number}"
        used = [output.metrics.cache for output in outputs if output.metrics is not None]
        lengths = [len(output.prompt_token_ids) for output in outputs]
        # Two ask for the log-probabilities of their prompts, which are computed.
        assert [use.n_tokens for use in used if use] == [0, 0, lengths[2] - 1, lengths[3] - 1, 0]
        longest = outputs[3]
        ids = [*longest.prompt_token_ids, *longest.outputs[0].token_ids]
        params = SamplingParams(max_tokens=9, temperature=0, logprobs=2)
        for cut in (1, 31, 32, 33, 34, 40, 63, 64, 65, 70, 80):
            again = [llm.generate([ids[:cut]], params)[0] for _ in range(2)]
            with_other_end = llm.generate([[*ids[: cut - 1], 7, 8]], params)[0]
            with LLM(str(model), threads=1, prefix_cache=False) as alone:
                expected = alone.generate([ids[:cut]], params)[0]
                assert [essence(output) for output in again] == [essence(expected)] * 2, cut
                assert essence(with_other_end) == essence(alone.generate([[*ids[: cut - 1], 7, 8]], params)[0]), cut
        llm._parts.engine.scheduler.check()


@pytest.mark.parametrize("tokens", [512, 16])
def test_what_is_left_after_eviction_is_exact(tokens: int, model: Path, plain: list[tuple[Any, ...]]) -> None:
    """The pool holds one request and a little: each finds what the one before it has left of the
    prefixes.
    """
    with LLM(str(model), threads=1, kv_memory=6 * PAGE_BYTES, max_step_tokens=tokens) as llm:
        for _ in range(3):
            for number in (0, 4, 2, 3, 1, 4, 3):
                assert essence(llm.generate(PROMPTS[number], PARAMS[number])[0]) == plain[number]
                llm._parts.engine.scheduler.check()


def test_a_stream_is_the_whole(model: Path, plain: list[tuple[Any, ...]]) -> None:
    with LLM(str(model), threads=1) as llm:
        stream = llm.stream(PROMPTS[1], PARAMS[1])
        text = "".join(stream)
        assert stream.result is not None
        assert essence(stream.result) == plain[1]
    assert text == plain[1][0][0][1]


def test_an_abort_changes_nothing_for_others(model: Path, plain: list[tuple[Any, ...]]) -> None:
    with LLM(str(model), threads=1) as llm:
        left = llm.stream(PROMPTS[4], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
        next(left)
        other = llm.stream(PROMPTS[1], PARAMS[1])
        next(other)
        left.close()
        _ = list(other)
        assert other.result is not None
        assert essence(other.result) == plain[1]


def test_f32_pages_are_exact_too(model: Path) -> None:
    found = []
    for options in ({"max_step_tokens": 16}, {"threads": 2}):
        with LLM(str(model), kv_dtype="f32", **{"threads": 1, **options}) as llm:  # type: ignore[arg-type]
            found.append([essence(output) for output in llm.generate(PROMPTS, PARAMS)])
    assert found[0] == found[1]


def test_the_cpu_agrees_with_the_reference(tmp_path: Path) -> None:
    """Float weights: greedy tokens are equal, and log-probabilities to what float32 sums differ
    by.
    """
    path = str(toy.write_model(tmp_path / "float.gguf", quantised=False))
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=0, prompt_logprobs=0, ignore_eos=True)
    outputs = []
    for backend in ("cpu", "reference"):
        with LLM(path, backend=backend, threads=1, kv_dtype="f32") as llm:
            outputs.append(llm.generate(PROMPTS, params))
    for fast, exact in zip(*outputs, strict=True):
        assert fast.outputs[0].token_ids == exact.outputs[0].token_ids
        for ours, theirs in zip(fast.outputs[0].logprobs or [], exact.outputs[0].logprobs or [], strict=True):
            assert [e.logprob for e in ours.values()] == pytest.approx([e.logprob for e in theirs.values()], abs=1e-4)
        scored = zip((fast.prompt_logprobs or [])[1:], (exact.prompt_logprobs or [])[1:], strict=True)
        for one, other in scored:
            assert one is not None
            assert other is not None
            assert [e.logprob for e in one.values()] == pytest.approx([e.logprob for e in other.values()], abs=1e-4)


def test_embeddings_do_not_depend_on_chunks(model: Path) -> None:
    found = []
    for tokens in (512, 16):
        with LLM(str(model), threads=1, max_step_tokens=tokens) as llm:
            found.append([output.embedding for output in llm.encode(PROMPTS)])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)
        assert np.linalg.norm(one) == pytest.approx(1.0, abs=1e-6)
    assert not np.allclose(found[0][1], found[0][4], atol=1e-2)


def test_nan_ends_the_request_that_has_it(tmp_path: Path) -> None:
    """fault SMP-17"""
    path = str(write_nan_model(tmp_path / "nan.gguf"))
    with LLM(path, threads=1) as llm:
        [alone] = llm.generate(PROMPTS[1], PARAMS[0])
        good, bad = llm.generate([PROMPTS[1], [97, NAN_ID]], PARAMS[0])
    assert essence(good) == essence(alone)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "nan" in bad.error


def test_parameters_are_checked_against_the_vocabulary(model: Path) -> None:
    """fault SMP-13: refused before anything runs, and the next request is served."""
    with LLM(str(model), threads=1) as llm:
        with pytest.raises(RequestError, match="logit_bias"):
            llm.generate("a", SamplingParams(logit_bias={999999: 5.0}))
        assert llm.generate("a", SamplingParams(max_tokens=2))[0].finished


def test_prompts_are_truncated_where_asked(model: Path) -> None:
    with LLM(str(model), threads=1, max_context=64) as llm:
        for keep, expected in ((3, 3), (-1, 63), (500, None)):
            params = SamplingParams(max_tokens=1, truncate_prompt_tokens=keep)
            if expected is None:
                with pytest.raises(RequestError, match="context"):
                    llm.generate("x" * 100, params)
            else:
                assert len(llm.generate("x" * 100, params)[0].prompt_token_ids) == expected


def test_the_oracle_finds_nothing(model: Path, plain: list[tuple[Any, ...]]) -> None:
    with LLM(str(model), threads=1, oracle=True) as llm:
        outputs = llm.generate(PROMPTS[:2], PARAMS[:2])
    assert [essence(output) for output in outputs] == plain[:2]


class WrongSign(ReferenceBackend):
    """Flips the sign of one row of one matrix."""

    def __init__(self, tensor: str) -> None:
        super().__init__()
        self._tensor = tensor

    def pack(self, tensors: Sequence[RawTensor]) -> Any:
        weight = np.array(super().pack(tensors))
        if self._tensor in [tensor.name for tensor in tensors]:
            weight[5] = -weight[5]
        return weight


@pytest.mark.parametrize("tensor", ["blk.1.ffn_down.weight", "blk.2.attn_k.weight", "token_embd.weight"])
def test_the_oracle_names_the_operation_with_a_wrong_sign(model: Path, tensor: str) -> None:
    """Layer, operation, tensor and error are in the message."""
    ops = OracleBackend(WrongSign(tensor), ReferenceBackend())
    with open_checkpoint(model) as checkpoint:
        loaded = load_model(checkpoint, ops)
        caches = [ops.kv_cache(1, 32, 2, 16, "f32") for _ in range(3)]
        program = ops.capture(lambda: forward(ops, loaded, caches), StepLimits(8, 1, 1, 1))
        rows = np.arange(8, dtype=np.int32)
        inputs = StepInputs(
            rows + 65, rows, rows, np.array([0, 8], np.int32), np.zeros((1, 1), np.int32), np.array([7], np.int32)
        )
        with pytest.raises(OracleError) as caught:
            program.run(inputs)
    layer = f"layer {tensor.split('.')[1]}" if tensor.startswith("blk") else "outside the layers"
    assert f"{layer}, linear with " in str(caught.value)
    assert tensor in str(caught.value)
    assert "column 5 found" in str(caught.value)


def test_start_and_settings(model: Path) -> None:
    with LLM(str(model), threads=1) as llm:
        assert [phase.name for phase in llm.start_timeline] == ["read", "plan", "map", "compile", "warm"]
        settings = {setting.name: setting for setting in llm.config.settings()}
        assert (settings["max_context"].value, settings["max_context"].origin) == (256, "model file")
        # a context of 256 tokens for each sequence that may run
        assert llm.plan.kv == 16 * 8 * PAGE_BYTES


def test_what_is_no_model(tmp_path: Path, model: Path) -> None:
    with pytest.raises(RequestError, match="There is no file"):
        LLM(str(tmp_path / "nothing.gguf"))
    (tmp_path / "cut.gguf").write_bytes(model.read_bytes()[:-100])
    with pytest.raises(FormatError):
        LLM(str(tmp_path / "cut.gguf"))
    with pytest.raises(CapacityError, match="kv_memory"):
        LLM(str(model), kv_memory=100)
    with pytest.raises(RequestError, match="trained for 256"):
        LLM(str(model), max_context=257)
