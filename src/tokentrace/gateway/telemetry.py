"""The gateway's log and OpenTelemetry spans. Neither ever has a word of a conversation.

A request is a span with one for each stage, if ``tokentrace[telemetry]`` is installed and OpenTelemetry's environment
variables name an endpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, Final

LOGGER: Final = logging.getLogger("tokentrace.gateway")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


# -- the log


def log_request(method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
    """Write a line of JSON for a request whose response has ended."""
    line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
    level = logging.INFO if status < 500 else logging.WARNING
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))


def log_failure(error: BaseException) -> None:
    """Log an unforeseen failure: where and of which type, but not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rsplit('/tokentrace/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    LOGGER.error(json.dumps({"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}))


# -- spans


class Tracing:
    """Makes spans, if there is a tracer of OpenTelemetry's."""

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    @contextlib.contextmanager
    def request(self, name: str, headers: Mapping[str, str]) -> Iterator[None]:
        """A span for a request, in the trace that its sender names."""
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
        """Add attributes to the request's span."""
        if self._tracer is None:
            return
        from opentelemetry.trace import get_current_span

        for key, value in attributes.items():
            if isinstance(value, str | int | float | bool):
                get_current_span().set_attribute(f"tokentrace.{key}", value)


def configured_tracing() -> Tracing:
    """Tracing as OpenTelemetry's environment variables configure it: on if they name an endpoint."""
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
