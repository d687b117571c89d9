"""Prometheus metrics of a gateway. They never contain text of a conversation."""

from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from .turns import Placement, RecordedTurn

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        gauge = partial(Gauge, registry=self.registry)
        seconds = partial(Histogram, buckets=_SECONDS, registry=self.registry)
        tokens = "Tokens by kind: reused in prompts (from the record), new in prompts, sampled"
        self.requests = counter("tokentrace_requests", "Requests answered", ["route", "status"])
        self.turns = counter("tokentrace_turns", "Turns stored", ["dialect", "finish_reason"])
        kinds = counter("tokentrace_tokens", tokens, ["kind"])
        self.reused = kinds.labels("prompt_reused")
        self.new = kinds.labels("prompt_new")
        self.sampled = kinds.labels("sampled")
        self.branches = counter("tokentrace_branches", "Turns that began a branch", ["cause"])
        self.repairs = counter("tokentrace_matcher_repairs", "Echoed fields that differed")
        conflicts = "tokentrace_store_conflicts"
        self.conflicts = counter(conflicts, "Writes that lost to another gateway's write")
        self.replayed = counter("tokentrace_replayed", "Requests answered from the record")
        self.placing = seconds("tokentrace_prompt_seconds", "Time to build a prompt")
        self.engine = seconds("tokentrace_engine_seconds", "Time that the engine takes for a completion")
        first_token = "tokentrace_engine_first_token_seconds"
        self.first_token = seconds(first_token, "Time until the engine's first token")
        self.storing = seconds("tokentrace_store_seconds", "Time until a turn is on disk")
        self.in_flight = gauge("tokentrace_in_flight", "Requests being answered")
        self.waiting = gauge("tokentrace_waiting", "Requests waiting for a slot")
        self.live = gauge("tokentrace_sessions_in_memory", "Sessions in memory")

    def placed(self, placed: Placement, seconds: float) -> None:
        self.placing.observe(seconds)
        self.reused.inc(placed.reused)
        self.new.inc(len(placed.new_ids))
        self.repairs.inc(len(placed.repairs))

    def stored(self, dialect: str, turn: RecordedTurn, seconds: float) -> None:
        self.storing.observe(seconds)
        self.turns.labels(dialect, turn.finish_reason).inc()
        if turn.cause is not None:
            self.branches.labels(turn.cause.cause.value).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)
