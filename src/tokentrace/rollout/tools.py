"""Tools: what a model can call, made once for every trajectory and released once.

A `BaseTool` is created for a trajectory before its first turn and released after its last. Plain functions are tools
too. Whatever a tool does wrong (it raises, it hangs, it returns something odd) becomes a result that the model sees.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
import functools
import inspect
import json
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ..conversation.functions import function_schema
from ..conversation.messages import check_tools
from ..errors import InputError, shown
from ..parsing.response import CallStatus, ParsedToolCall
from ..settings import nearest
from .checks import is_list, reward

Returned = TypeVar("Returned")


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `content` is what the model is shown."""

    content: str
    reward: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    """The call was malformed, or the tool raised or took too long."""


class BaseTool:
    """A tool with state: `create` once for each trajectory, then `execute`, at its end `calc_reward` and `release`.

    One object serves all trajectories; what belongs to one is kept by its `instance_id`. Override what is needed.
    `config` and `tool_schema` are those of the YAML file.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.tool_schema = dict(tool_schema) if tool_schema is not None else self.get_openai_tool_schema()
        check_tools([self.tool_schema])

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """The schema of a tool that is made without one."""
        raise InputError(f"{type(self).__name__} needs a tool_schema, or its own get_openai_tool_schema")

    @property
    def name(self) -> str:
        function = self.tool_schema.get("function", self.tool_schema)
        return str(function["name"])

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a trajectory. `kwargs` are what its task has for this tool: a ground truth, a table."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call: a string, anything JSON can hold, a `ToolResult`, or a triple of text, reward and metrics."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole trajectory; None where this tool gives none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""


class FunctionTool(BaseTool):
    """A plain function as a tool. Its schema is read off its signature and docstring.

    A plain function runs in a thread: one that hangs is given up, and goes on hanging there.

    >>> def add(a: int, b: int = 0) -> int:
    ...     '''Add two numbers.
    ...
    ...     Args:
    ...         a: The first one.
    ...     '''
    ...     return a + b
    >>> FunctionTool(add).tool_schema["function"]["parameters"]["properties"]["a"]
    {'type': 'integer', 'description': 'The first one.'}
    """

    def __init__(self, function: Callable[..., Any], *, name: str | None = None) -> None:
        self._function = function
        super().__init__(tool_schema=function_schema(function, name))

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**parameters)
        return await in_thread(functools.partial(self._function, **parameters))


async def in_thread(call: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own: one that hangs holds up neither other calls nor the end of the process,
    as it would in the few threads that the event loop shares."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[tuple[Any, Exception | None]] = loop.create_future()

    def deliver(answer: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result((answer, error))

    def work() -> None:
        answer, error = None, None
        try:
            answer = call()
        except Exception as raised:
            error = raised
        except BaseException as raised:  # SystemExit: a tool does not end the run
            error = RuntimeError(f"{type(raised).__name__}: {raised}")
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(deliver, answer, error)

    threading.Thread(target=contextvars.copy_context().run, args=(work,), name="tokentrace-tool", daemon=True).start()
    answer, error = await future
    if error is not None:
        raise error
    return answer


def as_tools(tools: Sequence[BaseTool | Callable[..., Any]]) -> list[BaseTool]:
    """Tools and functions as tools; two of one name are an InputError, and so is what is neither."""
    if not is_list(tools):
        raise InputError(f"tools must be a list of tools and functions, not {shown(tools)}")
    for tool in tools:
        if not isinstance(tool, BaseTool) and (isinstance(tool, type) or not callable(tool)):
            raise InputError(f"{shown(tool)} is neither a function nor a BaseTool object")
    made = [tool if isinstance(tool, BaseTool) else FunctionTool(tool) for tool in tools]
    names = [tool.name for tool in made]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two tools are called {name!r}")
    return made


class TooLong(Exception):  # noqa: N818
    """A tool, a simulated user or a reward took longer than it may."""


async def within(work: Awaitable[Returned], limit: float | None, who: str) -> Returned:
    """What some work returns, if it takes no more seconds than the limit; else `TooLong`."""
    try:
        async with asyncio.timeout(limit) as timeout:
            return await work
    except TimeoutError as error:
        if not timeout.expired():  # the work's own
            raise
        raise TooLong(f"{who} took longer than {limit:g} s") from error


@dataclass(slots=True)
class ToolUse:
    """How the tools of one trajectory were used."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    reward: float = 0.0
    metrics: list[dict[str, Any]] = field(default_factory=list)


class Toolbox:
    """The tools of one trajectory, from its first turn to its last: an async context manager."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        instance_id: str,
        *,
        timeout: float | None = 60.0,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        for name in settings or {}:
            if name not in self._tools:
                raise InputError(
                    f"there are settings for a tool {name!r}, and there is none; {nearest(name, self._tools)}"
                )
        self._instance = instance_id
        self._timeout = timeout
        self._settings = settings or {}
        self._clock = clock
        self._created: list[BaseTool] = []
        self.use = ToolUse()

    async def __aenter__(self) -> Toolbox:
        try:
            for tool in self._tools.values():
                created = tool.create(self._instance, **self._settings.get(tool.name, {}))
                await within(created, self._timeout, f"{tool.name}: create")
                self._created.append(tool)
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._release()

    async def _release(self) -> None:
        """Release all that were created, each once; one that fails does not keep the others."""
        created, self._created = self._created, []
        for tool in created:
            try:
                await within(tool.release(self._instance), self._timeout, f"{tool.name}: release")
            except Exception as error:
                self.use.metrics.append({"tool": tool.name, "release": _said(error)})

    async def run(self, calls: Sequence[ParsedToolCall]) -> list[ToolResult]:
        """Run the calls of a turn, all at once; results in the order of the calls."""
        began = self._clock()
        results = await asyncio.gather(*(self._run(call) for call in calls))
        self.use.seconds += self._clock() - began
        self.use.calls += len(results)
        self.use.failed += sum(result.failed for result in results)
        self.use.reward += sum(result.reward for result in results)
        self.use.metrics += [
            {"tool": call.name, **result.metrics} for call, result in zip(calls, results, strict=True) if result.metrics
        ]
        return list(results)

    async def _run(self, call: ParsedToolCall) -> ToolResult:
        tool = self._tools.get(call.name or "")
        if call.status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL) or call.arguments is None or not call.name:
            return _failure(call.problem or f"the call is {call.status}")
        if tool is None:
            return _failure(f"there is no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}")
        try:
            done = tool.execute(self._instance, dict(call.arguments))
            result = _as_result(await within(done, self._timeout, tool.name))
        except TooLong as error:
            return _failure(str(error))
        except Exception as error:
            return _failure(_said(error))
        worth = reward(result.reward, f"{tool.name}: the reward of a call")  # a bad one is nothing to show a model
        return dataclasses.replace(result, reward=worth or 0.0)

    async def rewards(self) -> float | None:
        """What the tools say the trajectory is worth, added up; None where none says anything."""
        total = None
        for tool in self._created:
            who = f"{tool.name}: calc_reward"
            value = reward(await within(tool.calc_reward(self._instance), self._timeout, who), who)
            if value is not None:
                total = (total or 0.0) + value
        return total


def _as_result(answer: Any) -> ToolResult:
    if isinstance(answer, ToolResult):
        return answer
    given: Any = 0.0
    metrics: Any = {}
    if isinstance(answer, tuple) and len(answer) == 3 and isinstance(answer[2], Mapping | None):
        answer, given, metrics = answer
    if not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            answer = str(answer)
    return ToolResult(answer, given, dict(metrics or {}))


def _failure(problem: str) -> ToolResult:
    return ToolResult(f"error: {problem}", failed=True)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
