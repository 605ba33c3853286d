"""What a workload's run amounts to: percentiles, a table, a chart, and the comparison with an earlier report.

A report says what it was measured on (machine, version, commit, cache state), and two that differ in anything but the
engine's version are not compared.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from martlet.bench.drive import Run
from martlet.bench.svg import line_chart
from martlet.bench.workloads import Workload
from martlet.errors import RequestError
from martlet.machine import processor_name, read_machine
from martlet.metrics import percentile

__all__ = ["about", "chart", "compare", "summary", "table"]

PERCENTILES = (0.5, 0.95, 0.99)
SHOWN = (
    "backend",
    "threads",
    "kv_dtype",
    "max_context",
    "max_step_tokens",
    "prefix_cache",
)  # of the settings, in the table
SAME = ("workload", "model", "settings", "cache", "machine")  # what two reports must share to be compared


def about() -> dict[str, Any]:
    """The machine, and the version and commit of the engine."""
    limits = read_machine()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "machine": {"processor": processor_name(), "cores": limits.physical_cores, "cpu_quota": limits.cpu_quota},
        "load": load,  # of the machine when the report was made: what else ran on it
        "commit": _commit(),
    }


def summary(workload: Workload, run: Run, model: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a report says, as JSON takes it; times in milliseconds."""
    metrics = [entry.metrics for entry in run.done]
    n_prompt, n_cached = sum(m.n_prompt for m in metrics), sum(m.n_cached for m in metrics)
    n_out = sum(m.n_generated for m in metrics)
    return {
        "workload": asdict(workload),
        "model": dict(model),
        "settings": dict(settings),
        "cache": "empty at the start; what the run itself leaves is used",
        **about(),
        "seconds": run.seconds,
        "steps": run.n_steps,
        "prompt_tokens": n_prompt,
        "cached_tokens": n_cached,
        "cache_hit_rate": n_cached / n_prompt,
        "generated_tokens": n_out,
        "generated_tokens_per_s": n_out / run.seconds,
        "all_tokens_per_s": (n_prompt + n_out) / run.seconds,
        "preemptions": sum(m.n_preempted for m in metrics),
        "queue_ms": _spread(m.queue_s for m in metrics),
        "ttft_ms": _spread(m.ttft_s for m in metrics),
        "gap_ms": _spread(gap for m in metrics for gap in m.gaps_s),
    }


def table(found: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    work, machine = found["workload"], found["machine"]
    settings = " ".join(f"{key} {found['settings'][key]}" for key in SHOWN if key in found["settings"])
    asked = " ".join(f"{k.removesuffix('_tokens')} {v}" for k, v in work.items() if k != "name" and v)
    lines = [
        f"{work['name']}: {asked}",
        f"{found['model']['file']}, {settings}",
        f"{machine['processor']}, {machine['cores']} cores; commit {found['commit'] or 'unknown'};"
        f" prefix cache {found['cache']}",
        "",
        f"{found['generated_tokens_per_s']:,.1f} tokens/s generated ({found['all_tokens_per_s']:,.1f} with prompts),"
        f" {found['seconds']:.2f} s, {found['steps']:,} steps, {found['preemptions']} preemptions",
        f"{found['cache_hit_rate']:.1%} of {found['prompt_tokens']:,} prompt tokens from the prefix cache",
        "",
        f"{'ms':<22}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
    ]
    for key, name in (("queue_ms", "queue"), ("ttft_ms", "time to first token"), ("gap_ms", "between tokens")):
        row = found[key]
        lines.append(f"{name:<22}" + "".join(_number(row[p]) for p in ("p50", "p95", "p99", "max")))
    return "\n".join(lines)


def chart(workload: Workload, run: Run) -> str:
    """The picture that a workload is about, as SVG."""
    if workload.name == "prefix":
        points = [(float(n), 1000 * (entry.metrics.ttft_s or 0.0)) for n, entry in enumerate(run.done)]
        return line_chart("Time to first token", "request, in order of arrival", "ms", {"ttft": points}, dots=True)
    times: list[tuple[float, float]] = []  # when a token came, and how long after the one before
    for entry in run.done:
        now = entry.metrics.first_token_s or run.start_s
        for gap in entry.metrics.gaps_s:
            now += gap
            times.append((now - run.start_s, 1000 * gap))
    if workload.name == "latency":
        return line_chart("Time between tokens", "seconds", "ms", {"a token": sorted(times)}, dots=True)
    seconds = [0] * (int(run.seconds) + 1)
    for when, _ in times:
        seconds[min(int(when), len(seconds) - 1)] += 1
    rates = [(n + 0.5, float(count)) for n, count in enumerate(seconds[:-1] or seconds)]
    return line_chart("Tokens generated a second", "seconds", "tokens/s", {workload.name: rates})


def compare(found: Mapping[str, Any], earlier: Mapping[str, Any], source: str) -> str:
    """How this report stands to an earlier one; RequestError if they did not measure the same."""
    differ = [
        f"{part}.{key}: {before.get(key)!r} there, {now.get(key)!r} here"
        for part in SAME
        for now, before in [(_as_dict(found.get(part)), _as_dict(earlier.get(part)))]
        for key in sorted(set(now) | set(before))
        if now.get(key) != before.get(key)
    ]
    if differ:
        raise RequestError(f"{source} did not measure the same: {'; '.join(differ)}.", param="compare")
    lines = [f"against {source} (commit {earlier.get('commit') or 'unknown'}), this ÷ that:"]
    for name, now, before in (
        ("tokens/s", found["generated_tokens_per_s"], earlier["generated_tokens_per_s"]),
        *((f"ttft {p}", found["ttft_ms"][p], earlier["ttft_ms"][p]) for p in ("p50", "p99")),
        *((f"gap {p}", found["gap_ms"][p], earlier["gap_ms"][p]) for p in ("p50", "p99", "max")),
    ):
        if now and before:
            lines.append(f"  {name:<10} {now / before:.2f}")
    return "\n".join(lines)


def _as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [1000 * value for value in seconds if value is not None]
    found = {f"p{round(100 * share)}": percentile(values, share) for share in PERCENTILES}
    return {**found, "max": max(values, default=None)}


def _number(value: float | None) -> str:
    return f"{'–' if value is None else format(value, ',.1f'):>10}"


def _commit() -> str | None:
    """The commit of the source that runs, with + where files differ from it; None outside of a repository."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
