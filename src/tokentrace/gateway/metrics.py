"""What a gateway counts, for Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from ..engines.protocol import Completion
from .turns import Placement, Recorded

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """One gateway's numbers. Their names begin with ``tokentrace_``."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("tokentrace_requests", "Requests answered", ["route", "status"], registry=registry)
        self.turns = Counter("tokentrace_turns", "Turns stored", ["dialect", "finish_reason"], registry=registry)
        self.tokens = Counter(
            "tokentrace_tokens",
            "Tokens: reused of prompts (from the record), new of prompts, sampled",
            ["kind"],
            registry=registry,
        )
        self.branches = Counter("tokentrace_branches", "Turns that began a branch", ["cause"], registry=registry)
        self.repairs = Counter("tokentrace_matcher_repairs", "Echoed fields that differed", registry=registry)
        self.conflicts = Counter(
            "tokentrace_store_conflicts", "Writes that another gateway came before", registry=registry
        )
        self.replayed = Counter("tokentrace_replayed", "Requests answered from the record", registry=registry)
        self.placing = Histogram(
            "tokentrace_prompt_seconds", "Time to make a prompt", buckets=_SECONDS, registry=registry
        )
        self.engine = Histogram(
            "tokentrace_engine_seconds", "Time of a completion at the engine", buckets=_SECONDS, registry=registry
        )
        self.first_token = Histogram(
            "tokentrace_engine_first_token_seconds",
            "Time until the engine's first token",
            buckets=_SECONDS,
            registry=registry,
        )
        self.storing = Histogram(
            "tokentrace_store_seconds", "Time until a turn is on disk", buckets=_SECONDS, registry=registry
        )
        self.in_flight = Gauge("tokentrace_in_flight", "Requests being answered", registry=registry)
        self.waiting = Gauge("tokentrace_waiting", "Requests waiting for a place", registry=registry)
        self.live = Gauge("tokentrace_sessions_in_memory", "Sessions in memory", registry=registry)

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
