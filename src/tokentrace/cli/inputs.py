"""What the command line reads: conversations, tools, templates and their variables. Errors name the file and place."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..errors import InputError
from .output import note, working

if TYPE_CHECKING:
    from ..rendering.renderer import Renderer

RESERVED: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that have options of their own."""

_PYTHON: Final = {"True": True, "False": False, "None": None}


def chosen_tokenizer(tokenizer: str | None) -> str:
    """What ``--tokenizer`` names; without it the embedded model, with a note."""
    if tokenizer is None:
        note("no --tokenizer given: using the embedded pocket model")
    return "pocket" if tokenizer is None else tokenizer


def make_renderer(template: Mapping[str, Any], **settings: Any) -> Renderer:
    """The renderer that `options.template_options` describe, with further settings."""
    from ..rendering.factory import create_renderer

    name = chosen_tokenizer(template["tokenizer"])
    variables = parse_kwargs(template["kwargs"])
    with working(f"loading {name}"):
        return create_renderer(
            name, template["renderer"], chat_template=template["chat_template"], **settings, **variables
        )


def conversation_title(source: str | None) -> str:
    """What to call a conversation that was read from here."""
    return "example" if source is None else "stdin" if source == "-" else Path(source).name


def read_conversation(source: str, index: int | None = None) -> tuple[Any, Any]:
    """Messages and tools (None: none given) from a file, or from stdin for ``-``.

    The file holds a list of messages or an object with ``messages`` and perhaps ``tools``; with `index`, or
    named ``.jsonl``, one of these per line.
    """
    text = _read(source)
    name = "stdin" if source == "-" else source
    if index is not None or Path(source).suffix in (".jsonl", ".ndjson"):
        value = _line(text, name, index or 0)
    else:
        value = parse_json(text, name)
    if isinstance(value, dict):
        if "messages" not in value:
            keys = ", ".join(map(repr, list(value)[:6])) or "nothing"
            raise InputError(f"{name}: an object needs 'messages'; this one has {keys}")
        return value["messages"], value.get("tools")
    return value, None


def read_tools(source: str | None, otherwise: Any = None) -> Any:
    """Tool schemas from a file: a list, an object with ``tools``, or a single schema."""
    if source is None:
        return otherwise
    value = parse_json(_read(source), "stdin" if source == "-" else source)
    if isinstance(value, dict):
        return value.get("tools", [value])
    return value


def parse_json(text: str, name: str, line: int = 1) -> Any:
    """JSON, or an InputError with line (the first is `line`) and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = ""
        if error.msg == "Extra data" and _is_json(text.lstrip().partition("\n")[0]):
            hint = "; if it holds one conversation per line, choose one with --index"
        place = f"{name}, line {line + error.lineno - 1}, column {error.colno}"
        raise InputError(f"{place}: not valid JSON: {error.msg}{hint}") from error
    except RecursionError as error:
        raise InputError(f"{name}: nested too deeply") from error


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _line(text: str, name: str, index: int) -> Any:
    rows = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not -len(rows) <= index < len(rows):
        raise InputError(f"{name}: there is no conversation {index}; it holds {len(rows)}")
    number, line = rows[index]
    return parse_json(line, name, number)


def _read(source: str) -> str:
    try:
        if source == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig")
        return Path(source).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        name = "stdin" if source == "-" else source
        raise InputError(f"{name}: not UTF-8: byte {error.start} cannot be read as text") from error


def parse_kwargs(given: Sequence[str]) -> dict[str, Any]:
    """Template variables from ``KEY=VALUE`` and JSON objects.

    A value that is JSON counts as such, and so do ``True``, ``False`` and ``None``; in quotes it is text.

    >>> parse_kwargs(["enable_thinking=False", "date=today", 'word="True"', '{"n": [1]}'])
    {'enable_thinking': False, 'date': 'today', 'word': 'True', 'n': [1]}
    """
    from ..rendering.factory import create_renderer

    found: dict[str, Any] = {}
    for item in given:
        if item.lstrip().startswith("{"):
            value = parse_json(item, "--kwargs")
            if not isinstance(value, dict):
                raise InputError(f"--kwargs: a JSON object is needed, not {item!r}")
            found |= value
            continue
        key, equals, text = item.partition("=")
        if not equals or not key:
            raise InputError(f"--kwargs: KEY=VALUE or a JSON object is needed, not {item!r}")
        try:
            found[key] = _PYTHON[text] if text in _PYTHON else json.loads(text)
        except ValueError:
            found[key] = text
    named = {
        name
        for name, parameter in inspect.signature(create_renderer).parameters.items()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    for key in found:
        if key in RESERVED | named:
            raise InputError(f"--kwargs: {key!r} is not a template variable: it has an option of its own")
    return found


def split_list(names: str) -> list[str]:
    """Names between commas."""
    return [name.strip() for name in names.split(",") if name.strip()]


def row_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """What options say of how rows are made, by the names of `TokenizeSettings.described`."""
    from ..conversation.messages import check_tools
    from ..rendering.factory import template_source

    readers: dict[str, tuple[str, Callable[[Any], Any]]] = {
        "parts": ("parts", split_list),
        "roles": ("roles", split_list),
        "kwargs": ("template_kwargs", parse_kwargs),
        "chat_template": ("chat_template", template_source),
        "tools": ("tools", lambda path: check_tools(read_tools(path))),
        "max_row_bytes": ("row_bytes", int),
    }
    columns = {name.removesuffix("_column"): value for name, value in options.items() if name.endswith("_column")}
    found: dict[str, Any] = {"columns": columns} if columns else {}
    for name, value in options.items():
        if not name.endswith("_column"):
            setting, read = readers.get(name, (name, lambda given: given))
            found[setting] = read(value)
    return found
