"""The report of a load, with an audit of its figures (read `load_generator.py` first).

TTFT: from the due time to the first text. TPOT: from the first text to the last ÷ the tokens after
the first. ITL: between two successive pieces. E2E: from the due time to the end of the stream.
Tokens are the server's count (`usage`), not pieces. Goodput: requests per second within every limit
of `--slo`. The audit lists whatever makes the figures flattering or worthless, and the report shows
all of it.
"""

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from martlet.bench.http_stream import Answer
from martlet.bench.load_generator import Load, LoadRun
from martlet.bench.report import about, number_cell
from martlet.bench.svg import line_chart
from martlet.errors import RequestError
from martlet.metrics import percentile

PERCENTILES = (0.5, 0.9, 0.95, 0.99)
LIMITS = ("ttft", "tpot", "itl", "e2e")
BUSY_SHARE = 0.5  # of a core; above it the generator may be the bottleneck
LATE_SHARE = 0.2  # of the median time between pieces
LATE_S = 0.002  # delay of any event loop on a shared machine
FALLING_BEHIND = 2.0  # TTFT of the last third ÷ that of the first third, open loop


def read_slo(text: str) -> dict[str, float]:
    """Limits such as `ttft=500,tpot=50`, in milliseconds; returned in seconds.

    Raises RequestError for other text.
    """
    limits = {}
    for entry in filter(None, text.split(",")):
        name, _, value = entry.partition("=")
        try:
            limits[name.strip()] = float(value) / 1000
        except ValueError:
            raise RequestError(f"--slo has {entry!r}; expected NAME=MILLISECONDS.", param="slo") from None
        if name.strip() not in LIMITS or limits[name.strip()] <= 0:
            raise RequestError(f"--slo has {entry!r}; expected one of {', '.join(LIMITS)}, above 0.", param="slo")
    return limits


def load_summary(load: Load, run: LoadRun, slo: Mapping[str, float], server: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report as JSON values; times in milliseconds."""
    good = [answer for answer in run.answers if answer.error is None]
    seconds = max(run.seconds, 1e-9)
    n_out, n_prompt = sum(map(_generated, good)), sum(answer.n_prompt or 0 for answer in good)
    measured = [_times(answer) for answer in good]
    report: dict[str, Any] = {
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
        report["slo_ms"] = {name: 1000 * limit for name, limit in slo.items()}
        report["goodput_requests_per_s"], report["goodput_share"] = kept / seconds, kept / max(1, len(run.answers))
    late = [answer.sent_s - answer.due_s for answer in run.answers]
    report["generator"] = {
        "cpu_share": run.cpu_s / seconds,
        "loop_late_ms": _spread(run.lags_s),
        "sent_late_ms": _spread(late),
    }
    report["audit"] = audit(load, run, report)
    return report


def audit(load: Load, run: LoadRun, report: Mapping[str, Any]) -> list[str]:
    """Reasons to doubt the figures."""
    return [*_doubts_of_answers(load, run, report), *_doubts_of_generator(load, run, report)]


def _doubts_of_answers(load: Load, run: LoadRun, report: Mapping[str, Any]) -> list[str]:
    doubts: list[str] = []
    good = [answer for answer in run.answers if answer.error is None]
    if report["failed"]:
        doubts.append(f"{report['failed']} of {len(run.answers)} requests failed; their tokens are not counted.")
    if uncounted := sum(answer.n_generated is None for answer in good):
        doubts.append(f"The server gave no usage for {uncounted} answers: pieces are counted instead of tokens.")
    if odd := sum(answer.n_generated not in (None, load.gen_tokens) for answer in good):
        doubts.append(f"{odd} of {len(good)} answers do not have the {load.gen_tokens} tokens that were asked for.")
    pieces, tokens = sum(len(answer.times) for answer in good), sum(map(_generated, good))
    if pieces and tokens / pieces > 1.1:
        doubts.append(f"A piece holds {tokens / pieces:.1f} tokens: ITL is between pieces; compare TPOT instead.")
    if report["cached_tokens"] and not load.shared_tokens:
        share = report["cached_tokens"] / max(1, report["prompt_tokens"])
        doubts.append(f"{share:.0%} of the prompt tokens came from the server's cache, although the load shares none.")
    if good and all(answer.n_cached is None for answer in good):
        doubts.append("The server does not say how much came from its cache.")
    return doubts


def _doubts_of_generator(load: Load, run: LoadRun, report: Mapping[str, Any]) -> list[str]:
    doubts: list[str] = []
    generator = report["generator"]
    gap, late = (report["itl_ms"]["p50"] or 0.0) / 1000, (generator["loop_late_ms"]["p95"] or 0.0) / 1000
    if generator["cpu_share"] > BUSY_SHARE:
        doubts.append(
            f"The generator took {generator['cpu_share']:.0%} of a core: it may be the bottleneck. Run several"
            " generators, or send fewer and longer requests."
        )
    if late > max(LATE_S, LATE_SHARE * gap):
        doubts.append(f"The generator's own loop was {1000 * late:.1f} ms late (p95): the times are that uncertain.")
    if load.rate is not None:
        good = [answer for answer in run.answers if answer.error is None and answer.times]
        third = len(good) // 3
        if third >= 5:
            first, last = (
                statistics.median(_times(a)["ttft"] for a in answers) for answers in (good[:third], good[-third:])
            )
            if last > FALLING_BEHIND * first and last - first > 0.1:
                doubts.append(
                    f"The server falls behind at {load.rate:g} requests a second (TTFT {1000 * first:.0f} ms at first,"
                    f" {1000 * last:.0f} ms at last): the figures depend on how long the run is."
                )
    if (load_1 := report["load"]) is not None and load_1 > report["machine"]["cores"]:
        doubts.append(f"The machine's load was {load_1:.1f}: other programs may have run on its cores.")
    return doubts


def load_table(report: Mapping[str, Any]) -> str:
    """The report as text for a terminal."""
    load, machine = report["workload"], report["machine"]
    how = f"{load['rate']:g} requests/s arrive" if load["rate"] else f"{load['concurrency']} clients"
    asked = (
        f"{load['prompt_tokens']} + {load['shared_tokens']} shared" if load["shared_tokens"] else load["prompt_tokens"]
    )
    source = report["server"].get("dataset")
    lines = [
        f"{report['server']['url']} {report['server']['model'] or ''}: {load['requests']} requests, {how},"
        f" {source or asked} in, {load['gen_tokens']} out, {load['endpoint']}",
        f"generator on {machine['processor']}, {machine['cores']} cores; commit {report['commit'] or 'unknown'};"
        f" warmed by {load['warmup']} requests, its cache as that left it",
        "",
        f"{report['generated_tokens_per_s']:,.1f} tokens/s generated ({report['all_tokens_per_s']:,.1f} with prompts),"
        f" {report['requests_per_s']:.2f} requests/s, {report['seconds']:.2f} s, {report['failed']} failed",
        f"{report['cached_tokens']:,} of {report['prompt_tokens']:,} prompt tokens from the server's cache",
    ]
    if "slo_ms" in report:
        limits = ", ".join(f"{name} ≤ {limit:g} ms" for name, limit in report["slo_ms"].items())
        lines.append(
            f"goodput {report['goodput_requests_per_s']:.2f} requests/s, {report['goodput_share']:.1%} ({limits})"
        )
    columns = [f"p{round(100 * share)}" for share in PERCENTILES] + ["max"]
    lines += ["", f"{'ms':<10}" + "".join(f"{name:>10}" for name in ("mean", *columns))]
    for name in LIMITS:
        row = report[f"{name}_ms"]
        lines.append(f"{name.upper():<10}" + "".join(number_cell(row[column]) for column in ("mean", *columns)))
    lines += ["", *(f"! {doubt}" for doubt in report["audit"])]
    lines += [f"! an error: {error}" for error in report["errors"]]
    return "\n".join(lines).rstrip()


def load_chart(run: LoadRun) -> str:
    """An SVG chart of TTFT and E2E by the time at which the request was due."""
    series: dict[str, list[tuple[float, float]]] = {"TTFT": [], "E2E": []}
    for answer in run.answers:
        if answer.error is None:
            times = _times(answer)
            series["TTFT"].append((answer.due_s - run.start_s, 1000 * times["ttft"]))
            series["E2E"].append((answer.due_s - run.start_s, 1000 * times["e2e"]))
    return line_chart("Latency of each request", "seconds from the start", "ms", series, dots=True)


def load_compare(report: Mapping[str, Any], earlier: Mapping[str, Any], source: str) -> str:
    """This report ÷ an earlier one of the same load; RequestError if the loads differ."""
    now, before = report["workload"], earlier["workload"]
    differ = [f"{key}: {before.get(key)!r} there, {now.get(key)!r} here"
              for key in sorted(set(now) | set(before)) if now.get(key) != before.get(key)]  # fmt: skip
    for key in ("machine",):
        if report[key] != earlier.get(key):
            differ.append(f"{key}: {earlier.get(key)!r} there, {report[key]!r} here")
    if differ:
        raise RequestError(f"{source} did not measure the same: {'; '.join(differ)}.", param="compare")
    lines = [f"against {source}, {earlier['server'].get('url')} (commit {earlier.get('commit')}), this ÷ that:"]
    pairs = [("tokens/s", report["generated_tokens_per_s"], earlier["generated_tokens_per_s"])]
    pairs += [
        (f"{name} {p}", report[f"{name}_ms"][p], earlier[f"{name}_ms"][p]) for name in LIMITS for p in ("p50", "p95")
    ]
    return "\n".join([*lines, *(f"  {name:<10} {a / b:.2f}" for name, a, b in pairs if a and b)])


def _generated(answer: Answer) -> int:
    return len(answer.times) if answer.n_generated is None else answer.n_generated


def _gaps(answer: Answer) -> list[float]:
    return [b - a for a, b in itertools.pairwise(answer.times)]


def _times(answer: Answer) -> dict[str, float]:
    """A request's times in seconds; TPOT and ITL only if it has a second token."""
    times = {"ttft": answer.times[0] - answer.due_s, "e2e": answer.end_s - answer.due_s}
    if (tokens := _generated(answer)) > 1:
        times["tpot"] = (answer.times[-1] - answer.times[0]) / (tokens - 1)
    if gaps := _gaps(answer):
        times["itl"] = max(gaps)  # a limit holds for every gap
    return times


def _spread(seconds: Iterable[float]) -> dict[str, float | None]:
    values: Sequence[float] = [1000 * value for value in seconds]
    shares: dict[str, float | None] = {f"p{round(100 * share)}": percentile(values, share) for share in PERCENTILES}
    return {"mean": statistics.fmean(values) if values else None, **shares, "max": max(values, default=None)}
