"""Lines about speed after an answer: rate, share of the memory's speed, and the plan's prediction.

A decode step reads every weight once, so memory bounds it: tokens/s ≤ bytes/s ÷ bytes a token.
"""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import TYPE_CHECKING

from martlet.config import cache_dir
from martlet.machine import read_machine
from martlet.saved_measurements import load_notes, save_note

if TYPE_CHECKING:
    from martlet.engine.outputs import RequestOutput
    from martlet.llm import LLM

LOW_SHARE = 0.30
LEAST_TOKENS = 16  # of a decode, to say anything about its speed


def bytes_per_token(llm: LLM, context: int) -> int:
    """Bytes that a decode step reads: packed weights, keys and values of `context` positions."""
    return llm.plan.token_bytes + context * llm.plan.kv_per_token


def speed_lines(llm: LLM, output: RequestOutput) -> list[str]:
    """The lines for stderr."""
    metrics = output.metrics
    if metrics is None:
        return []
    line = f"{metrics.n_prompt} prompt tokens"
    if metrics.n_cached:
        line += f", {metrics.n_cached} of them kept from before, the rest"
    if metrics.prefill_tokens_per_s:
        line += f" at {metrics.prefill_tokens_per_s:,.1f} tok/s"
    line += f", {metrics.n_generated} generated"
    rate = metrics.decode_tokens_per_s
    if not rate or metrics.n_generated < LEAST_TOKENS or llm.config.backend != "cpu":
        return [line + (f" at {rate:,.1f} tok/s" if rate else "")]
    context = metrics.n_prompt + metrics.n_generated // 2
    share = rate * bytes_per_token(llm, context) / bandwidth(llm.config.threads)
    lines = [f"{line} at {rate:,.1f} tok/s, {share:.0%} of the speed at which this machine reads memory"]
    if share < LOW_SHARE:
        lines.append(f"martlet: that is slow. {_likely_cause(llm)}")
    predicted = load_notes("predictions").get(_model_key(llm.config.model, llm.config.threads))
    if isinstance(predicted, float) and predicted > 0:
        off = rate / predicted - 1
        lines.append(f"`martlet plan` predicted {predicted:,.1f} tok/s: the run was {abs(off):.0%} "
                     f"{'faster' if off >= 0 else 'slower'}")  # fmt: skip
    return lines


def _likely_cause(llm: LLM) -> str:
    """The first explanation that the machine's numbers support."""
    limits = read_machine()
    threads = llm.config.threads
    if llm.config.oracle:
        return "--oracle computes everything twice, the second time in NumPy."
    if limits.cpu_quota is not None and threads > limits.cpu_quota:
        return (
            f"{threads} threads share a quota of {limits.cpu_quota:g} CPUs: use --threads {int(limits.cpu_quota) or 1}."
        )
    if threads > limits.physical_cores:
        return (
            f"{threads} threads run on {limits.physical_cores} physical cores: use --threads {limits.physical_cores}."
        )
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > limits.physical_cores + 0.5:
        return f"Other programs keep the processor busy (load {load:.1f} on {limits.physical_cores} cores)."
    if threads < limits.physical_cores:
        return f"{threads} of {limits.physical_cores} physical cores are used: use more --threads."
    return "See `martlet doctor` for what this machine offers; a small model is bound by more than its weights."


def read_bandwidth(threads: int, seconds: float = 0.5) -> float:
    """The read bandwidth of `threads` threads in bytes/s, measured for about `seconds`.

    The cpu backend's thread team reads a buffer larger than any cache, in order and on huge pages,
    as weights are stored. The best of several rounds counts: other programs only slow rounds down.
    """
    from martlet.ops.cpu.backend import CpuBackend  # slow to import

    ops = CpuBackend(threads, cache_dir() / "kernels")
    try:
        return ops.read_bandwidth(seconds)
    finally:
        ops.close()


def bandwidth(threads: int) -> float:
    """Bytes per second that this machine reads, measured once and kept."""
    key = f"{platform.node()}, {platform.machine()}, {threads}"
    known = load_notes("bandwidth").get(key)
    if isinstance(known, float) and known > 0:
        return known
    measured = read_bandwidth(threads, 0.3)
    save_note("bandwidth", key, measured)
    return measured


def _model_key(model: str, threads: int) -> str:
    path = Path(model)
    return f"{path.name} {path.stat().st_size} {threads}" if path.exists() else model


def save_prediction(model: str, threads: int, tokens_per_s: float) -> None:
    """Keep what a plan predicts, for the run that will say how far it was off."""
    save_note("predictions", _model_key(model, threads), tokens_per_s)


def process_age_s() -> float:
    """Seconds since this process started; outside Linux, its processor time."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return time.process_time()
