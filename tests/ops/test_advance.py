"""Several steps in one program: the likeliest token, and a program that goes on from it against the
same steps one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blocks import random_tensor
from kernel_calls import F32, Kernels, Step, bits, columns

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.kernels.fields import STEP_LOGITS
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.ops.oracle import OracleBackend
from martlet.ops.reference import ReferenceBackend
from martlet.quant.table import BlockType, RawTensor
from martlet.spec import Attention, Rope

BACKENDS: dict[str, Callable[[Path], Any]] = {
    "reference": lambda folder: ReferenceBackend(),
    "cpu": lambda folder: CpuBackend(2, folder),
}
G, H, D, PAGE, V = 2, 4, 16, 32, 50
C = H * D
I32 = np.int32


@pytest.mark.parametrize("width", [1, 3, 16, 17, 100, 8192])
def test_argmax(kernels: Kernels, width: int) -> None:
    """Token, probability, and the chance of it and those before; of equals the first; nothing
    beside is read or written.
    """
    rng = np.random.default_rng(width)
    x, out, before = columns(3, width, width + 7, 5), columns(3, 3, 9, 2), columns(3, 3, 5, 1)
    x[:] = rng.standard_normal(x.shape) * 3
    x[1, [0, width // 2, width - 1]] = 20.0
    before[:] = rng.random(before.shape)
    tokens = rng.permutation(width + 40)[:width].astype(np.float32)
    want = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
    shares = 1 / want.sum(axis=1)
    for args, chance in (((0, 0), shares), ((before,), shares * before[:, 2])):
        out[:] = np.nan
        logit_rows = Step(5, logit_rows=[0, 2, 4])
        kernels("argmax", logit_rows, x, out, width, tokens.ctypes.data, *args, threads=2, rows=STEP_LOGITS)
        assert out[:, 0].tolist() == tokens[x.argmax(axis=1)].tolist()
        np.testing.assert_allclose(out[:, 1:], np.stack([shares, chance], axis=1), rtol=4e-6)
        assert np.isnan(np.delete(out.base, [2, 3, 4], axis=1)).all()


@pytest.mark.parametrize("width", [1, 3, 16, 17, 100, 8192])
def test_choose_is_the_definition(kernels: Kernels, width: int) -> None:
    """The first of equals; -1 of a row with NaN, or whose largest is infinite."""
    rng = np.random.default_rng(width)
    x, out = columns(7, width, width + 7, 5), columns(7, 1, 9, 2)
    x[:] = rng.standard_normal(x.shape) * 3
    x[1, [0, width // 2, width - 1]] = 20.0
    x[2, width - 1], x[3, width // 2], x[4, 0] = np.nan, np.inf, -np.inf
    x[5] = -np.inf
    x[6, -1] = 30.0
    kernels("choose", Step(9, logit_rows=range(7)), x, out, width, threads=2, rows=STEP_LOGITS)
    ops, expected = ReferenceBackend(), np.zeros((7, 1), np.float32)
    ops.choose(x, expected)
    assert out.tolist() == expected.tolist()
    assert expected[[1, 2, 3, 5, 6], 0].tolist() == [0, -1, -1, -1, width - 1]
    assert np.isnan(np.delete(out.base, 2, axis=1)).all()


def test_choose_in_a_program_and_under_the_oracle(kernel_folder: Path) -> None:
    """All backends choose alike, from some columns of the logits."""
    cpu = CpuBackend(2, kernel_folder)
    ids = [3, 1, 4]
    inputs = StepInputs(
        np.array(ids, I32), np.arange(3, dtype=I32), np.arange(3, dtype=I32), np.array([0, 3], I32),
        np.zeros((1, 1), I32), np.array([0, 2], I32),
    )  # fmt: skip
    table = RawTensor(
        "table", (8, 32), BlockType.F32, np.random.default_rng(0).standard_normal(256).astype(np.float32).view(np.uint8)
    )
    chosen = []
    for ops in (ReferenceBackend(), cpu, OracleBackend(cpu, ReferenceBackend())):
        weight = ops.pack([table])

        def step(ops: Any = ops, weight: Any = weight) -> Any:
            x, last, logits = ops.empty(Rows.TOKENS, 32), ops.empty(Rows.LOGITS, 32), ops.empty(Rows.LOGITS, 8)
            out = ops.empty(Rows.LOGITS, 1)
            ops.embed(weight, 1.0, x)
            ops.take_logit_rows(x, last)
            ops.linear(last, weight, logits)
            ops.choose(ops.columns(logits, 2, 8), out)
            return out

        chosen.append(ops.download(ops.capture(step, StepLimits(3, 1, 2, 1)).run(inputs)).tolist())
    cpu.close()
    assert chosen[0] == chosen[1] == chosen[2]
    assert chosen[0] == [[1.0], [2.0]]  # an embedding is most like itself


def test_argmax_of_nan_is_a_token(best_kernels: Kernels) -> None:
    x, out = np.full((1, 20), np.nan, np.float32), np.zeros((1, 3), np.float32)
    tokens = np.arange(7, 27, dtype=np.float32)
    best_kernels("argmax", Step(1, logit_rows=[0]), x, out, 20, tokens.ctypes.data, 0, 0, rows=STEP_LOGITS)
    assert out[0, 0] in tokens
    assert not out[0, 2] >= 0.0, "nothing goes on from it"


def model_step(ops: Any, weights: dict[str, Any], cache: Any, x: Any) -> tuple[Any, Any]:
    """A small layer: x [T, C] and the tokens' embeddings, turned by their positions, kept and
    attended to.
    """
    qkv, embedded = ops.empty(Rows.TOKENS, C + 2 * G * D), ops.empty(Rows.TOKENS, C)
    ops.embed(weights["table"], 1.0, embedded)
    ops.add(embedded, x, 1.0, embedded)
    ops.linear(embedded, weights["qkv"], qkv)
    q, k, v = ops.columns(qkv, 0, C), ops.columns(qkv, C, C + G * D), ops.columns(qkv, C + G * D, C + 2 * G * D)
    rope = Rope(D, tuple(100.0 ** (-i / 8) for i in range(D // 2)))
    ops.rope(q, D, rope, q)
    ops.rope(k, D, rope, k)
    ops.kv_write(k, v, cache)
    y = ops.empty(Rows.TOKENS, C)
    ops.attention(q, cache, Attention(H, G, D, D**-0.5, rope), y)
    last, logits = ops.empty(Rows.LOGITS, C), ops.empty(Rows.LOGITS, V)
    ops.take_logit_rows(y, last)
    ops.linear(last, weights["table"], logits)
    return logits, last


def inputs_of(parts: list[tuple[int, list[int], list[int]]], given: F32, **more: Any) -> StepInputs:
    """Of each sequence where it starts, its ids and its pages."""
    ids = [token for _, tokens, _ in parts for token in tokens]
    places = [start + i for start, tokens, _ in parts for i in range(len(tokens))]
    slots = [pages[(s + i) // PAGE] * PAGE + (s + i) % PAGE for s, ids_, pages in parts for i in range(len(ids_))]
    starts = np.cumsum([0, *(len(tokens) for _, tokens, _ in parts)])
    arrays = [np.array(a, I32) for a in (ids, places, slots, starts, [pages for *_, pages in parts], starts[1:] - 1)]
    return StepInputs(*arrays, feed=given, **more)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_program_goes_on_as_steps_of_their_own_would(kernel_folder: Path, backend: str) -> None:
    """Two sequences of several rows, one of them over a page's end, three more steps: the same
    tokens, and the same bits in the cache.
    """
    ops = BACKENDS[backend](kernel_folder)
    rng = np.random.default_rng(3)
    weights = {
        "table": ops.pack([random_tensor(BlockType.F32, V, C)]),
        "qkv": ops.pack([random_tensor(BlockType.Q8_0, C + 2 * G * D, C)]),
    }
    caches = [ops.kv_cache(6, PAGE, G, D, "f16") for _ in range(2)]
    ids = ops.upload(np.arange(V))

    def one(cache: Any) -> Any:
        x, guesses = ops.empty(Rows.TOKENS, C), ops.empty(Rows.LOGITS, 3)
        ops.feed(x)
        logits, last = model_step(ops, weights, cache, x)
        ops.argmax(logits, ids, None, guesses)
        return guesses, last

    def four(cache: Any) -> Any:
        x, made = ops.empty(Rows.TOKENS, C), [ops.empty(Rows.LOGITS, 3)]
        ops.feed(x)
        logits, last = model_step(ops, weights, cache, x)
        ops.argmax(logits, ids, None, made[0])
        for _ in range(3):
            x = ops.advance(made[-1], last, PAGE)
            logits, last = model_step(ops, weights, cache, x)
            made.append(ops.empty(Rows.LOGITS, 3))
            ops.argmax(logits, ids, made[-2], made[-1])
        return made

    limits = StepLimits(40, 2, 2, 2)
    step, chain = ops.capture(lambda: one(caches[0]), limits), ops.capture(lambda: four(caches[1]), limits)
    parts = [(0, rng.integers(0, V, 30).tolist(), [3, 1]), (0, [5, 6, 7], [2, 4])]
    given = rng.standard_normal((33, C)).astype(np.float32)
    found = [ops.view(guesses).copy() for guesses in chain.run(inputs_of(parts, given))]
    chance, positions = np.ones(2), [30, 3]
    for made in found:
        guesses, last = (ops.view(array).copy() for array in step.run(inputs_of(parts, given)))
        assert made[:, 0].tolist() == guesses[:, 0].tolist()
        assert np.array_equal(bits(made[:, 1]), bits(guesses[:, 1]))
        chance = chance * guesses[:, 1]
        np.testing.assert_allclose(made[:, 2], chance, rtol=1e-6)
        parts = [
            (at, [int(token)], pages) for at, token, (*_, pages) in zip(positions, guesses[:, 0], parts, strict=True)
        ]
        given, positions = last, [at + 1 for at in positions]
    pages = np.zeros((2, 6, ops.page_bytes(caches[0])), np.uint8)
    for cache, kept in zip(caches, pages, strict=True):
        for page, out in enumerate(kept):
            ops.read_page(cache, page, out)
    assert np.array_equal(*pages)
    ops.close()


def four_levels(ops: CpuBackend) -> Any:
    """A program that goes on three times, and would once more."""
    table, ids = ops.pack([random_tensor(BlockType.F32, V, C)]), ops.upload(np.arange(V))

    def step() -> Any:
        x, made = ops.empty(Rows.TOKENS, C), []
        ops.feed(x)
        for number in range(4):
            last, logits = ops.empty(Rows.LOGITS, C), ops.empty(Rows.LOGITS, V)
            ops.take_logit_rows(x, last)
            ops.linear(last, table, logits)
            made.append(ops.empty(Rows.LOGITS, 3))
            ops.argmax(logits, ids, made[-2] if number else None, made[-1])
            x = ops.advance(made[-1], last, PAGE)
        return made

    return ops.capture(step, StepLimits(2, 2, 2, 1))


def test_what_is_not_likely_enough_is_not_gone_on_from(kernel_folder: Path) -> None:
    """As long as one of the guesses has the chance; other programs, and the next run, are as they
    were.
    """
    ops = CpuBackend(2, kernel_folder)
    program = four_levels(ops)
    given = np.random.default_rng(1).standard_normal((2, C)).astype(np.float32) / 20
    parts = [(0, [1], [0]), (0, [2], [1])]
    whole = [ops.view(made).copy() for made in program.run(inputs_of(parts, given))]
    assert all((made > 0).any(axis=1).all() for made in whole)
    for level in (0, 1, 2):
        for made in program.run(inputs_of(parts, given)):
            ops.view(made)[:] = -1.0
        least = float(np.nextafter(whole[level][:, 2].max(), np.float32(2)))
        found = [ops.view(made) for made in program.run(inputs_of(parts, given, least=least))]
        for number, (made, known) in enumerate(zip(found, whole, strict=True)):
            assert np.array_equal(made, known) if number <= level else (made == -1.0).all()
        least = float(whole[level][:, 2].max())
        program.run(inputs_of(parts, given, least=least))
        assert np.array_equal(found[level + 1], whole[level + 1]), "the chance itself is enough"
    again = [ops.view(made) for made in program.run(inputs_of(parts, given))]
    assert all(np.array_equal(made, known) for made, known in zip(again, whole, strict=True))
    ops.close()


def test_threads_agree_where_a_program_ends(kernel_folder: Path) -> None:
    """More threads than processors: one that leaves a meeting late must not take a later end for
    that of this place.
    """
    ops = CpuBackend(4, kernel_folder)
    program, ended = four_levels(ops), []
    given = np.random.default_rng(1).standard_normal((2, C)).astype(np.float32) / 20
    parts = [(0, [1], [0]), (0, [2], [1])]
    levels = [
        float(np.nextafter(ops.view(made)[:, 2].max(), np.float32(2))) for made in program.run(inputs_of(parts, given))
    ]

    def run() -> None:
        for number in range(1000):
            program.run(inputs_of(parts, given, least=levels[number % 3]))
        ended.append(True)

    runner = threading.Thread(target=run, daemon=True)
    runner.start()
    runner.join(100)
    assert ended, "threads wait for each other at different places"
    ops.close()
