"""The tools of one trajectory, from its first turn to its last.

Whatever a tool does wrong (it raises, it hangs, it returns something odd) becomes a result that the model sees.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError, kind_of
from ..parsing.response import CallStatus, ParsedToolCall
from ..settings import nearest
from .calling import TooLong, noted, within, words_of
from .checks import metrics, reward
from .tools import (
    AdoptedTool,
    AgentData,
    BaseTool,
    FunctionTool,
    ToolResult,
    as_result,
    is_response,
    step_settings,
    unshown_media,
)


@dataclass(slots=True)
class ToolUse:
    """How the tools of one trajectory were used."""

    calls: int = 0
    failed: int = 0
    seconds: float = 0.0
    reward: float = 0.0
    is_rewarded: bool = False
    """Whether a tool or the simulated user said what a call or an answer was worth, be it 0."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What people should know: a `release` that failed, calls that were not run."""

    def add_reward(self, worth: float | None) -> float:
        """Count what a call or an answer was worth, and say it as a number; None is nothing said."""
        self.is_rewarded = self.is_rewarded or worth is not None
        self.reward += worth or 0.0
        return worth or 0.0


class Toolbox:
    """The tools of one trajectory, from its first turn to its last: an async context manager."""

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
        for name in settings or {}:
            if name not in self._tools:
                raise InputError(
                    f"there are settings for a tool {name!r}, and there is none; {nearest(name, self._tools)}"
                )
            if isinstance(self._tools[name], FunctionTool) and (settings or {})[name]:
                raise InputError(f"there are settings for {name!r}, a plain function: a BaseTool can take them")
        given = {name: step_settings(name, one) for name, one in (settings or {}).items()}
        self._settings = {name: given.get(name) or step_settings(name, {}) for name in self._tools}
        self._instance = instance_id
        self._timeout = timeout
        self._parallel = parallel
        self._data = AgentData(instance_id, [] if messages is None else messages, settings or {})
        self._clock = clock
        self._created: list[BaseTool] = []
        self.use = ToolUse()

    async def __aenter__(self) -> Toolbox:
        try:
            for tool in self._tools.values():
                created = tool.create(self._instance, **self._settings[tool.name]["create"])
                made = await within(created, self._timeout, f"{tool.name}: create")
                self._created.append(tool)
                self._look_at(tool, made)
        except BaseException:
            await self._release()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._release()

    def _look_at(self, tool: BaseTool, made: Any) -> None:
        """What `create` returned: its text is for no prompt, as in verl, and that is noted."""
        response = made[1] if isinstance(made, tuple) and len(made) == 2 else made
        if is_response(response) and (response.text or unshown_media(response)):
            self.use.notes.append(f"{tool.name}: what create returned is shown in no prompt")

    async def _release(self) -> None:
        """Release all that were created, each once; one that fails does not keep the others."""
        created, self._created = self._created, []
        for tool in created:
            step = functools.partial(tool.release, self._instance, **self._settings[tool.name]["release"])
            await noted(step, self._timeout, f"{tool.name}: release", self.use.notes)

    async def run(self, calls: Sequence[ParsedToolCall]) -> list[ToolResult]:
        """Run the calls of a turn, all at once; results in the order of the calls."""
        began = self._clock()
        most = len(calls) if self._parallel is None else self._parallel
        # a call that cancels its own task is a failed one; if we are cancelled, gather raises that all the same
        done = await asyncio.gather(*(self._run(call) for call in calls[:most]), return_exceptions=True)
        results = [one if isinstance(one, ToolResult) else _failure(words_of(one)) for one in done]
        if len(calls) > most:
            said = "first call is run" if most == 1 else f"first {most} calls are run"
            results += [_failure(f"of the calls of a turn only the {said}; this one was not") for _ in calls[most:]]
            self.use.notes.append(
                f"{len(calls) - most} of {len(calls)} calls of a turn were not run: only {most} may be"
            )
        self.use.seconds += self._clock() - began
        self.use.calls += len(results)
        self.use.notes += [result.note for result in results if result.note]
        self.use.failed += sum(result.failed for result in results)
        results = [self._valued(call, result) for call, result in zip(calls, results, strict=True)]
        for result in results:
            self.use.add_reward(result.reward)
        return results

    def _valued(self, call: ParsedToolCall, result: ToolResult) -> ToolResult:
        """A result with its reward checked, its metrics counted; InputError for a reward that is none."""
        if result.metrics:
            measured, note = metrics(result.metrics, str(call.name))
            self.use.metrics.append({"tool": call.name, **measured})
            self.use.notes += [note] if note else []
        worth = reward(result.reward, f"{call.name}: the reward of a call")  # a bad one is nothing to show a model
        return dataclasses.replace(result, reward=worth)

    async def _run(self, call: ParsedToolCall) -> ToolResult:
        tool = self._tools.get(call.name or "")
        if call.status not in (CallStatus.OK, CallStatus.UNKNOWN_TOOL) or call.arguments is None or not call.name:
            return _failure(call.problem or f"the call is {call.status}")
        if tool is None:
            return _failure(f"there is no tool {call.name!r}; there are: {', '.join(self._tools) or 'none'}")
        try:
            given = self._settings[tool.name]["execute"]
            if isinstance(tool, AdoptedTool):
                given = {"agent_data": self._data, **given}
            done = tool.execute(self._instance, dict(call.arguments), **given)
            return as_result(await within(done, self._timeout, tool.name), tool.name)
        except TooLong as error:
            return _failure(str(error))
        except Exception as error:
            return _failure(words_of(error))

    async def rewards(self) -> float | None:
        """What the tools say the trajectory is worth, added up; None where none says anything."""
        total = None
        for tool in self._created:
            who = f"{tool.name}: calc_reward"
            found = tool.calc_reward(self._instance, **self._settings[tool.name]["calc_reward"])
            said: Any = await within(found, self._timeout, who)
            if isinstance(tool, AdoptedTool) and isinstance(said, str | list | dict):  # as some of verl's tools have it
                self.use.notes.append(f"{who} returned no number but {kind_of(said)}: it counts for nothing")
                continue
            value = reward(said, who)
            if value is not None:
                total = (total or 0.0) + value
        return total


def _failure(problem: str) -> ToolResult:
    return ToolResult(f"error: {problem}", failed=True)
