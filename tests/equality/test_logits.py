"""Logits of every family on the CPU backend: the same bits in any chunks, companies, pages and
numbers of threads.

The models are the tiny ones of tests/models, one a kind of attention: full, sliding window,
soft-capped, normed; dense and mixtures of experts.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from martlet.formats.checkpoint import open_checkpoint
from martlet.models.decoder import forward
from martlet.models.weights import load_model
from martlet.ops.cpu.backend import CpuBackend
from martlet.ops.interface import StepInputs, StepLimits

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))
from tiny import CASES, golden, write_hf

I32 = NDArray[np.int32]
PAGE, N_PAGES = 32, 12
KINDS = ["llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "smollm3", "granite", "olmo2"]
KINDS += [
    "mixtral",
    "qwen2moe",
    "qwen3moe",
    "olmoe",
    "granitemoe-shared",
    "gpt-oss",
    "glm4",
    "glm4moe",
    "ernie4_5-moe",
    "exaone4",
]
LENGTH = 60  # of the sequence under test: across a page border


def sequence(seed: int) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(3, 90, LENGTH)]


class Runner:
    """A tiny model on a backend; computes logits of every position in whatever pieces it is told
    to.
    """

    def __init__(self, folder: Path, kernels: Path, threads: int) -> None:
        self.ops = CpuBackend(threads, kernels)
        with open_checkpoint(folder) as checkpoint:
            model = load_model(checkpoint, self.ops)
        spec = model.spec
        caches = [self.ops.kv_cache(N_PAGES, PAGE, x.mixer.n_kv_heads, x.mixer.head_dim, "f16") for x in spec.layers]
        limits = StepLimits(3 * LENGTH, 3, 3 * LENGTH, 4)
        self.n_layers = len(spec.layers)
        self.program, self.other = (
            self.ops.capture(lambda: forward(self.ops, model, caches), limits) for _ in range(2)
        )

    def step(self, spans: Sequence[tuple[list[int], int, int, list[int]]]) -> NDArray[np.float32]:
        """Logits of all rows; a span is (ids, start, count, pages)."""
        return self.ops.download(self.program.run(self.inputs(spans)))

    def inputs(self, spans: Sequence[tuple[list[int], int, int, list[int]]]) -> StepInputs:
        """The arrays of a step, of whose rows all have logits."""
        ids, positions, slots, starts, tables = [], [], [], [0], []
        for sequence_ids, start, count, pages in spans:
            where = range(start, start + count)
            ids += [sequence_ids[p] for p in where]
            positions += where
            slots += [pages[p // PAGE] * PAGE + p % PAGE for p in where]
            starts.append(len(ids))
            tables.append(pages)
        arrays = [np.array(x, np.int32) for x in (ids, positions, slots, starts, tables, range(len(ids)))]
        return StepInputs(*arrays)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=[k for k in KINDS if k in CASES])
def runners(request: pytest.FixtureRequest, tmp_path: Path, kernels: Path) -> Iterator[dict[int, Runner]]:
    config, tensors, _ = golden(request.param)
    config = {**config, "max_position_embeddings": 128}
    folder = write_hf(config, tensors, tmp_path / "model")
    made = {threads: Runner(folder, kernels, threads) for threads in (1, 2, 4)}
    yield made
    for runner in made.values():
        runner.ops.close()


def test_logits_are_the_same_bits_however_they_are_computed(runners: dict[int, Runner]) -> None:
    ours, first, second = sequence(1), sequence(2), sequence(3)
    plain = runners[1].step([(ours, 0, LENGTH, [3, 7])])
    assert np.isfinite(plain).all()
    for threads, runner in runners.items():
        assert runner.step([(ours, 0, LENGTH, [3, 7])]).tobytes() == plain.tobytes(), f"{threads} threads"
    runner = runners[2]
    for size in (1, 5, 8, 32, 33):
        pieces = [runner.step([(ours, a, min(size, LENGTH - a), [9, 0])]) for a in range(0, LENGTH, size)]
        assert np.concatenate(pieces).tobytes() == plain.tobytes(), f"chunks of {size}, other pages"
    # among others: two strangers before and after it, at other positions
    runner.step([(first, 0, 20, [1, 2]), (second, 0, 40, [4, 5])])
    mixed = runner.step([(first, 20, 1, [1, 2]), (ours, 0, LENGTH, [10, 11]), (second, 40, 9, [4, 5])])
    assert mixed[1 : 1 + LENGTH].tobytes() == plain.tobytes(), "in a mixed step"


def test_layers_in_several_runs(runners: dict[int, Runner]) -> None:
    """Each run of a chunk goes through one layer; between two of them another program computes
    other rows.
    """
    ids, others, pages, theirs, runner = sequence(1), sequence(2), [3, 7], [5, 2], runners[2]
    whole = runners[1].step([(ids, 0, LENGTH, pages)])
    runner.step([(ids[::-1], 0, LENGTH, pages)])  # what was in the pages
    inputs = runner.inputs([(ids, 0, LENGTH, pages)])
    for layer in range(runner.n_layers - 1):
        runner.program.run(inputs, layer, layer + 1)
        runner.other.run(runner.inputs([(others, 10 * layer, 10, theirs)]))
    found = runner.program.run(inputs, runner.n_layers - 1)
    assert runner.ops.download(found).tobytes() == whole.tobytes()
