"""The tools of one trajectory. Whatever a tool does wrong becomes a result that the model sees."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

from ..errors import InputError, kind_of
from ..parsing.response import CallStatus, ParsedToolCall
from . import tools as kinds
from .calling import TooLong, describe_error, noted, within
from .record import Budget, Rollout, TurnMetrics, checked_reward
from .tools import BaseTool, ToolResult


class Toolbox:
    """The tools of one rollout, with its task's settings: an async context manager."""

    def __init__(self, rollout: Rollout, budget: Budget) -> None:
        self._tools = {tool.name: tool for tool in rollout.tools}
        settings = rollout.task.tool_settings
        for name, values in settings.items():
            if name not in self._tools:
                there = ", ".join(self._tools) or "none"
                raise InputError(f"there are settings for a tool {name!r}; there are {there}")
            if isinstance(self._tools[name], kinds.FunctionTool) and values:
                raise InputError(f"there are settings for {name!r}, a plain function: only a BaseTool has settings")
        self._settings = {name: kinds.step_settings(name, settings.get(name) or {}) for name in self._tools}
        self._instance, self._notes = rollout.instance, rollout.notes
        self._timeout, self._parallel = budget.tool_timeout, budget.parallel_calls
        self._data = kinds.AgentData(rollout.instance, rollout.messages, settings)
        self._created: list[BaseTool] = []

    async def __aenter__(self) -> Toolbox:
        try:
            for tool in self._tools.values():
                creation = tool.create(self._instance, **self._settings[tool.name]["create"])
                answer = await within(creation, self._timeout, f"{tool.name}: create")
                self._created.append(tool)
                response = answer[1] if isinstance(answer, tuple) and len(answer) == 2 else answer
                if kinds.is_response(response) and (response.text or kinds.media_count(response)):
                    self._notes.append(f"{tool.name}: no prompt contains what create returned")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        created, self._created = self._created, []
        for tool in created:
            step = functools.partial(tool.release, self._instance, **self._settings[tool.name]["release"])
            await noted(step, self._timeout, f"{tool.name}: release", self._notes)

    async def run(self, calls: Sequence[ParsedToolCall], turn: TurnMetrics) -> list[ToolResult]:
        """Run the calls of a turn at once, and count them. Raises InputError for an invalid reward."""
        began = time.monotonic()
        most = len(calls) if self._parallel is None else self._parallel
        # a call that cancels its own task failed; if this task is cancelled, gather raises that all the same
        done = await asyncio.gather(*(self._run(call) for call in calls[:most]), return_exceptions=True)
        results = [one if isinstance(one, ToolResult) else _failure(describe_error(one)) for one in done]
        if len(calls) > most:
            results += [_failure(f"not run: a turn may have {most} calls") for _ in calls[most:]]
            self._notes.append(f"{len(calls) - most} of {len(calls)} calls of a turn were not run: the limit is {most}")
        turn.tool_seconds = time.monotonic() - began
        turn.tool_calls = len(results)
        turn.tool_errors = sum(result.failed for result in results)
        self._notes += [result.note for result in results if result.note]
        for at, (call, result) in enumerate(zip(calls, results, strict=True)):
            self._notes += turn.add_metrics("tool", str(call.name), result.metrics)
            reward = checked_reward(result.reward, f"{call.name}: the reward of a call")  # nothing to show to a model
            turn.add_reward(reward)
            results[at] = dataclasses.replace(result, reward=reward)
        return results

    async def _run(self, call: ParsedToolCall) -> ToolResult:
        tool = self._tools.get(call.name or "")
        if call.status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL) or call.arguments is None or not call.name:
            return _failure(call.problem or f"the call is {call.status}")
        if tool is None:
            return _failure(f"there is no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}")
        settings = self._settings[tool.name]["execute"]
        if isinstance(tool, kinds.AdoptedTool):
            settings = {"agent_data": self._data, **settings}
        try:
            execution = tool.execute(self._instance, dict(call.arguments), **settings)
            return kinds.as_result(await within(execution, self._timeout, tool.name), tool.name)
        except Exception as error:
            return _failure(str(error) if isinstance(error, TooLong) else describe_error(error))

    async def rewards(self) -> float | None:
        """Return the sum of the tools' rewards for the trajectory; None if no tool returns one."""
        rewards: list[float | None] = []
        for tool in self._created:
            who = f"{tool.name}: calc_reward"
            calculation = tool.calc_reward(self._instance, **self._settings[tool.name]["calc_reward"])
            answer: Any = await within(calculation, self._timeout, who)
            if isinstance(tool, kinds.AdoptedTool) and isinstance(answer, str | list | dict):  # as in some of verl's
                self._notes.append(f"{who} returned {kind_of(answer)} instead of a number: it is ignored")
                continue
            rewards.append(checked_reward(answer, who))
        present = [reward for reward in rewards if reward is not None]
        return sum(present) if present else None


def _failure(problem: str) -> ToolResult:
    return ToolResult(f"error: {problem}", failed=True)
