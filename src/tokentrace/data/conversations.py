"""A row of a dataset as a conversation."""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..conversation.shapes import Shape, openai_messages, openai_tools, shape_of, with_system
from ..errors import InputError, brief, kind_of
from ..rendering.factory import create_renderer
from ..rendering.renderer import OF_RENDER
from ..values.place import Place
from ..values.plain import parse_json

MESSAGES = ("messages", "conversations", "conversation")
COMPLETIONS = ("completion", "response")
TOOLS = ("tools", "functions")
VARIABLES = "chat_template_kwargs"
_RESERVED = OF_RENDER.union(inspect.signature(create_renderer).parameters)


@dataclass(frozen=True, slots=True)
class Columns:
    """A row's columns. None means the first usual name that it has."""

    messages: str | None = None
    tools: str | None = None
    system: str | None = None
    prompt: str | None = None
    completion: str | None = None


USUAL_NAMES = Columns()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in OpenAI's shape, and template variables."""

    messages: list[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    completion_from: int | None = None
    """The first message that may carry loss."""
    variables: Mapping[str, Any] = field(default_factory=dict)


def conversation_of(row: Any, columns: Columns = USUAL_NAMES) -> Conversation:
    """The conversation of a row: a list of messages, or the columns that docs/rows.md lists.

    A column with a usual name is absent if it is None; one that `columns` names must exist.
    Raises InputError naming the column, or the message (counted from the first of the prompt)
    and its field.
    """
    if isinstance(row, list):
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise InputError(f"a row must be a mapping of columns or a list of messages, not {kind_of(row)}")
    names = _message_columns(row, columns)
    is_pair = len(names) == 2  # of strings, which are plain text, never JSON, or messages
    values = [
        row[name] if is_pair and isinstance(row[name], str) else _messages(row, name) for name in names
    ]
    shape = shape_of([message for value in values if isinstance(value, list) for message in value])
    role, content = ("from", "value") if shape is Shape.SHAREGPT else ("role", "content")
    parts = [
        value if isinstance(value, list) else [{role: speaker, content: value}]
        for speaker, value in zip(("user", "assistant"), values, strict=False)
    ]
    messages = openai_messages([message for part in parts for message in part], shape)
    everything = with_system(messages, _value(row, columns.system, ("system",))[1])
    start = None
    if is_pair:
        prompt, completion = (len(openai_messages(part, shape)) for part in parts)
        if prompt + completion != len(messages):
            raise InputError("begins inside the last message of the prompt", field=names[1])
        start = prompt + len(everything) - len(messages)
    name, tools = _value(row, columns.tools, TOOLS)
    tools = openai_tools(tools, wrap=name == "functions" or shape is Shape.SHAREGPT)
    return Conversation(everything, tools, start, _variables(row))


def _message_columns(row: Mapping[str, Any], columns: Columns) -> tuple[str, ...]:
    pair = columns.prompt is not None or columns.completion is not None
    if columns.messages is not None and pair:
        raise InputError("name the column of messages, or those of prompt and completion, not both")
    if not pair and (messages := _value(row, columns.messages, MESSAGES)[0]) is not None:
        return (messages,)
    prompt = _value(row, columns.prompt, ("prompt",))[0]
    completion = _value(row, columns.completion, COMPLETIONS)[0]
    if prompt is not None and completion is not None:
        return prompt, completion
    expected = f"{', '.join(MESSAGES)}, or prompt and {' or '.join(COMPLETIONS)}"
    raise InputError(f"the row has no conversation: it is {brief(row)}; expected: {expected}")


def _value(row: Mapping[str, Any], name: str | None, usual: tuple[str, ...]) -> tuple[str | None, Any]:
    """The column, or the first usual one that is not None, and its value."""
    if name is None:
        return next(((one, row[one]) for one in usual if row.get(one) is not None), (None, None))
    if name not in row:
        raise InputError(f"the row has no such column: it is {brief(row)}", field=name)
    return name, row[name]


def _messages(row: Mapping[str, Any], column: str) -> list[Any]:
    value = row[column]
    if isinstance(value, str):
        value = parse_json(value, Place(field=column))
    if not isinstance(value, (list, tuple)):
        raise InputError(f"must be a list of messages, not {kind_of(value)}", field=column)
    if not value:
        raise InputError("has no messages", field=column)
    return list(value)


def _variables(row: Mapping[str, Any]) -> Mapping[str, Any]:
    value = row.get(VARIABLES)
    if isinstance(value, str):
        value = parse_json(value, Place(field=VARIABLES)) if value.strip() else None
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise InputError(f"must be a mapping of template variables, not {kind_of(value)}", field=VARIABLES)
    if reserved := [name for name in value if not isinstance(name, str) or name in _RESERVED]:
        raise InputError(f"{str(reserved[0])[:80]!r} is not a variable that a row can set", field=VARIABLES)
    return value


NULLS_REMOVED = (
    "nulls in tool-call arguments or tool schemas were left out: a table cannot tell them from missing keys; "
    "JSON text keeps them"
)
_MEANINGFUL = frozenset({"arguments", "input", "parameters", "input_schema"})
"""Keys of values with meaningful nulls."""


def table_row(row: Any) -> tuple[Any, tuple[str, ...]]:
    """A row without nulls that a table may have filled in, and a note if they may mean something."""
    if not isinstance(row, Mapping):
        return row, ()
    stripped, lost = dict(row), list[Any]()
    try:
        for name, value in row.items():
            if _may_be_struct(value):
                stripped[name] = without_nulls(value, lost, name in TOOLS)
    except RecursionError as error:
        raise InputError("the row is nested too deeply") from error
    return stripped, (NULLS_REMOVED,) if lost else ()


def without_nulls(value: Any, lost: list[Any] | None = None, is_meaningful: bool = False) -> Any:
    """A value without keys of nulls, at any depth. Adds keys of meaningful ones to `lost`."""
    if isinstance(value, (list, tuple)):
        return [without_nulls(inner, lost, is_meaningful) for inner in value]
    if not isinstance(value, Mapping):
        return value
    if is_meaningful and lost is not None:
        lost += [key for key, inner in value.items() if inner is None]
    return {
        key: without_nulls(inner, lost, is_meaningful or key in _MEANINGFUL)
        for key, inner in value.items()
        if inner is not None
    }


def _may_be_struct(value: Any) -> bool:
    """Return False if items of a list differ in their keys, which a table does not allow."""
    if isinstance(value, Mapping):
        return all(map(_may_be_struct, value.values()))
    if not isinstance(value, (list, tuple)):
        return True
    keys = {frozenset(item) if isinstance(item, Mapping) else None for item in value if item is not None}
    return len(keys) < 2 and all(map(_may_be_struct, value))


def plain_values(value: Any) -> Any:
    """A value with Python values for NumPy's, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_values(inner) for key, inner in value.items()}
    return list(map(plain_values, value)) if isinstance(value, (list, tuple)) else value
