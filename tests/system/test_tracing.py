"""Requests as OpenTelemetry spans: times inside each other, part of the client's trace, no word of what was said."""

from __future__ import annotations

from typing import Any

import pytest

from martlet.errors import RequestError
from martlet.server import tracing
from martlet.server.tracing import Tracing
from tests.system.scripted_llm import spell
from tests.system.serving import serving, wait_until

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def test_spans_of_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "otlp_exporter", lambda endpoint: exporter)
    with serving(spell("abc"), step_s=0.01, otlp_endpoint="http://127.0.0.1:1/v1/traces") as served:
        made: Any = served.service.tracing
        assert isinstance(made, Tracing)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        body = {"messages": [{"role": "user", "content": "a secret"}]}
        reply = served.post("/v1/chat/completions", body, headers=headers).json()
        assert served.chat().status_code == 200
        assert made._provider.force_flush()
        wait_until(lambda: len(exporter.get_finished_spans()) == 8)
        assert made._parents == {}
    spans = exporter.get_finished_spans()
    ours = [span for span in spans if f"{span.context.trace_id:032x}" == TRACE]
    assert sorted(span.name for span in ours) == ["decode", "generate scripted", "prefill", "queue"]
    whole = next(span for span in ours if span.name == "generate scripted")
    assert f"{whole.parent.span_id:016x}" == PARENT
    assert whole.attributes["gen_ai.response.id"] == reply["id"]
    assert whole.attributes["gen_ai.usage.output_tokens"] == 4
    assert whole.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    parts = {span.name: span for span in ours if span is not whole}
    assert whole.start_time == parts["queue"].start_time <= parts["prefill"].start_time <= parts["decode"].start_time
    assert parts["decode"].end_time <= whole.end_time
    assert parts["decode"].end_time - parts["decode"].start_time >= 25e6  # three steps of 10 ms
    assert "secret" not in "".join(span.to_json() for span in spans)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RequestError, match=r"martlet\[otel\]"):
        tracing.otlp_exporter("http://127.0.0.1:4318/v1/traces")
