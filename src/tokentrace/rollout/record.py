"""What a rollout is: its task, its budget, and the record of what happened, turn by turn."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from ..conversation.messages import Messages
from ..conversation.place import is_list
from ..errors import InputError, TrajectoryError, shown
from ..parsing.response import ParsedToolCall
from ..settings import as_float, choose, limit, whole
from ..trajectory.inputs import mapping_json
from ..trajectory.trajectory import Trajectory
from .cutting import Keep
from .ends import FAILED_ENDS, End
from .tools import BaseTool, as_tools, step_settings


@dataclass(frozen=True, slots=True)
class Budget:
    """What ends a rollout, and where tool results are cut. None is no limit."""

    turns: int = 16
    user_turns: int | None = None
    """How often the model is answered, by tools or by the simulated user. The turn after the last answer ends the
    rollout: its calls are not run."""
    parallel_calls: int | None = None
    """How many calls of one turn are run; each of the others gets a result that says it was not."""
    turn_tokens: int = 1024
    """The most tokens of one turn."""
    tokens: int | None = None
    """The most sampled tokens of all turns."""
    context: int | None = None
    """The most tokens of a stream; the engine's own limit if it is smaller."""
    seconds: float | None = None
    """For the whole rollout but its reward. Waiting for an engine that is down does not count."""
    tool_timeout: float | None = 60.0
    """Seconds for one call."""
    tool_seconds: float | None = None
    """Seconds for all calls of a rollout."""
    interaction_timeout: float | None = 300.0
    """Seconds for one step of the simulated user."""
    reward_timeout: float | None = 300.0
    """Seconds for the reward."""
    result_tokens: int = 2048
    """Longer tool results are cut."""
    result_keep: Keep = Keep.MIDDLE

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"result_keep": choose(Keep, "result_keep", self.result_keep, InputError)}
        optional = ("tokens", "context", "user_turns", "parallel_calls")
        for name in ("turns", "turn_tokens", "result_tokens", *optional):
            value = getattr(self, name)
            if value is not None or name not in optional:
                checked[name] = whole(name, value, least=1, most=2**31 - 1, error=InputError)
        for name in ("seconds", "tool_timeout", "tool_seconds", "interaction_timeout", "reward_timeout"):
            checked[name] = limit(name, getattr(self, name), zero=name == "tool_seconds", error=InputError)
        for name, value in checked.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        """What was set, and not what is by default."""
        changed = [one.name for one in fields(self) if getattr(self, one.name) != one.default]
        return f"Budget({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"


@dataclass(frozen=True, slots=True)
class Task:
    """What a rollout is about. `name` is its own in a run; one without gets a name from its place there."""

    messages: Messages
    name: str = ""
    tools: Sequence[BaseTool] | None = None
    """Its own tools, in place of the agent's."""
    tool_settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each tool by its name, what `create` is given; or mappings called ``create_kwargs``, ``execute_kwargs``,
    ``calc_reward_kwargs`` and ``release_kwargs``, for each step of its life."""
    interaction_settings: Mapping[str, Any] = field(default_factory=dict)
    """What `start_interaction` is given; ``name`` chooses among several simulated users."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Whatever JSON can hold."""

    def __post_init__(self) -> None:
        if not is_list(self.messages):
            raise InputError(f"a task's messages must be a list of messages, not {shown(self.messages)}")
        if not isinstance(self.name, str) or not _is_text(self.name):
            raise InputError(f"a task's name must be text, not {shown(self.name)}")
        if self.tools is not None:
            object.__setattr__(self, "tools", as_tools(self.tools))
        for name in ("tool_settings", "interaction_settings"):
            value = getattr(self, name)
            if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
                raise InputError(f"a task's {name} must be a mapping by name, not {shown(value)}")
        for tool, value in self.tool_settings.items():
            if not isinstance(value, Mapping):
                raise InputError(f"a task's tool_settings[{tool!r}] must be a mapping, not {shown(value)}")
            step_settings(tool, value)
        try:
            mapping_json(self.metadata, "metadata")
        except TrajectoryError as error:
            raise InputError(f"task {shown(self.name)}: {error}") from error

    def __repr__(self) -> str:
        return f"Task({self.name!r}, {len(self.messages)} messages)"


def _is_text(value: str) -> bool:
    """Whether UTF-8 can hold it, as it cannot hold half of a surrogate pair."""
    return value.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in value)


_LARGEST: Final = 3.4028234663852886e38
"""The largest float32, as rows have rewards."""


def checked_reward(value: Any, what: str) -> float | None:
    """Return a reward as a float; None stays None. Raises InputError unless it is a finite float32."""
    number = None if isinstance(value, str | bytes) else as_float(value)
    if value is not None and (number is None or abs(number) > _LARGEST):
        raise InputError(f"{what} is {shown(value)}: it must be a finite number (float32), or None")
    return number


def checked_metrics(value: Any, who: str) -> tuple[dict[str, Any], str]:
    """Return metrics as JSON, and a note if something in them had to become text."""
    if not isinstance(value, Mapping):
        return {}, f"{who}: metrics must be a mapping, not {shown(value)}: they are dropped"
    metrics, texts = dict[str, Any](), list[str]()
    for key, one in value.items():
        name = key if isinstance(key, str) else shown(key)
        texts += [] if name is key else [name]
        try:
            metrics[name] = json.loads(json.dumps(one, default=str))
        except Exception:  # a cycle, or an object whose str() raises
            metrics[name] = shown(one)
            texts.append(name)
    return metrics, f"{who}: metrics that are not JSON are recorded as text: {', '.join(texts)}" if texts else ""


def call_id(turn: int, index: int) -> str:
    """An id for a call to which the model gave none: nine letters and digits, unique in a rollout."""
    return f"c{turn:04d}{index:04d}"


def result_message(call: ParsedToolCall, turn: int, content: str) -> dict[str, Any]:
    """The message that answers a call of a turn."""
    message = {"role": "tool", "content": content, "tool_call_id": call.id or call_id(turn, call.index)}
    return {**message, "name": call.name} if call.name else message


@dataclass(slots=True)
class ToolUse:
    """How the tools of one trajectory were used."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    reward: float = 0.0
    is_rewarded: bool = False
    """True if a tool or the simulated user returned a reward, be it 0."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_reward(self, reward: float | None) -> float:
        """Add the reward of a call or a reply, and return it as a number."""
        self.is_rewarded = self.is_rewarded or reward is not None
        self.reward += reward or 0.0
        return reward or 0.0


@dataclass(slots=True)
class TurnMetrics:
    """What is known of one completion of the trajectory, in the order of its writes: a turn, or a part of one that was
    aborted and went on."""

    prompt_tokens: int
    sampled: int
    finish_reason: str
    cached_tokens: int | None = None
    """How many tokens of the prompt were in the engine's cache; None where it does not say."""
    engine_seconds: float = 0.0
    malformed: bool = False
    tool_calls: int = 0
    tool_errors: int = 0
    tool_seconds: float = 0.0
    reward: float = 0.0
    """The rewards of this turn's calls, or of the reply to it."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """What tools (``tool``) and the simulated user (``interaction``) measured."""
    continues: bool = False
    """It goes on with the turn before, which was aborted."""


@dataclass(slots=True)
class Rollout:
    """A rollout, done or under way."""

    task: Task
    trajectory: Trajectory
    tools: Sequence[BaseTool]
    messages: list[Mapping[str, Any]]
    """The conversation as it was parsed, for people and for rewards; the trajectory is what was sampled."""
    end: End | None = None
    reward: float | None = None
    """None where there was no reward, and for rollouts that failed."""
    use: ToolUse = field(default_factory=ToolUse)
    seconds: float = 0.0
    engine_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    per_turn: list[TurnMetrics] = field(default_factory=list)
    pending: list[Mapping[str, Any]] = field(default_factory=list)
    """Messages that answer the last turn of a recorded rollout, and that the trajectory does not have yet."""
    instance: str = ""
    """What identifies it to tools, the simulated user and the engine: its name, with a number after it while another
    rollout of that name is under way in this process."""
    _schemas: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        end = "under way" if self.end is None else self.end
        return f"Rollout({self.task.name!r}, {end}, {self.turns} turns, {len(self.trajectory)} tokens)"

    @property
    def turns(self) -> int:
        """How many turns the model had; one that was aborted and went on counts once."""
        return sum(not turn.continues for turn in self.per_turn)

    @property
    def malformed(self) -> int:
        """How many turns have a call that could not be read."""
        return sum(turn.malformed for turn in self.per_turn)

    @property
    def schemas(self) -> list[dict[str, Any]] | None:
        """The schemas of its tools, as the template is shown them: those that the first turn had."""
        if self._schemas is None:
            self._schemas = [tool.tool_schema for tool in self.tools]
        return self._schemas or None

    @property
    def last(self) -> Mapping[str, Any]:
        """The last message, whoever wrote it: where a budget ended the rollout, that can be a tool's result. What the
        model said is `answer`."""
        return self.messages[-1]

    @property
    def answer(self) -> str:
        """What the model itself said last, without its reasoning and its calls; empty where it said nothing."""
        said = [one for one in self.messages[len(self.task.messages) :] if one.get("role") == "assistant"]
        return (said[-1].get("content") or "") if said else ""

    def metrics(self) -> dict[str, Any]:
        """What is known of it in numbers. One that failed has no reward, whatever it was given before."""
        cached = [turn.cached_tokens for turn in self.per_turn if turn.cached_tokens is not None]
        return {
            "end": None if self.end is None else str(self.end),
            "reward": None if self.end in FAILED_ENDS else self.reward,
            "turns": self.turns,
            "tokens": len(self.trajectory),
            "sampled": self.trajectory.num_sampled,
            "samples": self.trajectory.num_samples,
            "breaks": max(0, self.trajectory.num_branches - 1),
            "prompt_tokens": sum(turn.prompt_tokens for turn in self.per_turn),
            "cached_tokens": sum(cached) if cached else None,
            "tool_calls": self.use.calls,
            "tool_errors": self.use.failed,
            "tool_seconds": self.use.seconds,
            "malformed_turns": self.malformed,
            "seconds": self.seconds,
            "engine_seconds": self.engine_seconds,
        }


_NAMES_UNDER_WAY: Final[set[str]] = set()
_NAMING: Final = threading.Lock()


@contextlib.contextmanager
def instance_name(name: str) -> Iterator[str]:
    """A name for as long as a rollout is under way, which no other in this process has meanwhile.

    Tools, simulated users and engines tell rollouts by it: two that shared one would share their state.
    """
    with _NAMING:
        names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
        own = next(one for one in names if one not in _NAMES_UNDER_WAY)
        _NAMES_UNDER_WAY.add(own)
    try:
        yield own
    finally:
        _NAMES_UNDER_WAY.discard(own)
