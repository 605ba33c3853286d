"""The server's metrics in Prometheus' text format (read `martlet/metrics.py` for their meaning).

Names, labels and buckets are vLLM's, so that its dashboards work; only the prefix is ours
(`--metrics-prefix`). A request counts once, at its end, under its finish reason. A histogram has a
value for it only if the event happened: a request aborted before its first token has an end-to-end
latency, but no time to first token.
Sources: https://docs.vllm.ai/en/latest/design/metrics.html,
https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from martlet.engine.outputs import RequestOutput
from martlet.metrics import EngineTotals, Observer
from martlet.types import StepPlan

if TYPE_CHECKING:
    from prometheus_client import Metric

    from martlet.engine.engine import Engine

logger = logging.getLogger("martlet.server")

_TTFT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
         160.0, 640.0, 2560.0)  # fmt: skip
# vLLM's, and three below its lowest: a small model on a CPU needs 2 to 5 ms a token.
_BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5,
            10.0, 20.0, 40.0, 80.0)  # fmt: skip
_LATENCY = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
            960.0, 1920.0, 7680.0)  # fmt: skip
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_N = (1, 2, 5, 10, 20)


class Histogram:
    """Counts by bucket; the bounds are inclusive upper bounds, in ascending order."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float | None) -> None:
        """Count a value; None counts nothing."""
        if value is not None:
            self.counts[bisect_left(self.bounds, value)] += 1
            self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """Prometheus' buckets: (upper bound, number of values up to it)."""
        buckets, so_far = [], 0
        for bound, count in zip((*map(str, map(float, self.bounds)), "+Inf"), self.counts, strict=True):
            so_far += count
            buckets.append((bound, float(so_far)))
        return buckets


class ServerMetrics(Observer):
    """The metrics of one model, over all its engines: counters continue when it is reloaded.

    Only one thread writes each field; any thread reads it.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self.n_ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self._past = EngineTotals()  # of closed engines
        self._step_tokens, self._step_sequences = Histogram(_STEP_TOKENS), Histogram(_STEP_TOKENS[:7])
        self._step_time = Histogram(_BETWEEN)
        self.histograms = {
            "time_to_first_token_seconds": (Histogram(_TTFT), "Time from arrival to the first token."),
            "inter_token_latency_seconds": (Histogram(_BETWEEN), "Time between two tokens of an answer."),
            "request_time_per_output_token_seconds": (Histogram(_BETWEEN), "A request's mean time between tokens."),
            "e2e_request_latency_seconds": (Histogram(_LATENCY), "Time from arrival to the end."),
            "request_queue_time_seconds": (Histogram(_LATENCY), "Time from arrival to the first step."),
            "request_prefill_time_seconds": (Histogram(_LATENCY), "Time from the first step to the first token."),
            "request_decode_time_seconds": (Histogram(_LATENCY), "Time from the first token to the last."),
            "request_inference_time_seconds": (Histogram(_LATENCY), "Time from the first step to the last token."),
            "request_prompt_tokens": (Histogram(_TOKENS), "Prompt tokens of a request."),
            "request_generation_tokens": (Histogram(_TOKENS), "Generated tokens of a request."),
            "request_params_n": (Histogram(_N), "Answers that a request asked for."),
            "iteration_tokens_total": (self._step_tokens, "Tokens computed in a step."),
            "step_time_seconds": (self._step_time, "Time of a step."),
            "step_sequences": (self._step_sequences, "Sequences computed in a step."),
        }

    def retire(self, engine: Engine) -> None:
        """Keep the totals of an engine that is closed."""
        self._past = self._past.plus(engine.totals)

    def totals(self, engine: Engine | None) -> EngineTotals:
        """Totals of the closed engines and of `engine`."""
        return self._past if engine is None else self._past.plus(engine.totals)

    def ran(self, plan: StepPlan, seconds: float) -> None:
        self._step_tokens.observe(plan.n_tokens)
        self._step_sequences.observe(len(plan.spans))
        self._step_time.observe(seconds)
        if plan.preempted:  # at most three lines per sequence
            logger.info("%d preempted: there are too few KV pages for all that run (--kv-memory)", len(plan.preempted))

    def ended_request(self, output: RequestOutput) -> None:
        """Count a request at its end."""
        metrics = output.metrics
        assert metrics is not None
        reasons = [completion.finish_reason for completion in output.outputs]
        worst = next((reason for reason in ("error", "abort", "length") if reason in reasons), "stop")
        self.n_ended[worst] += 1
        by_name = {name: histogram for name, (histogram, _) in self.histograms.items()}
        by_name["time_to_first_token_seconds"].observe(metrics.ttft_s)
        for gap in metrics.gaps_s:
            by_name["inter_token_latency_seconds"].observe(gap)
        if metrics.gaps_s:
            by_name["request_time_per_output_token_seconds"].observe(sum(metrics.gaps_s) / len(metrics.gaps_s))
        if metrics.finished_s is not None:
            by_name["e2e_request_latency_seconds"].observe(metrics.finished_s - metrics.arrival_s)
        by_name["request_queue_time_seconds"].observe(metrics.queue_s)
        by_name["request_prefill_time_seconds"].observe(metrics.prefill_s)
        by_name["request_decode_time_seconds"].observe(metrics.decode_s)
        if metrics.scheduled_s is not None and metrics.last_token_s is not None:
            by_name["request_inference_time_seconds"].observe(metrics.last_token_s - metrics.scheduled_s)
        by_name["request_prompt_tokens"].observe(metrics.n_prompt)
        by_name["request_generation_tokens"].observe(metrics.n_generated)
        by_name["request_params_n"].observe(len(output.outputs))


def exposition(models: Sequence[tuple[ServerMetrics, Engine | None]], prefix: str) -> bytes:
    """The metrics of all models in Prometheus' text format; a closed model's engine is None."""
    from prometheus_client import CollectorRegistry, generate_latest  # imported late: it is slow
    from prometheus_client.registry import Collector

    class _Models(Collector):
        def collect(self) -> Iterator[Metric]:
            return _families(models, prefix)

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Models())
    return generate_latest(registry)


def _families(models: Sequence[tuple[ServerMetrics, Engine | None]], prefix: str) -> Iterator[Metric]:
    """The metric families; each has the samples of all models, as the format requires."""
    families: dict[str, Metric] = {}
    for metrics, engine in models:
        for family in _of_model(metrics, engine, prefix):
            if family.name in families:
                families[family.name].samples += family.samples
            else:
                families[family.name] = family
    yield from families.values()


def _of_model(metrics: ServerMetrics, engine: Engine | None, prefix: str) -> Iterator[Metric]:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    labels, values = ("model_name",), (metrics.model,)
    running, waiting, used = 0, 0, 0.0
    if engine is not None:
        running, waiting = engine.scheduler.n_running, engine.scheduler.n_waiting
        used = 1 - engine.n_free_pages / max(1, engine.n_pages)
    for name, gauge, text in (
        ("num_requests_running", running, "Sequences in the batch."),
        ("num_requests_waiting", waiting, "Sequences that wait to start or to resume."),
        ("kv_cache_usage_perc", used, "Share of KV pages in use; 1 is all."),
    ):
        family = GaugeMetricFamily(f"{prefix}:{name}", text, labels=labels)
        family.add_metric(values, gauge)
        yield family
    totals = metrics.totals(engine)
    speculation = totals.speculation
    family = GaugeMetricFamily(
        f"{prefix}:spec_decode_net_gain_seconds", "Time that speculation has saved.", labels=labels
    )
    family.add_metric(values, speculation.gain_s)
    yield family
    accepted = CounterMetricFamily(
        f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by their position in the draft.",
        labels=(*labels, "position"),
    )
    for position, count in enumerate(speculation.accepted):
        accepted.add_metric((*values, str(position)), count)
    yield accepted
    for name, count, text in (
        ("num_preemptions", totals.n_preempted, "Preemptions: a sequence lost its pages."),
        ("prompt_tokens", totals.n_prompt, "Prompt tokens of requests that have started."),
        ("generation_tokens", totals.n_generated, "Generated tokens."),
        ("prefix_cache_queries", totals.n_prompt, "Prompt tokens looked up in the prefix cache."),
        ("prefix_cache_hits", totals.n_cached, "Prompt tokens found in the prefix cache."),
        ("engine_steps", totals.n_steps, "Steps of the engine."),
        ("spec_decode_num_drafts", speculation.n_spans, "Drafts verified."),
        ("spec_decode_num_draft_tokens", speculation.n_drafted, "Draft tokens verified."),
        ("spec_decode_num_accepted_tokens", speculation.n_accepted, "Draft tokens accepted."),
    ):
        counter = CounterMetricFamily(f"{prefix}:{name}", text, labels=labels)
        counter.add_metric(values, count)
        yield counter
    ended = CounterMetricFamily(
        f"{prefix}:request_success", "Ended requests, by the finish reason.", labels=(*labels, "finished_reason")
    )
    for reason, count in metrics.n_ended.items():
        ended.add_metric((*values, reason), count)
    yield ended
    for name, (histogram, text) in metrics.histograms.items():
        spread = HistogramMetricFamily(f"{prefix}:{name}", text, labels=labels)
        spread.add_metric(values, buckets=histogram.cumulative(), sum_value=histogram.total)
        yield spread
