"""Tools: what a model can call, made once for every trajectory and released once.

A `BaseTool` is created for a trajectory before its first turn and released after its last. Plain functions are tools
too, and so is any object with a tool's methods, such as verl's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..conversation.functions import function_schema
from ..conversation.messages import check_tools
from ..conversation.place import is_list
from ..errors import InputError, shown
from .calling import called, takes

STEPS: Final = ("create", "execute", "calc_reward", "release")
"""The steps of a tool's life. A task has arguments for each as ``create_kwargs``, ``execute_kwargs`` and so on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. `content` is what the model is shown."""

    content: str
    reward: float | None = None
    """What the call is worth; None where nothing is said of that, which is not the same as 0."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    """The call was malformed, or the tool raised, took too long or returned what cannot be shown."""
    note: str = ""
    """What people should know: it is put among the rollout's notes."""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InputError(f"the content of a ToolResult must be text, not {shown(self.content)}")


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

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin a trajectory. `kwargs` are what its task has for this tool: a ground truth, a table."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call: a string, anything JSON can hold, a `ToolResult`, or a triple of text, reward and metrics."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole trajectory; None where this tool gives none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""

    async def close(self) -> None:
        """The run is over: let go of what served all trajectories. `tokentrace rollout` calls it once."""


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
        return await called(self._function, **parameters)


@dataclass(slots=True)
class AgentData:
    """What verl's tools are given as ``agent_data``: the trajectory as it stands, and a place for their own state.

    Of verl's own class it has what there is in any rollout of text; a tool that asks for more (images, token ids) gets
    an AttributeError, which becomes the result of its call.
    """

    request_id: str
    messages: list[Mapping[str, Any]]
    tools_kwargs: Mapping[str, Any]
    extra_fields: dict[str, Any] = field(default_factory=dict)
    """The tools' own: it lives as long as the trajectory, and is in no row."""


class AdoptedTool(BaseTool):
    """An object of another library as a tool: anything with a schema and `execute`, or `call` as verl's function tools
    have it. `create`, `calc_reward` and `release` are called where they are there.

    `create` may say by which id it knows the trajectory: alone, or first in a tuple. It is given its arguments by name,
    and all of them once more as ``create_kwargs`` where it takes that, which is how verl calls it since 0.6.
    """

    def __init__(self, tool: Any, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.tool = tool
        self._ids: dict[str, str] = {}
        config = getattr(tool, "config", None)
        super().__init__(config if isinstance(config, Mapping) else None, tool_schema)

    def get_openai_tool_schema(self) -> dict[str, Any]:
        schema: Any = getattr(self.tool, "tool_schema", None)
        if schema is None and hasattr(self.tool, "get_openai_tool_schema"):
            schema = self.tool.get_openai_tool_schema()
        if hasattr(schema, "model_dump"):
            schema = schema.model_dump(exclude_unset=True, exclude_none=True)
        if not isinstance(schema, Mapping):
            raise InputError(f"the tool_schema of {shown(self.tool)} must be a mapping or a pydantic model")
        return dict(schema)

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        create = getattr(self.tool, "create", None)
        if create is None:
            if kwargs:
                raise InputError(f"{self.name} has no create that could take {', '.join(kwargs)}")
            return None
        given = {name: value for name, value in kwargs.items() if takes(create, name)}
        if takes(create, "create_kwargs"):
            given["create_kwargs"] = dict(kwargs)
        elif unread := [name for name in kwargs if name not in given]:
            raise InputError(f"{self.name}: create takes no {unread[0]}")
        made = await called(create, instance_id, **given)
        own = made[0] if isinstance(made, tuple) and made else made
        if isinstance(own, str):
            self._ids[instance_id] = own
        return made

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if not hasattr(self.tool, "execute"):
            return await called(self.tool.call, parameters)
        if not takes(self.tool.execute, "agent_data"):
            kwargs.pop("agent_data", None)
        return await called(self.tool.execute, self._id(instance_id), parameters, **kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        return await self._step("calc_reward", instance_id, kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        try:
            await self._step("release", instance_id, kwargs)
        finally:
            self._ids.pop(instance_id, None)

    async def _step(self, step: str, instance_id: str, kwargs: Mapping[str, Any]) -> Any:
        method = getattr(self.tool, step, None)
        return None if method is None else await called(method, self._id(instance_id), **kwargs)

    def _id(self, instance_id: str) -> str:
        return self._ids.get(instance_id, instance_id)


def is_tool(thing: Any) -> bool:
    """Whether it has a schema and a method that runs a call, as tools of other libraries do."""
    has_schema = hasattr(thing, "tool_schema") or hasattr(thing, "get_openai_tool_schema")
    return has_schema and any(callable(getattr(thing, method, None)) for method in ("execute", "call"))


def as_tools(tools: Sequence[BaseTool | Callable[..., Any] | Any]) -> list[BaseTool]:
    """Tools, functions and objects with a tool's methods as tools; two of one name are an InputError, and so is what is
    none of these."""
    if not is_list(tools):
        raise InputError(f"tools must be a list of tools and functions, not {shown(tools)}")
    made = [_as_tool(tool) for tool in tools]
    names = [tool.name for tool in made]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"two tools are called {name!r}")
    return made


def _as_tool(tool: Any) -> BaseTool:
    if isinstance(tool, BaseTool):
        return tool
    if not isinstance(tool, type) and is_tool(tool):
        return AdoptedTool(tool)
    if isinstance(tool, type) or not callable(tool):
        raise InputError(
            f"{shown(tool)} is neither a function nor a BaseTool object, nor another with execute and a tool_schema"
        )
    return FunctionTool(tool)


def step_settings(tool: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """What each step of a tool's life is given, of a task's settings for it: mappings called ``create_kwargs``,
    ``execute_kwargs``, ``calc_reward_kwargs`` and ``release_kwargs``; else all is for `create`.

    >>> step_settings("look", {"release_kwargs": {"keep": True}})["release"]
    {'keep': True}
    """
    named = {f"{step}_kwargs": step for step in STEPS}
    found: dict[str, dict[str, Any]] = {step: {} for step in STEPS}
    if not any(key in named for key in settings):
        return {**found, "create": dict(settings)}
    for key, value in settings.items():
        if key not in named:
            raise InputError(f"the settings of tool {tool!r} have {key!r} beside {', '.join(named)}: put it into one")
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{key} of tool {tool!r} must be a mapping, not {shown(value)}")
        found[named[key]] = dict(value or {})
    return found


def as_result(answer: Any, tool: str) -> ToolResult:
    """What a tool returned, as a result. An answer with `text`, `image` and `video` is verl's ``ToolResponse``: images
    and videos cannot be shown, and the result says so."""
    if isinstance(answer, ToolResult):
        return answer
    given: Any = None
    metrics: Any = {}
    if isinstance(answer, tuple) and _is_rewarded(answer):
        answer, given, metrics = (*answer, None, {})[:3] if len(answer) < 2 else (*answer, {})[:3]
    if is_response(answer):
        unshown = unshown_media(answer)
        note = f"{tool} returned {unshown}, which cannot be shown here" if unshown else ""
        content = "\n".join(filter(None, [answer.text, note and f"error: {note}"]))
        return ToolResult(content, given, dict(metrics or {}), failed=bool(unshown), note=note)
    if not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            answer = str(answer)
    return ToolResult(answer, given, dict(metrics or {}))


def _is_rewarded(answer: tuple[Any, ...]) -> bool:
    """Whether it is text (or a mapping or list, as verl has it), reward and metrics; any other three values are a
    result. A shorter one is only if it begins with a ``ToolResponse``: two values may well be a result."""
    if len(answer) == 3 and (isinstance(answer[0], str | Mapping) or is_list(answer[0])):
        is_worth = answer[1] is None or (hasattr(answer[1], "__float__") and not isinstance(answer[1], str))
        return is_worth and isinstance(answer[2], Mapping | None)
    return len(answer) in (1, 2, 3) and is_response(answer[0])


def is_response(answer: Any) -> bool:
    """Whether it is like verl's ``ToolResponse``."""
    return all(hasattr(answer, name) for name in ("text", "image", "video"))


def unshown_media(response: Any) -> str:
    """The images and videos of a response, counted; empty where there are none."""
    counts = [
        (name, len(value) if is_list(value) else 1) for name in ("image", "video") if (value := _of(response, name))
    ]
    return " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts)


def _of(response: Any, name: str) -> Any:
    value = getattr(response, name)
    return None if value is None or (is_list(value) and not value) else value
