"""The tools of one trajectory, from its first turn to its last.

Whatever a tool does wrong (it raises, hangs, returns something odd) becomes a result that the model sees.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import InputError, kind_of
from ..parsing.response import CallStatus, ParsedToolCall
from .calling import TooLong, describe_error, noted, within
from .record import ToolUse, checked_metrics, checked_reward
from .tools import (
    AdoptedTool,
    AgentData,
    BaseTool,
    FunctionTool,
    ToolResult,
    as_result,
    is_response,
    media_count,
    step_settings,
)


class Toolbox:
    """The tools of one trajectory: an async context manager."""

    def __init__(
        self,
        tools: Sequence[BaseTool],
        instance_id: str,
        *,
        timeout: float | None = 60.0,
        settings: Mapping[str, Mapping[str, Any]] | None = None,
        parallel: int | None = None,
        messages: list[Mapping[str, Any]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tools = {tool.name: tool for tool in tools}
        settings = settings or {}
        for name, values in settings.items():
            if name not in self._tools:
                raise InputError(
                    f"there are settings for a tool {name!r}; there are {', '.join(self._tools) or 'none'}"
                )
            if isinstance(self._tools[name], FunctionTool) and values:
                raise InputError(f"there are settings for {name!r}, a plain function: only a BaseTool has settings")
        self._settings = {name: step_settings(name, settings.get(name) or {}) for name in self._tools}
        self._instance = instance_id
        self._timeout = timeout
        self._parallel = parallel
        self._data = AgentData(instance_id, [] if messages is None else messages, settings)
        self._clock = clock
        self._created: list[BaseTool] = []
        self.use = ToolUse()

    async def __aenter__(self) -> Toolbox:
        try:
            for tool in self._tools.values():
                creation = tool.create(self._instance, **self._settings[tool.name]["create"])
                answer = await within(creation, self._timeout, f"{tool.name}: create")
                self._created.append(tool)
                response = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else answer
                if is_response(response) and (response.text or media_count(response)):
                    self.use.notes.append(f"{tool.name}: no prompt contains what create returned")
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._release()

    async def _release(self) -> None:
        """Release each created tool once, even if one fails."""
        created, self._created = self._created, []
        for tool in created:
            step = functools.partial(tool.release, self._instance, **self._settings[tool.name]["release"])
            await noted(step, self._timeout, f"{tool.name}: release", self.use.notes)

    async def run(self, calls: Sequence[ParsedToolCall]) -> list[ToolResult]:
        """Run the calls of a turn at once; results are in the order of the calls."""
        began = self._clock()
        most = len(calls) if self._parallel is None else self._parallel
        # a call that cancels its own task failed; if this task is cancelled, gather raises that all the same
        done = await asyncio.gather(*(self._run(call) for call in calls[:most]), return_exceptions=True)
        results = [one if isinstance(one, ToolResult) else _failure(describe_error(one)) for one in done]
        if len(calls) > most:
            results += [_failure(f"not run: a turn may have {most} calls") for _ in calls[most:]]
            self.use.notes.append(
                f"{len(calls) - most} of {len(calls)} calls of a turn were not run: the limit is {most}"
            )
        self.use.seconds += self._clock() - began
        self.use.calls += len(results)
        self.use.notes += [result.note for result in results if result.note]
        self.use.failed += sum(result.failed for result in results)
        return [self._count(call, result) for call, result in zip(calls, results, strict=True)]

    def _count(self, call: ParsedToolCall, result: ToolResult) -> ToolResult:
        """Check a result's reward, and count its metrics. Raises InputError for an invalid reward."""
        if result.metrics:
            metrics, note = checked_metrics(result.metrics, str(call.name))
            self.use.metrics.append({"tool": call.name, **metrics})
            self.use.notes += [note] if note else []
        reward = checked_reward(result.reward, f"{call.name}: the reward of a call")  # nothing to show to a model
        self.use.add_reward(reward)
        return dataclasses.replace(result, reward=reward)

    async def _run(self, call: ParsedToolCall) -> ToolResult:
        tool = self._tools.get(call.name or "")
        if call.status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL) or call.arguments is None or not call.name:
            return _failure(call.problem or f"the call is {call.status}")
        if tool is None:
            return _failure(f"there is no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}")
        settings = self._settings[tool.name]["execute"]
        if isinstance(tool, AdoptedTool):
            settings = {"agent_data": self._data, **settings}
        try:
            execution = tool.execute(self._instance, dict(call.arguments), **settings)
            return as_result(await within(execution, self._timeout, tool.name), tool.name)
        except TooLong as error:
            return _failure(str(error))
        except Exception as error:
            return _failure(describe_error(error))

    async def rewards(self) -> float | None:
        """Return the sum of the tools' rewards for the trajectory; None if no tool returns one."""
        total = None
        for tool in self._created:
            who = f"{tool.name}: calc_reward"
            calculation = tool.calc_reward(self._instance, **self._settings[tool.name]["calc_reward"])
            answer: Any = await within(calculation, self._timeout, who)
            if isinstance(tool, AdoptedTool) and isinstance(answer, str | list | dict):  # as some of verl's tools do
                self.use.notes.append(f"{who} returned {kind_of(answer)} instead of a number: it is ignored")
                continue
            reward = checked_reward(answer, who)
            if reward is not None:
                total = (total or 0.0) + reward
        return total


def _failure(problem: str) -> ToolResult:
    return ToolResult(f"error: {problem}", failed=True)
