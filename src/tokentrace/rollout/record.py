"""A rollout: its task, its budget, and what happened in each turn."""

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import chain, count
from typing import Any

from ..conversation.messages import Messages
from ..errors import InputError, TrajectoryError, brief
from ..samples.trajectories import owned_turns
from ..settings import as_float, as_float32, choose, limit, whole
from ..store.store import is_storable
from ..trajectory.checks import mapping_json
from ..trajectory.trajectory import Trajectory
from ..values.place import is_list
from .ends import FAILED_ENDS, End
from .tools import BaseTool, Keep, as_tools, step_settings


@dataclass(frozen=True, slots=True)
class Budget:
    """Limits for a rollout. None means no limit."""

    turns: int = 16
    user_turns: int | None = None
    """How many times tools or the simulated user may answer."""
    parallel_calls: int | None = None
    """How many calls of a turn may run. Others get an error as their result."""
    turn_tokens: int = 1024
    tokens: int | None = None
    """Sampled tokens in all turns."""
    context: int | None = None
    """Tokens in a stream. The engine's limit applies as well."""
    seconds: float | None = None
    """For the whole rollout, without its reward and engine outages."""
    tool_timeout: float | None = 60.0
    tool_seconds: float | None = None
    interaction_timeout: float | None = 300.0
    reward_timeout: float | None = 300.0
    result_tokens: int = 2048
    result_keep: Keep = Keep.MIDDLE

    def __post_init__(self) -> None:
        for one in fields(self):
            value, is_optional = getattr(self, one.name), "None" in str(one.type)
            if one.name == "result_keep":
                value = choose(Keep, one.name, value, InputError)
            elif str(one.type).startswith("float"):
                value = limit(one.name, value, zero=one.name == "tool_seconds", error=InputError)
            elif value is not None or not is_optional:
                value = whole(one.name, value, least=1, most=2**31 - 1, error=InputError)
            object.__setattr__(self, one.name, value)


@dataclass(frozen=True, slots=True)
class Task:
    """The input of a rollout. A task without a name gets its position in the run."""

    messages: Messages
    name: str = ""
    tools: Sequence[BaseTool] | None = None
    tool_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By tool: arguments of `create`, or ``create_kwargs``, ``execute_kwargs`` and so on."""
    interaction_settings: Mapping[str, Any] = field(default_factory=dict)
    """The arguments of `start_interaction`; ``name`` selects a simulated user."""
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not is_list(self.messages):
            raise InputError(f"a task's messages must be a list, not {brief(self.messages)}")
        if not isinstance(self.name, str) or not is_storable(self.name):
            raise InputError(f"a task's name must be text without NUL, not {brief(self.name)}")
        if self.tools is not None:
            object.__setattr__(self, "tools", as_tools(self.tools))
        for name in ("tool_settings", "interaction_settings"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise InputError(f"a task's {name} must be a mapping by name, not {brief(value)}")
        for tool, value in self.tool_settings.items():
            step_settings(tool, value)
        try:
            mapping_json(self.metadata, "metadata")
        except TrajectoryError as error:
            raise InputError(f"task {brief(self.name)}: {error}") from error
        if "rollout" in self.metadata:
            raise InputError("a task's metadata must not have the key 'rollout': the store uses it")


def checked_reward(value: Any, what: str) -> float | None:
    """A reward as a float, or None. Raises InputError unless it is a finite float32."""
    number = None if isinstance(value, str | bytes) else as_float32(as_float(value))
    if value is not None and number is None:
        raise InputError(f"{what} is {brief(value)}: it must be a finite number (float32), or None")
    return number


def plain_json(value: Any) -> Any:
    """A JSON copy of a value. What is not JSON becomes text."""
    try:
        return json.loads(json.dumps(value, default=str), parse_constant=str)
    except Exception:  # a cycle, or an object whose str() raises
        return brief(value)


def call_id(turn: int, index: int) -> str:
    """An id for a call without one: nine letters and digits, unique in a rollout."""
    return f"c{turn:04d}{index:04d}"


@dataclass(slots=True)
class TurnMetrics:
    """About a completion, what a trajectory does not record."""

    engine_seconds: float = 0.0
    malformed: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    tool_seconds: float = 0.0
    reward: float | None = None
    """The reward of this turn's calls, or of the reply to it."""
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, name: str, reward: Any, metrics: Any) -> None:
        """Add the reward and the metrics of a call or a reply. Raises InputError."""
        if (number := checked_reward(reward, f"{name}: the reward")) is not None:
            self.reward = checked_reward((self.reward or 0.0) + number, "the reward of a turn")
        values = metrics if isinstance(metrics, Mapping) else {"value": metrics}
        if metrics:
            names = (key if isinstance(key, str) else brief(key) for key in values)
            self.metrics.append(
                {kind: name, **dict(zip(names, map(plain_json, values.values()), strict=True))}
            )


def _total(name: str) -> Any:
    return property(lambda rollout: sum(getattr(turn, name) for turn in rollout.per_turn))


@dataclass
class Rollout:
    """A rollout, done or under way."""

    task: Task
    trajectory: Trajectory
    tools: Sequence[BaseTool]
    messages: list[Mapping[str, Any]]
    """The parsed conversation, for people and rewards."""
    end: End | None = None
    reward: float | None = None
    seconds: float = 0.0
    engine_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    per_turn: list[TurnMetrics] = field(default_factory=list)
    pending: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages that answer the last turn, but are not in the trajectory yet."""
    instance: str = ""
    """The name for tools, user and engine, numbered if in use."""

    malformed = _total("malformed")
    tool_calls = _total("tool_calls")
    tool_errors = _total("tool_errors")
    tool_seconds = _total("tool_seconds")

    def __repr__(self) -> str:
        end = "under way" if self.end is None else self.end
        return f"Rollout({self.task.name!r}, {end}, {self.turns} turns, {len(self.trajectory)} tokens)"

    @property
    def turns(self) -> int:
        """How many turns there are. One in several parts counts once."""
        return sum(not turn.continues for turn in owned_turns(self.trajectory))

    @cached_property
    def schemas(self) -> list[dict[str, Any]] | None:
        return [tool.tool_schema for tool in self.tools] or None

    @property
    def answer(self) -> str:
        """The model's last content, without reasoning and calls."""
        replies = [
            one for one in self.messages[len(self.task.messages) :] if one.get("role") == "assistant"
        ]
        return (replies[-1].get("content") or "") if replies else ""

    def metrics(self) -> dict[str, Any]:
        turns = owned_turns(self.trajectory)
        cached = [turn.cached_tokens for turn in turns if turn.cached_tokens is not None]
        names = ("turns", "tool_calls", "tool_errors", "tool_seconds", "seconds", "engine_seconds")
        return {name: getattr(self, name) for name in names} | {
            "end": None if self.end is None else str(self.end),
            "reward": None if self.end in FAILED_ENDS else self.reward,
            "tokens": len(self.trajectory),
            "sampled": self.trajectory.num_sampled,
            "samples": self.trajectory.num_samples,
            "breaks": max(0, self.trajectory.num_branches - 1),
            "prompt_tokens": sum(turn.start for turn in turns),
            "cached_tokens": sum(cached) if cached else None,
            "malformed_turns": self.malformed,
        }


_RUNNING: set[str] = set()
_NAMING = threading.Lock()


@contextmanager
def instance_name(name: str) -> Iterator[str]:
    with _NAMING:
        names = chain([name], (f"{name}~{number}" for number in count(2)))
        unique = next(one for one in names if one not in _RUNNING)
        _RUNNING.add(unique)
    try:
        yield unique
    finally:
        _RUNNING.discard(unique)
