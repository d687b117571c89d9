"""Tools: functions, and objects with a tool's methods."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..conversation.messages import check_tools
from ..errors import InputError, brief, kind_of
from ..parsing.response import CallStatus, ParsedToolCall
from ..tokens.tokenizer import Tokenizer
from ..values.functions import function_schema
from ..values.place import is_list
from .calling import called, describe_error, noted, takes, within

if TYPE_CHECKING:
    from .record import Budget, Rollout, TurnMetrics

STEPS = ("create", "execute", "calc_reward", "release")
"""A task can pass arguments to each step: ``create_kwargs``, ``execute_kwargs`` and so on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. The model sees `content`."""

    content: str
    reward: float | None = None
    metrics: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    """The call was malformed, or the tool raised, took too long or returned no text."""
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InputError(f"the content of a ToolResult must be text, not {brief(self.content)}")


class BaseTool:
    """A tool with state. One object serves all trajectories; `instance_id` names one."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        self.config = dict(config or {})
        self.tool_schema = dict(tool_schema) if tool_schema is not None else self.get_openai_tool_schema()
        check_tools([self.tool_schema])

    def get_openai_tool_schema(self) -> dict[str, Any]:
        raise InputError(f"{type(self).__name__} needs a tool_schema")

    @property
    def name(self) -> str:
        function = self.tool_schema.get("function", self.tool_schema)
        return str(function["name"])

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin a trajectory. `kwargs` are its task's settings for this tool."""
        if kwargs:
            raise InputError(f"there are settings for tool {self.name!r}, which takes none")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call. Return text, a JSON value, a `ToolResult`, or (text, reward, metrics)."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole trajectory, or None."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""

    async def close(self) -> None:
        """Release what all trajectories share, at the end of a run."""


class FunctionTool(BaseTool):
    """A function as a tool, with a schema from its signature. Plain ones run in a thread.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add two numbers.'''
    ...     return a + b
    >>> FunctionTool(add).tool_schema["function"]["parameters"]["properties"]["a"]
    {'type': 'integer'}
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self._function = function
        super().__init__(tool_schema=function_schema(function, name))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await called(self._function, **parameters, **kwargs)


class AdoptedTool(BaseTool):
    """A tool from another library, with a schema and `execute` or `call`."""

    def __init__(self, tool: Any, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.tool = tool
        super().__init__(tool_schema=tool_schema)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        schema: Any = getattr(self.tool, "tool_schema", None)
        if schema is None and hasattr(self.tool, "get_openai_tool_schema"):
            schema = self.tool.get_openai_tool_schema()
        if hasattr(schema, "model_dump"):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        if not isinstance(schema, Mapping):
            raise InputError(f"the tool_schema of {brief(self.tool)} must be a mapping or a pydantic model")
        return dict(schema)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        return await called(self.tool.call, parameters, **kwargs)


def as_tools(tools: Sequence[BaseTool | Callable[..., Any] | Any]) -> list[BaseTool]:
    """Convert functions and objects with a tool's methods to tools. Raises InputError."""
    if not is_list(tools):
        raise InputError(f"tools must be a list of tools and functions, not {brief(tools)}")
    by_name: dict[str, BaseTool] = {}
    for tool in tools:
        if not isinstance(tool, BaseTool):
            has_schema = hasattr(tool, "tool_schema") or hasattr(tool, "get_openai_tool_schema")
            adoptable = has_schema and any(
                callable(getattr(tool, name, None)) for name in ("execute", "call")
            )
            if isinstance(tool, type) or not (callable(tool) or adoptable):
                raise InputError(
                    f"{brief(tool)} is not a function or an object with execute and a tool_schema"
                )
            tool = AdoptedTool(tool) if adoptable else FunctionTool(tool)
        if tool.name in by_name:
            raise InputError(f"two tools are called {tool.name!r}")
        by_name[tool.name] = tool
    return list(by_name.values())


def step_settings(tool: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split a task's settings for a tool by step. By default, all go to `create`.

    >>> step_settings("look", {"release_kwargs": {"keep": True}})["release"]
    {'keep': True}
    """
    if not isinstance(settings, Mapping):
        raise InputError(f"the settings of tool {tool!r} must be a mapping, not {brief(settings)}")
    keys = {f"{step}_kwargs": step for step in STEPS}
    steps: dict[str, dict[str, Any]] = {step: {} for step in STEPS}
    if not keys.keys() & settings.keys():
        return {**steps, "create": dict(settings)}
    for key, value in settings.items():
        if key not in keys:
            raise InputError(f"the settings of tool {tool!r} mix {key!r} with {', '.join(keys)}")
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{key} of tool {tool!r} must be a mapping, not {brief(value)}")
        steps[keys[key]] = dict(value or {})
    return steps


def as_result(answer: Any, tool: str) -> ToolResult:
    """The result of what a tool returns. A triple may be text, reward and metrics."""
    if isinstance(answer, ToolResult):
        return answer
    reward = metrics = None
    if isinstance(answer, tuple) and 0 < len(answer) <= 3:
        first, number, more = (*answer, None, None)[:3]
        fits = len(answer) == 3 and (isinstance(first, str | Mapping) or is_list(first))
        fits = (
            fits and (number is None or hasattr(number, "__float__")) and isinstance(more, Mapping | None)
        )
        if fits or is_response(first):
            answer, reward, metrics = first, number, more
    media: list[str] = []
    if is_response(answer):
        answer, media = answer.text or "", media_of(answer)
    elif not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            answer = str(answer)
    return replace(text_result(answer, media, tool), reward=reward, metrics=metrics or {})


def text_result(text: str, media: Sequence[str], tool: str) -> ToolResult:
    """A text as a result, with an error for media, which cannot be shown."""
    if not media:
        return ToolResult(text)
    note = f"{tool} returned {' and '.join(media)}, which cannot be shown here"
    return ToolResult("\n".join(filter(None, [text, f"error: {note}"])), failed=True, note=note)


def is_response(answer: Any) -> bool:
    """True for an object like verl's ToolResponse."""
    return all(hasattr(answer, name) for name in ("text", "image", "video"))


def media_of(response: Any) -> list[str]:
    media = {name: getattr(response, name) for name in ("image", "video")}
    counts = {
        name: len(value) if is_list(value) else int(value is not None) for name, value in media.items()
    }
    return [f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count]


class Toolbox:
    """The tools of one rollout. The model sees a call's error as its result."""

    def __init__(self, rollout: Rollout, budget: Budget) -> None:
        self._rollout, self._budget = rollout, budget
        self._tools = {tool.name: tool for tool in rollout.tools}
        self._names, settings = ", ".join(self._tools) or "none", rollout.task.tool_settings
        if unknown := [name for name in settings if name not in self._tools]:
            raise InputError(
                f"there are settings for unknown tool {unknown[0]!r}; the tools are: {self._names}"
            )
        self._settings = {name: step_settings(name, settings.get(name) or {}) for name in self._tools}
        # verl's tools get this as agent_data, without images and token ids
        self._data = SimpleNamespace(request_id=rollout.instance, tools_kwargs=settings, extra_fields={})
        self._data.messages = rollout.messages
        self._ids: dict[str, str] = {}
        """By created tool: the trajectory's id, which `create` may choose."""

    async def create(self, stack: AsyncExitStack) -> None:
        """Create the tools; the stack releases them."""
        limit, notes = self._budget.tool_timeout, self._rollout.notes
        for name, tool in self._tools.items():
            answer = await within(self._step(tool, "create"), limit, f"{name}: create")
            id, response = (*answer, None)[:2] if isinstance(answer, tuple) and answer else (answer, answer)
            is_chosen = isinstance(tool, AdoptedTool) and isinstance(id, str)
            self._ids[name] = id if is_chosen else self._rollout.instance
            release = partial(self._step, tool, "release")
            stack.push_async_callback(noted, release, limit, f"{name}: release", notes)
            if is_response(response) and (response.text or media_of(response)):
                notes.append(f"{name}: the response from create is not in any prompt")

    async def _step(self, tool: BaseTool, step: str, *args: Any) -> Any:
        settings, method = self._settings[tool.name][step], getattr(tool, step)
        if isinstance(tool, AdoptedTool) and hasattr(tool.tool, step):
            method = getattr(tool.tool, step)
            if step == "execute" and takes(method, "agent_data"):
                settings = {"agent_data": self._data, **settings}
            if step == "create" and takes(method, "create_kwargs"):  # as in verl since 0.6
                named = {name: value for name, value in settings.items() if takes(method, name)}
                settings = {**named, "create_kwargs": dict(settings)}
        id = self._ids.get(tool.name, self._rollout.instance)
        return await called(method, id, *args, **settings)

    async def run(self, calls: Sequence[ParsedToolCall], turn: TurnMetrics) -> list[ToolResult]:
        """Run the calls of a turn at the same time, and count them. Raises InputError."""
        began = time.monotonic()
        notes = self._rollout.notes
        most = self._budget.parallel_calls or len(calls)
        # a call that cancels its own task has failed; if this task is cancelled, gather raises
        done = await asyncio.gather(*(self._run(call) for call in calls[:most]), return_exceptions=True)
        results = [one if isinstance(one, ToolResult) else failure(describe_error(one)) for one in done]
        if len(calls) > most:
            results += [failure(f"not run: a turn may have {most} calls") for _ in calls[most:]]
            notes.append(
                f"{len(calls) - most} of {len(calls)} calls of a turn did not run: the limit is {most}"
            )
        turn.tool_seconds, turn.tool_calls = time.monotonic() - began, len(results)
        turn.tool_errors = sum(result.failed for result in results)
        for call, result in zip(calls, results, strict=True):
            notes += filter(None, [result.note])
            turn.add("tool", str(call.name), result.reward, result.metrics)
        return results

    async def _run(self, call: ParsedToolCall) -> ToolResult:
        tool = self._tools.get(call.name or "")
        is_readable = call.status in (CallStatus.OK, CallStatus.UNKNOWN_TOOL)
        if not is_readable or call.arguments is None or not call.name:
            return failure(call.problem or f"the call is {call.status}")
        if tool is None:
            return failure(f"there is no tool {call.name!r}; there are: {self._names}")
        try:
            execution = self._step(tool, "execute", dict(call.arguments))
            return as_result(await within(execution, self._budget.tool_timeout, tool.name), tool.name)
        except Exception as error:
            return failure(describe_error(error))

    async def rewards(self) -> dict[str, Any]:
        rewards: dict[str, Any] = {}
        for name in self._ids:
            tool, who = self._tools[name], f"{name}: calc_reward"
            rewards[who] = await within(self._step(tool, "calc_reward"), self._budget.tool_timeout, who)
            if isinstance(tool, AdoptedTool) and isinstance(rewards[who], str | list | dict):
                # as some of verl's
                problem = f"{who} returned {kind_of(rewards.pop(who))} instead of a number: it is ignored"
                self._rollout.notes.append(problem)
        return rewards


def failure(problem: str, note: str = "") -> ToolResult:
    return ToolResult(f"error: {problem}", failed=True, note=note)


class Keep(StrEnum):
    """Which part of a long text to keep; ``middle`` cuts the middle out."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"


def cut_text(text: str, limit: int, tokenizer: Tokenizer, keep: Keep | str = Keep.MIDDLE) -> str:
    """Cut a text to about `limit` tokens, with a marker for the rest.

    >>> from tokentrace import load_tokenizer
    >>> from tokentrace.pocket import POCKET
    >>> cut_text("one two three four five six", 4, load_tokenizer(POCKET), "head").splitlines()[-1]
    '[… 12 more characters]'
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    keep = Keep(keep)
    most = limit * int(tokenizer.vocabulary.byte_lengths.max())
    if len(text) <= 2 * most and len(tokenizer.encode_plain(text)) <= limit:
        return text
    head = limit if keep is Keep.HEAD else 0 if keep is Keep.TAIL else limit - limit // 2
    front = _part(text[:most], head, tokenizer) if head else ""
    back = _part(text[-most:], limit - head, tokenizer, last=True) if limit - head else ""
    marker = f"[… {len(text) - len(front) - len(back):,} more characters]"
    return "\n".join(part for part in (front, marker, back) if part)


def _part(text: str, count: int, tokenizer: Tokenizer, *, last: bool = False) -> str:
    raw = text.encode("utf-8")
    lengths = np.abs(tokenizer.vocabulary.byte_lengths[tokenizer.encode_plain(text)])
    size = int((lengths[-count:] if last else lengths[:count]).sum())
    return (raw[len(raw) - size :] if last else raw[:size]).decode("utf-8", "ignore")
