"""What a gateway says of itself: lines of its log, numbers for Prometheus, spans of OpenTelemetry. Never what was said.

There are spans, one for each request and one for each of its stages, where ``tokentrace[telemetry]`` is installed and
OpenTelemetry's own environment variables name an endpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
import traceback
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..engines.protocol import Completion
from .turns import Placement, Recorded

LOGGER: Final = logging.getLogger("tokentrace.gateway")
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


# -- the log


def log_request(method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
    """A line of JSON for a request that was answered, or whose stream was begun."""
    line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
    level = logging.INFO if status < 500 else logging.WARNING
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))


def log_failure(error: BaseException) -> None:
    """Something failed that nobody foresaw: where, and of which type, but not with which words."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rsplit('/tokentrace/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    LOGGER.error(json.dumps({"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}))


# -- numbers


class Metrics:
    """One gateway's numbers. Their names begin with ``tokentrace_``."""

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
        """A prompt was made."""
        self.placing.observe(seconds)
        self.tokens.labels("prompt_reused").inc(placed.reused)
        self.tokens.labels("prompt_new").inc(len(placed.new_ids))
        self.repairs.inc(len(placed.repairs))

    def sampled(self, completion: Completion, seconds: float) -> None:
        """A completion arrived."""
        self.engine.observe(seconds)
        self.tokens.labels("sampled").inc(len(completion.ids))

    def stored(self, dialect: str, turn: Recorded, placed: Placement, seconds: float) -> None:
        """A turn is on disk."""
        self.storing.observe(seconds)
        self.turns.labels(dialect, turn.finish_reason).inc()
        if turn.cause is not None:
            self.branches.labels(str(turn.cause.cause)).inc()

    def text(self) -> bytes:
        """All of them, as Prometheus reads them."""
        return generate_latest(self.registry)


# -- spans


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
