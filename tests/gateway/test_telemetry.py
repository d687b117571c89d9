"""Traces: a span for a request and its stages, in the trace of whoever asks, with no word of what was said."""

from __future__ import annotations

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.gateway.server import gateway_server
from tokentrace.gateway.telemetry import Tracing

SECRET = "What is 17 * 23, secretly?"
TRACE = "0af7651916cd43dd8448eb211c80319c"


def test_a_turn_is_a_trace_of_its_stages() -> None:
    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    with gateway_server(tracing=Tracing(provider.get_tracer("test"))) as served:
        body = {"model": "pocket", "messages": [{"role": "user", "content": SECRET}]}
        headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        status, _ = served.call("POST", "/sessions/traced/v1/chat/completions", body, headers)
    assert status == 200
    found = {span.name: span for span in spans.get_finished_spans()}
    request = found["POST /sessions/{session}/v1/chat/completions"]
    assert {"tokentrace.prompt", "tokentrace.engine", "tokentrace.store"} <= set(found)
    assert {f"{span.context.trace_id:032x}" for span in found.values()} == {TRACE}
    for name in ("tokentrace.prompt", "tokentrace.engine", "tokentrace.store"):
        assert found[name].parent is not None
        assert found[name].parent.span_id == request.context.span_id
    assert request.attributes is not None
    assert request.attributes["tokentrace.session"] == "traced"
    assert request.attributes["tokentrace.status"] == 200
    assert not any("secretly" in str(span.attributes) for span in found.values())
