"""Requests as OpenTelemetry spans (`--otlp-endpoint`, extra `otel`); read `prometheus.py` first.

Each request is one span with child spans for queue, prefill and decode. They are made at its end
from times that are recorded anyway, so tracing costs a step nothing. A `traceparent` header makes
the span part of the client's trace. Spans have no text of prompt or answer. Attribute names:
https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans/
"""

import time
from contextvars import ContextVar
from typing import Any

from martlet.engine.outputs import RequestOutput
from martlet.errors import RequestError

PARENT: ContextVar[str] = ContextVar("traceparent", default="")  # header of the current HTTP request
SEND_S = 3  # timeout for the collector, which may delay the server's shutdown as long
MAX_PARENTS = 100_000  # of open requests


def otlp_exporter(endpoint: str) -> Any:
    """An exporter that sends spans over HTTP; RequestError if the `otel` extra is missing."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError:
        raise RequestError(
            "--otlp-endpoint needs OpenTelemetry: pip install 'martlet[otel]'.", param="otlp_endpoint"
        ) from None
    return OTLPSpanExporter(endpoint=endpoint, timeout=SEND_S)


class Tracing:
    """Makes the spans of one model's requests."""

    def __init__(self, model: str, exporter: Any) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        self._model = model
        self._provider = TracerProvider(resource=Resource.create({"service.name": "martlet"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("martlet")
        self._parents: dict[str, str] = {}

    def prepared(self, request_id: str) -> None:
        """Remember the client's trace, if the HTTP request being read names it."""
        if (parent := PARENT.get()) and len(self._parents) < MAX_PARENTS:
            self._parents[request_id] = parent

    def ended(self, output: RequestOutput) -> None:
        """Export the spans of a request that has ended."""
        from opentelemetry.propagate import extract
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        metrics = output.metrics
        assert metrics is not None
        to_epoch = time.time() - time.monotonic()
        context = extract({"traceparent": self._parents.pop(output.request_id, "")})
        whole = self._tracer.start_span(
            f"generate {self._model}",
            context,
            kind=SpanKind.SERVER,
            start_time=_ns(metrics.arrival_s, to_epoch),
            attributes={
                "gen_ai.operation.name": "generate",
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": output.request_id,
                "gen_ai.response.finish_reasons": [str(answer.finish_reason) for answer in output.outputs],
                "gen_ai.usage.input_tokens": metrics.n_prompt,
                "gen_ai.usage.output_tokens": metrics.n_generated,
                "gen_ai.usage.cache_read.input_tokens": metrics.n_cached,
                "martlet.preemptions": metrics.n_preempted,
                "martlet.drafted_tokens": metrics.n_drafted,
                "martlet.accepted_tokens": metrics.n_accepted,
            },
        )
        if output.error is not None:
            whole.set_status(Status(StatusCode.ERROR, output.error[:500]))
        last = metrics.finished_s or time.monotonic()
        times = [metrics.arrival_s, metrics.scheduled_s, metrics.first_token_s, metrics.last_token_s]
        for name, start, end in zip(("queue", "prefill", "decode"), times, times[1:], strict=False):
            if start is not None:
                child = self._tracer.start_span(name, set_span_in_context(whole), start_time=_ns(start, to_epoch))
                child.end(_ns(last if end is None else end, to_epoch))
        whole.end(_ns(last, to_epoch))

    def close(self) -> None:
        """Send the remaining spans. Idempotent."""
        self._provider.shutdown()


def _ns(seconds: float, to_epoch: float) -> int:
    return int((seconds + to_epoch) * 1e9)
