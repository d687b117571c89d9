"""A row of a dataset as a conversation."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from ..conversation.place import Place
from ..conversation.shapes import Shape, openai_messages, openai_tools, shape_of, with_system
from ..conversation.values import parse_json
from ..errors import InputError, kind_of

MESSAGES: Final = ("messages", "conversations", "conversation")
COMPLETIONS: Final = ("completion", "response")
TOOLS: Final = ("tools", "functions")
VARIABLES: Final = "chat_template_kwargs"

_RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that a row cannot set."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The names of a row's columns. None means the first usual name that the row has."""

    messages: str | None = None
    tools: str | None = None
    system: str | None = None
    prompt: str | None = None
    completion: str | None = None


USUAL_NAMES: Final = Columns()


@dataclass(frozen=True, slots=True)
class Conversation:
    """A conversation in OpenAI's shape, and the row's template variables.

    Nothing before the message `completion_from` is trained.
    """

    messages: list[Mapping[str, Any]]
    tools: list[dict[str, Any]] | None
    completion_from: int | None = None
    variables: Mapping[str, Any] = field(default_factory=dict)


def conversation_of(row: Any, columns: Columns = USUAL_NAMES) -> Conversation:
    """Return the conversation of a row. docs/rows.md lists its columns; a row may also be a list of messages.

    Messages in OpenAI's shape stay as they are. Bare schemas in ``functions``, or next to ShareGPT's turns, become
    tools. A column with a usual name counts as absent if it is None; a column that `columns` names must exist. Raises
    InputError naming the column, or the message and its field; messages count from the first one of the prompt.
    """
    if isinstance(row, list):
        if columns != USUAL_NAMES:
            raise InputError("columns are named, but the row is a list of messages")
        row = {"messages": row}
    if not isinstance(row, Mapping):
        raise InputError(f"a row must be a mapping of columns or a list of messages, not {kind_of(row)}")
    first, second = _message_columns(row, columns)
    # a prompt or completion that is a string is plain text, never JSON
    values = [
        row[name] if second and isinstance(row[name], str) else _messages(row, name) for name in (first, second) if name
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
    if second is not None:
        prompt, completion = (len(openai_messages(part, shape)) for part in parts)
        if prompt + completion != len(messages):
            raise InputError("begins inside the last message of the prompt", field=second)
        start = prompt + len(everything) - len(messages)
    name, tools = _value(row, columns.tools, TOOLS)
    tools = openai_tools(tools, wrap=name == "functions" or shape is Shape.SHAREGPT)
    return Conversation(everything, tools, start, _variables(row))


def _message_columns(row: Mapping[str, Any], columns: Columns) -> tuple[str, str | None]:
    pair = columns.prompt is not None or columns.completion is not None
    if columns.messages is not None and pair:
        raise InputError("name the column of messages, or those of prompt and completion, not both")
    messages, _ = (None, None) if pair else _value(row, columns.messages, MESSAGES)
    if messages is not None:
        return messages, None
    prompt, _ = _value(row, columns.prompt, ("prompt",))
    completion, _ = _value(row, columns.completion, COMPLETIONS)
    if prompt is not None and completion is not None:
        return prompt, completion
    expected = f"{', '.join(MESSAGES)}, or prompt and {' or '.join(COMPLETIONS)}"
    raise InputError(f"the row has no conversation, only {_names(row)}; expected: {expected}")


def _value(row: Mapping[str, Any], name: str | None, usual: tuple[str, ...]) -> tuple[str | None, Any]:
    """Return the named column, or the first usual one that is not None, and its value."""
    if name is None:
        return next(((one, row[one]) for one in usual if row.get(one) is not None), (None, None))
    if name not in row:
        raise InputError(f"the row has no such column; it has {_names(row)}", field=name)
    return name, row[name]


def _names(row: Mapping[str, Any]) -> str:
    names = [str(name)[:80] for name in row]
    return (", ".join(names[:8]) or "no columns") + (f" and {len(names) - 8} more" if len(names) > 8 else "")


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


# -- rows of tables

NULLS_REMOVED: Final = (
    "null values in tool-call arguments or tool schemas were left out: a table cannot distinguish them from missing "
    "keys; arguments and tools as JSON text keep them"
)
_MEANINGFUL: Final = frozenset({"arguments", "input", "parameters", "input_schema"})
"""Keys whose values may contain meaningful nulls."""


def table_row(row: Any) -> tuple[Any, tuple[str, ...]]:
    """Return a row without nulls that a table may have filled in, and a note if arguments or schemas had some.

    An Arrow table has one set of keys for all rows, and fills in None where a row lacks a key. If the items of a list
    differ in their keys, the column does not come from a table and stays as it is.
    """
    if not isinstance(row, Mapping):
        return row, ()
    try:
        filled = {name for name, value in row.items() if _may_be_struct(value)}
        lost = any(_has_null(row[name], name in TOOLS) for name in filled)
    except RecursionError as error:
        raise InputError("the row is nested too deeply") from error
    stripped = {name: without_nulls(value) if name in filled else value for name, value in row.items()}
    return stripped, (NULLS_REMOVED,) if lost else ()


def without_nulls(value: Any) -> Any:
    """Return `value` without keys whose value is None, at any depth."""
    try:
        if isinstance(value, Mapping):
            return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
        return list(map(without_nulls, value)) if isinstance(value, (list, tuple)) else value
    except RecursionError as error:
        raise InputError("the row is nested too deeply") from error


def _may_be_struct(value: Any) -> bool:
    """False if items of a list differ in their keys: then it is no Arrow list."""
    if isinstance(value, Mapping):
        return all(map(_may_be_struct, value.values()))
    if not isinstance(value, (list, tuple)):
        return True
    keys = {frozenset(item) if isinstance(item, Mapping) else None for item in value if item is not None}
    return len(keys) < 2 and all(map(_may_be_struct, value))


def _has_null(value: Any, is_meaningful: bool) -> bool:
    """True if a mapping in arguments or a schema has a value that is None."""
    if isinstance(value, Mapping):
        return any(
            is_meaningful if inner is None else _has_null(inner, is_meaningful or key in _MEANINGFUL)
            for key, inner in value.items()
        )
    return isinstance(value, (list, tuple)) and any(_has_null(inner, is_meaningful) for inner in value)


def plain_values(value: Any) -> Any:
    """Return `value` with NumPy values converted to Python's, at any depth."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain_values(inner) for key, inner in value.items()}
    return [plain_values(inner) for inner in value] if isinstance(value, (list, tuple)) else value
