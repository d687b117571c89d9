"""OpenTelemetry traces, if they are configured: a span for each request, and one for each of its stages.

Spans have numbers and names, never what was said. Without ``tokentrace[telemetry]`` there are none.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    """Makes spans with a tracer of OpenTelemetry's; without one, none."""

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    @contextlib.contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[None]:
        """A span for a request, which belongs to the trace that its sender names."""
        if self._tracer is None:
            yield
            return
        from opentelemetry.propagate import extract

        with self._tracer.start_as_current_span(name, context=extract(dict(headers))):
            yield

    @contextlib.contextmanager
    def stage(self, name: str, **attributes: str | int | float | bool) -> Iterator[None]:
        """A span inside of the current one."""
        if self._tracer is None:
            yield
            return
        with self._tracer.start_as_current_span(f"tokentrace.{name}") as span:
            for key, value in attributes.items():
                span.set_attribute(f"tokentrace.{key}", value)
            yield

    def note(self, **attributes: Any) -> None:
        """Say something of the request's span."""
        if self._tracer is None:
            return
        from opentelemetry.trace import get_current_span

        for key, value in attributes.items():
            if isinstance(value, str | int | float | bool):
                get_current_span().set_attribute(f"tokentrace.{key}", value)


def configured_tracing() -> Tracing:
    """Tracing as OpenTelemetry's own environment variables have it: on where an endpoint is set."""
    if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED", "") == "true":
        return Tracing()
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "tokentrace-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return Tracing(provider.get_tracer("tokentrace.gateway"))
