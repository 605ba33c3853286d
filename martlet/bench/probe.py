"""Predicts a model's speed from a two-second probe of its matrices (read `commands/plan.py` next).

It packs some of the model's matrices and multiplies them through the backend: with one row as in
decode, and with many rows as in prefill. Decode is bound by bytes, prefill by multiply-adds, and
the speed of the whole model follows from both. Attention, norms and sampling are not probed, so the
prediction is a little too fast.
"""

import math
import time
from dataclasses import dataclass

import numpy as np

from martlet.config import EngineConfig
from martlet.formats.checkpoint import Checkpoint
from martlet.models.families import spec_of
from martlet.models.weights import layer_matrices
from martlet.ops.backends import make_backend
from martlet.ops.interface import Backend, Program, Rows, StepInputs, StepLimits
from martlet.quant.table import RawTensor

PROBE_BYTES = 160 << 20  # of weights: larger than a cache, and quickly packed
PREFILL_ROWS = 256
SECONDS = 0.8  # for each of the two measurements


@dataclass(frozen=True, slots=True)
class Probe:
    """The measured speeds."""

    bytes_per_s: float  # packed weights read per second, one row
    macs_per_s: float  # multiply-adds per second, many rows
    matrix_macs: int  # multiply-adds per token in all layers

    def decode_tokens_per_s(self, bytes_per_token: int) -> float:
        """The predicted decode speed."""
        return self.bytes_per_s / bytes_per_token

    def prefill_tokens_per_s(self) -> float:
        """The predicted prefill speed."""
        return self.macs_per_s / self.matrix_macs


def probe(checkpoint: Checkpoint, config: EngineConfig) -> Probe:
    """Measure with as many of the layers' matrices as fit in PROBE_BYTES."""
    matrices = layer_matrices(checkpoint, spec_of(checkpoint, config.max_context))
    chosen: list[RawTensor] = []
    for tensor, _ in matrices:
        if chosen and sum(t.data.nbytes for t in chosen) + tensor.data.nbytes > PROBE_BYTES:
            break
        chosen.append(tensor)
    ops = make_backend(config)
    try:
        program, nbytes = _capture(ops, chosen)
        decode_s, prefill_s = _time(program, 1), _time(program, PREFILL_ROWS)
    finally:
        ops.close()
    macs = sum(math.prod(t.shape) for t in chosen)
    total = sum(math.prod(t.shape) * share for t, share in matrices)
    return Probe(nbytes / decode_s, macs * PREFILL_ROWS / prefill_s, round(total))


def _capture(ops: Backend, tensors: list[RawTensor]) -> tuple[Program, int]:
    weights = [(ops.pack([tensor]), *tensor.shape) for tensor in tensors]

    def step() -> None:
        outs = {n: ops.empty(Rows.TOKENS, n) for _, n, _ in weights}
        for k in sorted({k for _, _, k in weights}):
            x = ops.empty(Rows.TOKENS, k)
            for weight, n, width in weights:
                if width == k:
                    ops.linear(x, weight, outs[n])

    limits = StepLimits(max_tokens=PREFILL_ROWS, max_seqs=1, max_logits=1, max_pages_per_seq=1)
    return ops.capture(step, limits), sum(ops.weight_bytes(weight) for weight, _, _ in weights)


def _time(program: Program, rows: int) -> float:
    """Seconds of the fastest run, after one to warm up."""
    zeros = np.zeros(rows, np.int32)
    inputs = StepInputs(
        ids=zeros,
        positions=np.arange(rows, dtype=np.int32),
        slots=zeros,
        span_starts=np.array([0, rows], np.int32),
        page_table=np.zeros((1, 1), np.int32),
        logit_rows=np.zeros(1, np.int32),
    )
    program.run(inputs)
    best, end = math.inf, time.perf_counter() + SECONDS
    while True:
        start = time.perf_counter()
        program.run(inputs)
        stop = time.perf_counter()
        best = min(best, stop - start)
        if stop >= end:
            return best
