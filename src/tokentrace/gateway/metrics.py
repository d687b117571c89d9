"""What a gateway reports about itself: metrics for Prometheus, and spans of OpenTelemetry. Never what was said."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .turns import Placement, RecordedTurn

_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


class Metrics:
    """One gateway's metrics. Their names begin with ``tokentrace_``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=self.registry), partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        tokens = "Tokens: reused of prompts (from the record), new of prompts, sampled"
        self.requests = counter("tokentrace_requests", "Requests answered", ["route", "status"])
        self.turns = counter("tokentrace_turns", "Turns stored", ["dialect", "finish_reason"])
        self.tokens = counter("tokentrace_tokens", tokens, ["kind"])
        self.branches = counter("tokentrace_branches", "Turns that began a branch", ["cause"])
        self.repairs = counter("tokentrace_matcher_repairs", "Echoed fields that differed")
        self.conflicts = counter("tokentrace_store_conflicts", "Writes that another gateway came before")
        self.replayed = counter("tokentrace_replayed", "Requests answered from the record")
        self.placing = seconds("tokentrace_prompt_seconds", "Time to make a prompt")
        self.engine = seconds("tokentrace_engine_seconds", "Time of a completion at the engine")
        self.first_token = seconds("tokentrace_engine_first_token_seconds", "Time until the engine's first token")
        self.storing = seconds("tokentrace_store_seconds", "Time until a turn is on disk")
        self.in_flight = gauge("tokentrace_in_flight", "Requests being answered")
        self.waiting = gauge("tokentrace_waiting", "Requests waiting for a place")
        self.live = gauge("tokentrace_sessions_in_memory", "Sessions in memory")

    def placed(self, placed: Placement, seconds: float) -> None:
        """Count a prompt."""
        self.placing.observe(seconds)
        self.tokens.labels("prompt_reused").inc(placed.reused)
        self.tokens.labels("prompt_new").inc(len(placed.new_ids))
        self.repairs.inc(len(placed.repairs))

    def stored(self, dialect: str, turn: RecordedTurn, seconds: float) -> None:
        """Count a turn that is on disk."""
        self.storing.observe(seconds)
        self.turns.labels(dialect, turn.finish_reason).inc()
        if turn.cause is not None:
            self.branches.labels(turn.cause.cause.value).inc()

    def text(self) -> bytes:
        """All metrics as Prometheus reads them."""
        return generate_latest(self.registry)


class Tracing:
    """Makes spans with a tracer of OpenTelemetry; without one, none."""

    def __init__(self, tracer: Any = None) -> None:
        self._tracer = tracer

    @contextlib.contextmanager
    def span(self, name: str, headers: Mapping[str, str] | None = None, **attributes: Any) -> Iterator[dict[str, Any]]:
        """A span inside the current one, or in the trace that headers name. Yields its attributes, to add to."""
        if self._tracer is None:
            yield attributes
            return
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
    """Tracing as OpenTelemetry's environment variables have it: on if it is installed and an endpoint is set."""
    if not any(os.environ.get(name) for name in _ENDPOINTS) or os.environ.get("OTEL_SDK_DISABLED") == "true":
        return Tracing()
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    name = os.environ.get("OTEL_SERVICE_NAME", "tokentrace-gateway")
    provider = TracerProvider(resource=Resource.create({"service.name": name}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider.get_tracer("tokentrace.gateway"))
