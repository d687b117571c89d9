"""OpenTelemetry spans."""

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from ..errors import InputError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Tracing:
    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    def span(
        self, name: str, headers: Mapping[str, str] | None = None, **attributes: Any
    ) -> AbstractContextManager[dict[str, Any]]:
        """Yields attributes to add to. `headers` may name a trace."""
        return nullcontext(attributes) if self._tracer is None else self._span(name, headers, attributes)

    @contextmanager
    def _span(self, name: str, headers: Any, attributes: dict[str, Any]) -> Iterator[dict[str, Any]]:
        from opentelemetry.propagate import extract

        context = None if headers is None else extract(dict(headers))
        quiet = {"record_exception": False, "set_status_on_exception": False}
        with self._tracer.start_as_current_span(name, context=context, **quiet) as span:
            try:
                yield attributes
            finally:
                for key, value in attributes.items():
                    if isinstance(value, str | int | float | bool):
                        span.set_attribute(f"tokentrace.{key}", value)


def configured_tracing() -> Tracing:
    is_off = os.environ.get("OTEL_SDK_DISABLED") == "true"
    if is_off or not any(map(os.environ.get, _ENDPOINTS)):
        return Tracing()
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        needs = 'pip install "tokentrace[telemetry]", or unset OTEL_EXPORTER_OTLP_ENDPOINT'
        raise InputError(f"tracing needs extra packages: {needs} ({error})") from None
    name = os.environ.get("OTEL_SERVICE_NAME", "tokentrace-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("tokentrace.gateway"))
