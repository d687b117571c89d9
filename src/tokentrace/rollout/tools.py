"""Tools: what a model can call. Functions are tools, and so is any object with a tool's methods, such as verl's."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import numpy as np

from ..conversation.functions import function_schema
from ..conversation.messages import check_tools
from ..conversation.place import is_list
from ..errors import InputError, brief
from ..tokens.tokenizer import Tokenizer
from ..tokens.vocabulary import Vocabulary
from .calling import called, takes

STEPS: Final = ("create", "execute", "calc_reward", "release")
"""A task has arguments for each as ``create_kwargs``, ``execute_kwargs`` and so on."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a call. The model sees `content`."""

    content: str
    reward: float | None = None
    """None if the call has no reward, which is not the same as 0."""
    metrics: Mapping[str, Any] = field(default_factory=dict)
    failed: bool = False
    """True if the call was malformed, or the tool raised, took too long or returned no text."""
    note: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.content, str):
            raise InputError(f"the content of a ToolResult must be text, not {brief(self.content)}")


class BaseTool:
    """A tool with state: `create` once for each trajectory, then `execute`, at its end `calc_reward` and `release`.

    One object serves all trajectories, which `instance_id` tells apart.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})
        self.tool_schema = dict(tool_schema) if tool_schema is not None else self.get_openai_tool_schema()
        check_tools([self.tool_schema])

    def get_openai_tool_schema(self) -> dict[str, Any]:
        """Return the schema of a tool that is made without one."""
        raise InputError(f"{type(self).__name__} needs a tool_schema, or its own get_openai_tool_schema")

    @property
    def name(self) -> str:
        function = self.tool_schema.get("function", self.tool_schema)
        return str(function["name"])

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        """Begin a trajectory. `kwargs` are its task's settings for this tool: a ground truth, a table."""

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run a call: a string, anything JSON can hold, a `ToolResult`, or a triple of text, reward and metrics."""
        raise NotImplementedError

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """Return the reward of the whole trajectory, or None."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""

    async def close(self) -> None:
        """Release what served all trajectories. `tokentrace rollout` calls it once, at the end."""


class FunctionTool(BaseTool):
    """A plain function as a tool, which runs in a thread. Its schema is read off its signature and docstring.

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
        return await called(self._function, **parameters)


@dataclass(slots=True)
class AgentData:
    """What verl's tools get as ``agent_data``. It has no images and no token ids."""

    request_id: str
    messages: list[Mapping[str, Any]]
    tools_kwargs: Mapping[str, Any]
    extra_fields: dict[str, Any] = field(default_factory=dict)


class AdoptedTool(BaseTool):
    """An object of another library as a tool: anything with a schema and `execute` or `call`, such as verl's.

    `create` may return its own id for the trajectory. It gets its arguments by name, and as ``create_kwargs`` if it has
    that parameter, as in verl since 0.6.
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
            raise InputError(f"the tool_schema of {brief(self.tool)} must be a mapping or a pydantic model")
        return dict(schema)

    async def create(self, instance_id: str, **kwargs: Any) -> Any:
        create = getattr(self.tool, "create", None)
        if create is None:
            if kwargs:
                raise InputError(f"{self.name} has no create for {', '.join(kwargs)}")
            return None
        arguments = {name: value for name, value in kwargs.items() if takes(create, name)}
        if takes(create, "create_kwargs"):
            arguments["create_kwargs"] = dict(kwargs)
        elif unread := [name for name in kwargs if name not in arguments]:
            raise InputError(f"{self.name}: create has no parameter {unread[0]}")
        answer = await called(create, instance_id, **arguments)
        id = answer[0] if isinstance(answer, tuple) and answer else answer
        if isinstance(id, str):
            self._ids[instance_id] = id
        return answer

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if not hasattr(self.tool, "execute"):
            return await called(self.tool.call, parameters)
        if not takes(self.tool.execute, "agent_data"):
            kwargs.pop("agent_data", None)
        return await called(self.tool.execute, self._id(instance_id), parameters, **kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> Any:
        method = getattr(self.tool, "calc_reward", None)
        return None if method is None else await called(method, self._id(instance_id), **kwargs)

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        id = self._ids.pop(instance_id, instance_id)
        if hasattr(self.tool, "release"):
            await called(self.tool.release, id, **kwargs)

    def _id(self, instance_id: str) -> str:
        return self._ids.get(instance_id, instance_id)


def as_tools(tools: Sequence[BaseTool | Callable[..., Any] | Any]) -> list[BaseTool]:
    """Return tools, functions and objects with a tool's methods as tools. Raises InputError."""
    if not is_list(tools):
        raise InputError(f"tools must be a list of tools and functions, not {brief(tools)}")
    by_name: dict[str, BaseTool] = {}
    for tool in tools:
        has_schema = hasattr(tool, "tool_schema") or hasattr(tool, "get_openai_tool_schema")
        runs = any(callable(getattr(tool, method, None)) for method in ("execute", "call"))
        if not isinstance(tool, BaseTool):
            if isinstance(tool, type) or not (callable(tool) or (has_schema and runs)):
                raise InputError(
                    f"{brief(tool)} is neither a function nor a BaseTool object, nor another with execute and a "
                    "tool_schema"
                )
            tool = AdoptedTool(tool) if has_schema and runs else FunctionTool(tool)
        if tool.name in by_name:
            raise InputError(f"two tools are called {tool.name!r}")
        by_name[tool.name] = tool
    return list(by_name.values())


def step_settings(tool: str, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Split a task's settings for a tool by step: ``create_kwargs`` and so on; otherwise all are for `create`.

    >>> step_settings("look", {"release_kwargs": {"keep": True}})["release"]
    {'keep': True}
    """
    keys = {f"{step}_kwargs": step for step in STEPS}
    steps: dict[str, dict[str, Any]] = {step: {} for step in STEPS}
    if not any(key in keys for key in settings):
        return {**steps, "create": dict(settings)}
    for key, value in settings.items():
        if key not in keys:
            raise InputError(f"the settings of tool {tool!r} have {key!r} beside {', '.join(keys)}: move it into one")
        if value is not None and not isinstance(value, Mapping):
            raise InputError(f"{key} of tool {tool!r} must be a mapping, not {brief(value)}")
        steps[keys[key]] = dict(value or {})
    return steps


def as_result(answer: Any, tool: str) -> ToolResult:
    """Return a tool's answer as a result. Any other value becomes JSON.

    Three values are text, reward and metrics if their types fit; a tuple that begins with verl's ``ToolResponse``
    may be shorter. Images and videos cannot be shown, and the result says so.
    """
    if isinstance(answer, ToolResult):
        return answer
    reward: Any = None
    metrics: Any = {}
    if isinstance(answer, tuple) and 0 < len(answer) <= 3:
        first, number, *more = (*answer, None, None)[:3]
        fits = isinstance(first, str | Mapping) or is_list(first)
        fits = fits and len(answer) == 3 and isinstance(more[0], Mapping | None)
        fits = fits and (number is None or (hasattr(number, "__float__") and not isinstance(number, str)))
        if fits or is_response(first):
            answer, reward, metrics = first, number, more[0]
    note = ""
    if is_response(answer):
        media = media_count(answer)
        note = f"{tool} returned {media}, which cannot be shown here" if media else ""
        answer = "\n".join(filter(None, [answer.text, note and f"error: {note}"]))
    elif not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            answer = str(answer)
    return ToolResult(answer, reward, dict(metrics or {}), failed=bool(note), note=note)


def is_response(answer: Any) -> bool:
    """True for an object like verl's ``ToolResponse``."""
    return all(hasattr(answer, name) for name in ("text", "image", "video"))


def media_count(response: Any) -> str:
    """Count the images and videos of a response, as text; empty if there are none."""
    media = {name: getattr(response, name) for name in ("image", "video")}
    counts = {name: len(value) if is_list(value) else int(value is not None) for name, value in media.items()}
    return " and ".join(f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count)


# -- results that are too long


class Keep(StrEnum):
    """Which part of a long text stays."""

    HEAD = "head"
    TAIL = "tail"
    MIDDLE = "middle"
    """The beginning and the end."""


def cut_text(text: str, limit: int, tokenizer: Tokenizer, keep: Keep | str = Keep.MIDDLE) -> str:
    """Return a text, cut to about `limit` tokens, with a marker. Encodes only what is near the part that stays.

    >>> from tokentrace import load_tokenizer
    >>> from tokentrace.pocket import POCKET
    >>> cut_text("one two three four five six", 4, load_tokenizer(POCKET), "head").splitlines()[-1]
    '[… 12 more characters]'
    """
    text = text.encode("utf-8", "replace").decode("utf-8") if not text.isascii() else text
    keep = Keep(keep)
    most = limit * _longest_token(tokenizer.vocabulary)
    if len(text) <= 2 * most and len(tokenizer.encode_plain(text)) <= limit:
        return text
    head = limit if keep is Keep.HEAD else 0 if keep is Keep.TAIL else limit - limit // 2
    front = _part(text[:most], head, tokenizer) if head else ""
    back = _part(text[-most:], limit - head, tokenizer, last=True) if limit - head else ""
    marker = f"[… {len(text) - len(front) - len(back):,} more characters]"
    return "\n".join(part for part in (front, marker, back) if part)


@functools.lru_cache(8)
def _longest_token(vocabulary: Vocabulary) -> int:
    return int(vocabulary.byte_lengths.max())


def _part(text: str, count: int, tokenizer: Tokenizer, *, last: bool = False) -> str:
    raw = text.encode("utf-8")
    lengths = np.abs(tokenizer.vocabulary.byte_lengths[tokenizer.encode_plain(text)])
    size = int((lengths[-count:] if last else lengths[:count]).sum())
    return (raw[len(raw) - size :] if last else raw[:size]).decode("utf-8", "ignore")
