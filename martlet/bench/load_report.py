"""What a load's run amounts to, and whether it can be believed (read `load_generator.py` first).

TTFT: from when a request was due to its first text. TPOT: a request's time from its first text to its last ÷ the tokens
after the first. ITL: between two pieces that came one after another. E2E: to the end of the stream. Tokens are the
server's own count (`usage`), never pieces. Goodput: requests a second that kept every limit of `--slo`.

The audit says what would make the figures flatter or worthless; nothing of it is left out of the report.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from martlet.bench.http_stream import Answer
from martlet.bench.load_generator import Load, LoadRun
from martlet.bench.report import about
from martlet.bench.svg import line_chart
from martlet.errors import RequestError
from martlet.metrics import percentile

__all__ = ["audit", "load_chart", "load_compare", "load_summary", "load_table", "read_slo"]

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
LIMITS = ("ttft", "tpot", "itl", "e2e")
BUSY_SHARE = 0.5  # of a core, above which the generator may be what is measured
LATE_SHARE = 0.2  # of the median time between pieces
LATE_S = 0.002  # that no loop on a shared machine is free of
FALLING_BEHIND = 2.0  # TTFT of the last third ÷ the first third's, open loop


def read_slo(text: str) -> dict[str, float]:
    """`ttft=500,tpot=50` in milliseconds, as seconds."""
    found = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        try:
            found[name.strip()] = float(value) / 1000
        except ValueError:
            raise RequestError(f"--slo has {part!r}; expected NAME=MILLISECONDS.", param="slo") from None
        if name.strip() not in LIMITS or found[name.strip()] <= 0:
            raise RequestError(f"--slo has {part!r}; expected one of {', '.join(LIMITS)}, above 0.", param="slo")
    return found


def load_summary(load: Load, run: LoadRun, slo: Mapping[str, float], server: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that a report says, as JSON takes it; times in milliseconds."""
    good = [answer for answer in run.answers if answer.error is None]
    seconds = max(run.seconds, 1e-9)
    n_out, n_prompt = sum(map(_generated, good)), sum(answer.n_prompt or 0 for answer in good)
    measured = [_times(answer) for answer in good]
    found: dict[str, Any] = {
        "workload": asdict(load),
        "server": dict(server),
        **about(),
        "seconds": seconds,
        "completed": len(good),
        "failed": len(run.answers) - len(good),
        "errors": sorted({answer.error for answer in run.answers if answer.error is not None})[:5],
        "prompt_tokens": n_prompt,
        "cached_tokens": sum(answer.n_cached or 0 for answer in good),
        "generated_tokens": n_out,
        "requests_per_s": len(good) / seconds,
        "generated_tokens_per_s": n_out / seconds,
        "all_tokens_per_s": (n_out + n_prompt) / seconds,
        "ttft_ms": _spread(times["ttft"] for times in measured),
        "tpot_ms": _spread(times["tpot"] for times in measured if "tpot" in times),
        "itl_ms": _spread(gap for answer in good for gap in _gaps(answer)),
        "e2e_ms": _spread(times["e2e"] for times in measured),
    }
    if slo:
        kept = sum(all(times.get(name, 0.0) <= limit for name, limit in slo.items()) for times in measured)
        found["slo_ms"] = {name: 1000 * limit for name, limit in slo.items()}
        found["goodput_requests_per_s"], found["goodput_share"] = kept / seconds, kept / max(1, len(run.answers))
    late = [answer.sent_s - answer.due_s for answer in run.answers]
    found["generator"] = {
        "cpu_share": run.cpu_s / seconds,
        "loop_late_ms": _spread(run.lags_s),
        "sent_late_ms": _spread(late),
    }
    found["audit"] = audit(load, run, found)
    return found


def audit(load: Load, run: LoadRun, found: Mapping[str, Any]) -> list[str]:
    """What a reader must know before believing the figures."""
    return [*_doubts_of_answers(load, run, found), *_doubts_of_generator(load, run, found)]


def _doubts_of_answers(load: Load, run: LoadRun, found: Mapping[str, Any]) -> list[str]:
    said: list[str] = []
    good = [answer for answer in run.answers if answer.error is None]
    if found["failed"]:
        said.append(f"{found['failed']} of {len(run.answers)} requests failed; their tokens are not counted.")
    if uncounted := sum(answer.n_generated is None for answer in good):
        said.append(f"The server gave no usage for {uncounted} answers: pieces were counted in place of tokens.")
    if odd := sum(answer.n_generated not in (None, load.gen_tokens) for answer in good):
        said.append(f"{odd} of {len(good)} answers do not have the {load.gen_tokens} tokens that were asked for.")
    pieces, tokens = sum(len(answer.times) for answer in good), sum(map(_generated, good))
    if pieces and tokens / pieces > 1.1:
        said.append(f"A piece holds {tokens / pieces:.1f} tokens: ITL is between pieces; compare TPOT instead.")
    if found["cached_tokens"] and not load.shared_tokens:
        share = found["cached_tokens"] / max(1, found["prompt_tokens"])
        said.append(f"{share:.0%} of the prompt tokens came from the server's cache, although the load shares none.")
    if good and all(answer.n_cached is None for answer in good):
        said.append("The server does not say how much came from its cache.")
    return said


def _doubts_of_generator(load: Load, run: LoadRun, found: Mapping[str, Any]) -> list[str]:
    said: list[str] = []
    generator = found["generator"]
    gap, late = (found["itl_ms"]["p50"] or 0.0) / 1000, (generator["loop_late_ms"]["p95"] or 0.0) / 1000
    if generator["cpu_share"] > BUSY_SHARE:
        said.append(
            f"The generator took {generator['cpu_share']:.0%} of a core: it may be the bottleneck. Run several, or send"
            " fewer and longer requests."
        )
    if late > max(LATE_S, LATE_SHARE * gap):
        said.append(f"The generator's own loop was {1000 * late:.1f} ms late (p95): the times are that uncertain.")
    if load.rate is not None:
        good = [answer for answer in run.answers if answer.error is None and answer.times]
        third = len(good) // 3
        if third >= 5:
            first, last = (statistics.median(_times(a)["ttft"] for a in part) for part in (good[:third], good[-third:]))
            if last > FALLING_BEHIND * first and last - first > 0.1:
                said.append(
                    f"The server falls behind at {load.rate:g} requests a second (TTFT {1000 * first:.0f} ms at first,"
                    f" {1000 * last:.0f} ms at last): the figures depend on how long the run is."
                )
    if (load_1 := found["load"]) is not None and load_1 > found["machine"]["cores"]:
        said.append(f"The machine's load was {load_1:.1f}: other programs may have run on its cores.")
    return said


def load_table(found: Mapping[str, Any]) -> str:
    """The report for a terminal."""
    load, machine = found["workload"], found["machine"]
    how = f"{load['rate']:g} requests/s arrive" if load["rate"] else f"{load['concurrency']} clients"
    asked = (
        f"{load['prompt_tokens']} + {load['shared_tokens']} shared" if load["shared_tokens"] else load["prompt_tokens"]
    )
    source = found["server"].get("dataset")
    lines = [
        f"{found['server']['url']} {found['server']['model'] or ''}: {load['requests']} requests, {how},"
        f" {source or asked} in, {load['gen_tokens']} out, {load['endpoint']}",
        f"generator on {machine['processor']}, {machine['cores']} cores; commit {found['commit'] or 'unknown'};"
        f" warmed by {load['warmup']} requests, its cache as that left it",
        "",
        f"{found['generated_tokens_per_s']:,.1f} tokens/s generated ({found['all_tokens_per_s']:,.1f} with prompts),"
        f" {found['requests_per_s']:.2f} requests/s, {found['seconds']:.2f} s, {found['failed']} failed",
        f"{found['cached_tokens']:,} of {found['prompt_tokens']:,} prompt tokens from the server's cache",
    ]
    if "slo_ms" in found:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in found["slo_ms"].items())
        lines.append(
            f"goodput {found['goodput_requests_per_s']:.2f} requests/s, {found['goodput_share']:.1%} ({limits})"
        )
    columns = [f"p{round(100 * share)}" for share in PERCENTILES] + ["max"]
    lines += ["", f"{'ms':<10}" + "".join(f"{name:>10}" for name in ("mean", *columns))]
    for name in LIMITS:
        row = found[f"{name}_ms"]
        lines.append(f"{name.upper():<10}" + "".join(_number(row[column]) for column in ("mean", *columns)))
    lines += ["", *(f"! {doubt}" for doubt in found["audit"])]
    lines += [f"! an error: {error}" for error in found["errors"]]
    return "\n".join(lines).rstrip()


def load_chart(run: LoadRun) -> str:
    """Time to first token and a request's time per token, by when the request was due; SVG."""
    series: dict[str, list[tuple[float, float]]] = {"TTFT": [], "E2E": []}
    for answer in run.answers:
        if answer.error is None:
            times = _times(answer)
            series["TTFT"].append((answer.due_s - run.start_s, 1000 * times["ttft"]))
            series["E2E"].append((answer.due_s - run.start_s, 1000 * times["e2e"]))
    return line_chart("Latency of each request", "seconds from the start", "ms", series, dots=True)


def load_compare(found: Mapping[str, Any], earlier: Mapping[str, Any], source: str) -> str:
    """How this report stands to an earlier one of the same load; RequestError if the loads differ."""
    now, before = found["workload"], earlier["workload"]
    differ = [f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
              for key in sorted(set(now) | set(before)) if now.get(key) != before.get(key)]  # fmt: skip
    for key in ("machine",):
        if found[key] != earlier.get(key):
            differ.append(f"{key}: {earlier.get(key)!r} there, {found[key]!r} here")
    if differ:
        raise RequestError(f"{source} did not measure the same: {'; '.join(differ)}.", param="compare")
    lines = [f"against {source}, {earlier['server'].get('url')} (commit {earlier.get('commit')}), this ÷ that:"]
    pairs = [("tokens/s", found["generated_tokens_per_s"], earlier["generated_tokens_per_s"])]
    pairs += [
        (f"{name} {p}", found[f"{name}_ms"][p], earlier[f"{name}_ms"][p]) for name in LIMITS for p in ("p50", "p95")
    ]
    return "\n".join([*lines, *(f"  {name:<10} {a / b:.2f}" for name, a, b in pairs if a and b)])


def _generated(answer: Answer) -> int:
    return len(answer.times) if answer.n_generated is None else answer.n_generated


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in itertools.pairwise(answer.times)]


def _times(answer: Answer) -> dict[str, float]:
    """A request's times in seconds; TPOT and ITL only if there was a second token."""
    found = {"ttft": answer.times[0] - answer.due_s, "e2e": answer.end_s - answer.due_s}
    if (tokens := _generated(answer)) > 1:
        found["tpot"] = (answer.times[-1] - answer.times[0]) / (tokens - 1)
    if gaps := _gaps(answer):
        found["itl"] = max(gaps)  # of a limit: no gap may be longer
    return found


def _spread(seconds: Iterable[float]) -> dict[str, float | None]:
    values: Sequence[float] = [1000 * value for value in seconds]
    found: dict[str, float | None] = {f"p{round(100 * share)}": percentile(values, share) for share in PERCENTILES}
    return {"mean": statistics.fmean(values) if values else None, **found, "max": max(values, default=None)}


def _number(value: float | None) -> str:
    return f"{'–' if value is None else format(value, ',.1f'):>10}"
