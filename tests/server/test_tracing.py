"""Requests as OpenTelemetry spans: times inside each other, part of the client's trace, no word of
what was said.
"""

from __future__ import annotations

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from martlet.errors import RequestError
from martlet.server import tracing
from martlet.server.tracing import Tracing
from martlet.toy import spell
from tests.server.serving import serving, wait_until

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


class Collector(BaseHTTPRequestHandler):
    """Takes OTLP over HTTP as a collector does: protobuf, perhaps compressed, at /v1/traces; busy
    the first time.
    """

    def do_POST(self) -> None:
        """Read spans."""
        server: Any = self.server
        data = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        server.asked.append((self.path, self.headers["Content-Type"], data))
        self.send_response(503 if len(server.asked) == 1 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on stderr."""


def test_a_collector_gets_them() -> None:
    """Over a real connection, in OpenTelemetry's own messages; what it was too busy for comes
    again.
    """
    pytest.importorskip("opentelemetry.sdk")
    messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    collector = ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    collector.asked = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=collector.serve_forever, daemon=True)
    thread.start()
    try:
        with serving(spell("abc"), otlp_endpoint=f"http://127.0.0.1:{collector.server_port}/v1/traces") as served:
            body = {"messages": [{"role": "user", "content": "a"}]}
            headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
            reply = served.post("/v1/chat/completions", body, headers=headers).json()
        wait_until(lambda: len(collector.asked) >= 2)  # type: ignore[attr-defined]
    finally:
        collector.shutdown()
        collector.server_close()
    path, kind, data = collector.asked[-1]  # type: ignore[attr-defined]
    assert (path, kind) == ("/v1/traces", "application/x-protobuf")
    message = messages.ExportTraceServiceRequest.FromString(data)
    [resource] = message.resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "martlet"
    spans = [span for scope in resource.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == ["decode", "generate scripted", "prefill", "queue"]
    whole = next(span for span in spans if span.name == "generate scripted")
    assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
    assert whole.kind == whole.SPAN_KIND_SERVER
    values = {attribute.key: attribute.value for attribute in whole.attributes}
    assert values["gen_ai.response.id"].string_value == reply["id"]
    assert values["gen_ai.usage.output_tokens"].int_value == 4
    for span in spans:
        assert span is whole or span.parent_span_id == whole.span_id
        assert 0 < whole.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano <= whole.end_time_unix_nano


def test_a_collector_that_is_not_there() -> None:
    """Answers come as ever, and the end of the server does not wait for it."""
    pytest.importorskip("opentelemetry.sdk")
    with serving(spell("abc"), otlp_endpoint="http://127.0.0.1:9/v1/traces") as served:
        assert served.chat().status_code == 200
        start = time.monotonic()
    assert time.monotonic() - start < 6


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(RequestError, match=r"martlet\[otel\]"):
        tracing.otlp_exporter("http://127.0.0.1:4318/v1/traces")
