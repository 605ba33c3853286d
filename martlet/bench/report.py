"""The report of a workload: percentiles, a table, a chart, and a comparison with another report.

A report states its conditions: machine, commit, settings and cache state. Two reports are compared
only if they differ in nothing but the engine's version. Read `svg.py` next, which draws the chart.
"""

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

PERCENTILES = (0.5, 0.95, 0.99)
SHOWN = ("backend", "threads", "kv_dtype", "max_context", "max_step_tokens", "prefix_cache")  # settings in the table
SAME = ("workload", "model", "settings", "cache", "machine")  # equal in reports that are compared


def about() -> dict[str, Any]:
    """The machine, its load and the commit of the engine."""
    limits = read_machine()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {
        "machine": {"processor": processor_name(), "cores": limits.physical_cores, "cpu_quota": limits.cpu_quota},
        "load": load,  # of the machine at this time, by any program
        "commit": _commit(),
    }


def summary(workload: Workload, run: Run, model: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report as JSON values; times in milliseconds."""
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


def table(report: Mapping[str, Any]) -> str:
    """The report as text for a terminal."""
    work, machine = report["workload"], report["machine"]
    settings = " ".join(f"{key} {report['settings'][key]}" for key in SHOWN if key in report["settings"])
    asked = " ".join(f"{k.removesuffix('_tokens')} {v}" for k, v in work.items() if k != "name" and v)
    lines = [
        f"{work['name']}: {asked}",
        f"{report['model']['file']}, {settings}",
        f"{machine['processor']}, {machine['cores']} cores; commit {report['commit'] or 'unknown'};"
        f" prefix cache {report['cache']}",
        "",
        f"{report['generated_tokens_per_s']:,.1f} tokens/s generated ({report['all_tokens_per_s']:,.1f} with prompts),"
        f" {report['seconds']:.2f} s, {report['steps']:,} steps, {report['preemptions']} preemptions",
        f"{report['cache_hit_rate']:.1%} of {report['prompt_tokens']:,} prompt tokens from the prefix cache",
        "",
        f"{'ms':<22}{'p50':>10}{'p95':>10}{'p99':>10}{'max':>10}",
    ]
    for key, name in (("queue_ms", "queue"), ("ttft_ms", "time to first token"), ("gap_ms", "between tokens")):
        row = report[key]
        lines.append(f"{name:<22}" + "".join(number_cell(row[p]) for p in ("p50", "p95", "p99", "max")))
    return "\n".join(lines)


def chart(workload: Workload, run: Run) -> str:
    """The workload's SVG chart: TTFT, time between tokens, or tokens per second."""
    if workload.name == "prefix":
        points = [(float(n), 1000 * (entry.metrics.ttft_s or 0.0)) for n, entry in enumerate(run.done)]
        return line_chart("Time to first token", "request, in order of arrival", "ms", {"ttft": points}, dots=True)
    times: list[tuple[float, float]] = []  # of a token, and the milliseconds since the one before
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


def compare(report: Mapping[str, Any], earlier: Mapping[str, Any], source: str) -> str:
    """This report ÷ an earlier one; RequestError if their conditions differ."""
    differ = [
        f"{section}.{key}: {before.get(key)!r} there, {now.get(key)!r} here"
        for section in SAME
        for now, before in [(_as_dict(report.get(section)), _as_dict(earlier.get(section)))]
        for key in sorted(set(now) | set(before))
        if now.get(key) != before.get(key)
    ]
    if differ:
        raise RequestError(f"{source} did not measure the same: {'; '.join(differ)}.", param="compare")
    lines = [f"against {source} (commit {earlier.get('commit') or 'unknown'}), this ÷ that:"]
    for name, now, before in (
        ("tokens/s", report["generated_tokens_per_s"], earlier["generated_tokens_per_s"]),
        *((f"ttft {p}", report["ttft_ms"][p], earlier["ttft_ms"][p]) for p in ("p50", "p99")),
        *((f"gap {p}", report["gap_ms"][p], earlier["gap_ms"][p]) for p in ("p50", "p99", "max")),
    ):
        if now and before:
            lines.append(f"  {name:<10} {now / before:.2f}")
    return "\n".join(lines)


def _as_dict(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {"": value}


def _spread(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = [1000 * value for value in seconds if value is not None]
    shares = {f"p{round(100 * share)}": percentile(values, share) for share in PERCENTILES}
    return {**shares, "max": max(values, default=None)}


def number_cell(value: float | None) -> str:
    """A table's cell, 10 characters wide; a dash for None."""
    return f"{'–' if value is None else format(value, ',.1f'):>10}"


def _commit() -> str | None:
    """The commit of the running source, with "+" for changed files; None outside a repository."""
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
