"""Packing, byte quantisation and products of the CPU backend: values against float64, and the same
bits in every form.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from blocks import F16_FIELDS, random_tensor
from conftest import NAMES
from numpy.typing import NDArray

from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.cpu.kernels.layout import LAYOUTS, FloatLayout
from martlet.ops.cpu.simd.isa import chosen_isa
from martlet.ops.interface import Rows, StepInputs, StepLimits
from martlet.quant.table import BLOCKS, BlockType, RawTensor

F32 = NDArray[np.float32]
EMPTY = np.zeros(0, np.int32)
# Every kind of code, scale and zero point once, for the instruction sets that are not this
# processor's best.
OTHERS = (
    BlockType.Q3_K,
    BlockType.Q4_1,
    BlockType.Q5_K,
    BlockType.Q6_K,
    BlockType.Q8_0,
    BlockType.IQ4_NL,
    BlockType.F16,
)
CASES = [(chosen_isa().name, kind) for kind in LAYOUTS]
CASES += [(isa, kind) for isa in NAMES if isa != chosen_isa().name for kind in OTHERS]


class Bench:
    """A backend, and rows of x multiplied with a weight on it."""

    def __init__(self, isa: str, folder: Path, threads: int = 2) -> None:
        self.ops = CpuBackend(threads, folder, isa)

    def inputs(self, ids: list[int]) -> StepInputs:
        rows = np.array(ids, np.int32)
        return StepInputs(rows, rows, rows, np.array([0, rows.size], np.int32), np.zeros((1, 1), np.int32), EMPTY)

    def rows_of(self, tensor: RawTensor) -> F32:
        """The packed matrix, unpacked again."""
        weight = self.ops.pack([tensor])

        def step() -> object:
            out = self.ops.empty(Rows.TOKENS, tensor.shape[1])
            self.ops.embed(weight, 1.0, out)
            return out

        program = self.ops.capture(step, StepLimits(tensor.shape[0], 1, 1, 1))
        return self.ops.download(program.run(self.inputs(list(range(tensor.shape[0])))))

    def product(self, x: F32, tensors: list[RawTensor], chunks: list[list[int]], bias: F32 | None = None) -> F32:
        """x @ weightᵀ, the rows of x in several steps."""
        table = self.ops.pack([RawTensor("x", x.shape, BlockType.F32, x.reshape(-1).view(np.uint8))])
        weight = self.ops.pack(tensors)
        added = None if bias is None else self.ops.upload(bias)

        def step() -> object:
            rows, out = self.ops.empty(Rows.TOKENS, x.shape[1]), self.ops.empty(Rows.TOKENS, weight.n)
            self.ops.embed(table, 1.0, rows)
            self.ops.linear(rows, weight, out, added)
            return out

        program = self.ops.capture(step, StepLimits(x.shape[0], 1, 1, 1))
        return np.concatenate([self.ops.download(program.run(self.inputs(ids))) for ids in chunks])


@pytest.fixture(scope="module")
def benches(kernel_folder: Path) -> Iterator[dict[str, Bench]]:
    made = {name: Bench(name, kernel_folder) for name in NAMES}
    yield made
    for bench in made.values():
        bench.ops.close()


def dequantized(tensor: RawTensor) -> F32:
    """The values by the `gguf` package, an implementation that is not ours."""
    return gguf.quants.dequantize(tensor.rows(), gguf.GGMLQuantizationType(int(tensor.type))).reshape(tensor.shape)


@pytest.mark.parametrize(("isa", "kind"), CASES)
def test_packing_is_undone_exactly(benches: dict[str, Bench], isa: str, kind: BlockType) -> None:
    tensor = random_tensor(kind, 43, 768)  # two whole groups and a part; three panels
    assert np.array_equal(benches[isa].rows_of(tensor), dequantized(tensor))


@pytest.mark.parametrize(("isa", "kind"), CASES)
def test_product_is_that_of_the_rounded_activations(benches: dict[str, Bench], isa: str, kind: BlockType) -> None:
    tensor = random_tensor(kind, 43, 512, seed=1)
    rng = np.random.default_rng(2)
    x, bias = rng.standard_normal((21, 512)).astype(np.float32), rng.standard_normal(43).astype(np.float32)
    y = benches[isa].product(x, [tensor], [list(range(21))], bias)
    seen = x.astype(np.float64)
    if not isinstance(LAYOUTS[kind], FloatLayout):
        blocks = seen.reshape(21, -1, 32)
        scale = np.abs(blocks).max(axis=-1, keepdims=True) / 127
        seen = (np.round(blocks / scale) * scale).reshape(21, 512)
    w = dequantized(tensor).astype(np.float64)
    bound = 2e-6 * (np.abs(seen) @ np.abs(w).T + np.abs(bias))
    assert np.all(np.abs(y - (seen @ w.T + bias)) <= bound)


@pytest.mark.parametrize(("isa", "kind"), CASES)
def test_rows_have_the_same_bits_alone_and_together(benches: dict[str, Bench], isa: str, kind: BlockType) -> None:
    tensor = random_tensor(kind, 40, 512, seed=3)
    x = np.random.default_rng(4).standard_normal((43, 512)).astype(np.float32)
    whole = benches[isa].product(x, [tensor], [list(range(43))])
    for size in (1, 2, 3, 5, 8, 11, 32):
        chunks = [list(range(a, min(a + size, 43))) for a in range(0, 43, size)]
        assert benches[isa].product(x, [tensor], chunks).tobytes() == whole.tobytes(), size


@pytest.mark.parametrize(("isa", "kind"), CASES)
@pytest.mark.parametrize("sign", [1, -1])
def test_the_largest_codes_overflow_no_sum(benches: dict[str, Bench], isa: str, kind: BlockType, sign: int) -> None:
    """All codes have all bits set, all activations are as large as they can be."""
    if isinstance(LAYOUTS[kind], FloatLayout) or kind is BlockType.MXFP4:
        pytest.skip("floats have no codes; a MXFP4 exponent of all bits is no number")
    blocks = random_tensor(kind, 16, 256, seed=8).rows().reshape(-1, BLOCKS[kind].nbytes)
    largest = np.full_like(blocks, 255)
    for at in F16_FIELDS[kind]:
        largest[:, at : at + 2] = blocks[:, at : at + 2]
    tensor = RawTensor("w", (16, 256), kind, largest.reshape(-1))
    x = np.full((33, 256), np.float32(sign))
    expected = dequantized(tensor).astype(np.float64).sum(axis=1) * sign
    y = benches[isa].product(x, [tensor], [[0], [1, 2], list(range(33))])
    assert np.allclose(y, expected, rtol=2e-6, atol=2e-5 * np.abs(expected).max())


def test_all_instruction_sets_and_thread_counts_agree(kernel_folder: Path, benches: dict[str, Bench]) -> None:
    tensor = random_tensor(BlockType.Q6_K, 200, 512, seed=5)
    x = np.random.default_rng(6).standard_normal((41, 512)).astype(np.float32)
    rows = [list(range(9)), list(range(9, 41))]
    results = {benches[name].product(x, [tensor], rows).tobytes() for name in NAMES}
    for threads in (1, 4):
        bench = Bench(chosen_isa().name, kernel_folder, threads)
        results.add(bench.product(x, [tensor], rows).tobytes())
        bench.ops.close()
    assert len(results) == 1


def test_a_stack_of_different_types(benches: dict[str, Bench]) -> None:
    """Fault QNT-03: tensors of one layer may have different types, each is used as stored."""
    tensors = [
        random_tensor(kind, n, 512) for kind, n in ((BlockType.Q4_1, 24), (BlockType.Q4_1, 16), (BlockType.F16, 5))
    ]
    x = np.random.default_rng(7).standard_normal((3, 512)).astype(np.float32)
    bench = benches[chosen_isa().name]
    y = bench.product(x, tensors, [[0, 1, 2]])
    assert y.shape == (3, 45)
    alone = [bench.product(x, [tensor], [[0, 1, 2]]) for tensor in tensors]
    assert np.array_equal(y, np.concatenate(alone, axis=1))


def test_a_type_without_a_kernel_is_kept_as_float32(benches: dict[str, Bench]) -> None:
    values = np.random.default_rng(8).standard_normal((17, 64))
    tensor = RawTensor("w", (17, 64), BlockType.F64, values.reshape(-1).view(np.uint8))
    assert np.array_equal(benches[chosen_isa().name].rows_of(tensor), values.astype(np.float32))


def test_an_activation_block_of_zeros_gives_zero(benches: dict[str, Bench]) -> None:
    x = np.zeros((1, 512), np.float32)
    y = benches[chosen_isa().name].product(x, [random_tensor(BlockType.Q4_0, 16, 512)], [[0]])
    assert np.array_equal(y, np.zeros((1, 16), np.float32))
