"""What commands read. Errors name the file and the place."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import InputError
from .output import note, working

if TYPE_CHECKING:
    from ..engines.http import HTTPSettings
    from ..engines.protocol import Engine
    from ..rendering.renderer import Renderer
    from ..tokens.tokenizer import Tokenizer

_PYTHON = {"True": True, "False": False, "None": None}


def chosen_tokenizer(tokenizer: str | None) -> str:
    """``--tokenizer``, by default the embedded model, with a note."""
    if tokenizer is None:
        note("no --tokenizer: using the embedded pocket model")
    return tokenizer or "pocket"


def make_renderer(template: Mapping[str, Any], **settings: Any) -> Renderer:
    """The renderer of `options.template_options`."""
    from ..rendering.factory import create_renderer

    name = chosen_tokenizer(template["tokenizer"])
    settings |= {"chat_template": template["chat_template"], **parse_kwargs(template["kwargs"])}
    with working(f"loading {name}"):
        return create_renderer(name, template["renderer"], **settings)


async def connect_engine(
    engine: str, tokenizer: Tokenizer | None, kind: str = "auto", settings: HTTPSettings | None = None
) -> Engine:
    """Connect to an engine, to several with commas, or to the embedded one."""
    from ..engines.embedded import EmbeddedEngine
    from ..engines.errors import EngineError
    from ..engines.servers import connect

    if engine == "embedded":
        return EmbeddedEngine(seed=0)  # a server answers the same requests alike each time it starts
    size = None if tokenizer is None else tokenizer.vocabulary.size
    try:
        return await connect(split_list(engine), kind, settings=settings, vocab_size=size)
    except EngineError as error:
        raise InputError(f"{error}; is the engine running? --engine sets its address") from error


def conversation_title(source: str) -> str:
    return "stdin" if source == "-" else Path(source).name


def read_conversation(source: str, index: int | None = None) -> tuple[Any, Any]:
    """Read messages and perhaps tools from a file, or from stdin for ``-``.

    It has a list of messages, or an object with ``messages`` and perhaps ``tools``; with
    `index` or the suffix ``.jsonl``, one per line.
    """
    text, name, line = read_text(source), "stdin" if source == "-" else source, 1
    if index is not None or Path(source).suffix in (".jsonl", ".ndjson"):
        rows = [(number, row) for number, row in enumerate(text.split("\n"), 1) if row.strip()]
        at = index or 0
        if not -len(rows) <= at < len(rows):
            raise InputError(f"{name}: there is no conversation {at}; it has {len(rows)}")
        if index is None and len(rows) > 1:
            note(f"conversation 1 of {len(rows)}; --index chooses another")
        line, text = rows[at]
    value = parse_json(text, name, line, indexed=index is not None)
    if not isinstance(value, dict):
        return value, None
    if "messages" not in value:
        keys = ", ".join(map(repr, list(value)[:6])) or "nothing"
        raise InputError(f"{name}: an object needs 'messages'; this one has {keys}")
    return value["messages"], value.get("tools")


def read_tools(source: str | None, default: Any = None) -> Any:
    """Read tool schemas: a list, an object with ``tools``, or one schema."""
    if source is None:
        return default
    value = parse_json(read_text(source), conversation_title(source))
    return value.get("tools", [value]) if isinstance(value, dict) else value


def parse_json(text: str, name: str, line: int = 1, *, indexed: bool = False) -> Any:
    """Parse JSON that begins at `line`. Raises InputError naming line and column."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        is_lines = indexed or error.msg == "Extra data"
        hint = "; --index chooses from JSON Lines: one conversation per line" if is_lines else ""
        place = f"{name}, line {line + error.lineno - 1}, column {error.colno}"
        raise InputError(f"{place}: not valid JSON: {error.msg}{hint}") from error
    except (RecursionError, ValueError) as error:  # Python limits the digits of a number
        raise InputError(f"{name}: nested too deeply, or a number is too long") from error


def read_text(source: str) -> str:
    """Read a file, or stdin for ``-``."""
    try:
        with click.open_file(source, encoding="utf-8-sig") as file:
            return str(file.read())
    except UnicodeDecodeError as error:
        advice = "; `tokentrace view` shows rows" if source.endswith(".parquet") else ""
        problem = f"{conversation_title(source)}: not UTF-8: invalid byte {error.start}{advice}"
        raise InputError(problem) from error


def parse_kwargs(items: Sequence[str]) -> dict[str, Any]:
    """Parse template variables: ``KEY=VALUE`` or JSON objects.

    A value is JSON, ``True``, ``False``, ``None``, or text.

    >>> parse_kwargs(["thinking=False", "off=true", "date=a=b", 'word="True"', "none=", "n=1", '{"n": [1]}'])
    {'thinking': False, 'off': True, 'date': 'a=b', 'word': 'True', 'none': '', 'n': [1]}
    """
    from ..rendering.factory import create_renderer

    variables: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if item.lstrip().startswith("{"):
            variables |= parse_json(item, "--kwargs")
        elif not equals or not key:
            raise InputError(f"--kwargs needs KEY=VALUE or a JSON object, not {item!r}")
        else:
            try:
                variables[key] = _PYTHON[text] if text in _PYTHON else json.loads(text)
            except ValueError:
                variables[key] = text
    parameters = inspect.signature(create_renderer).parameters.values()
    reserved = {one.name for one in parameters if one.kind is not one.VAR_KEYWORD}
    reserved |= {"messages", "tools", "add_generation_prompt"}
    for key in variables:
        if key in reserved:
            raise InputError(f"--kwargs: {key!r} is a setting, not a template variable: see --help")
    return variables


def split_list(names: str) -> list[str]:
    return [name.strip() for name in names.split(",") if name.strip()]


def row_settings(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as settings of `TokenizeSettings`."""
    from ..conversation.messages import check_tools
    from ..rendering.factory import template_source

    readers: dict[str, Callable[[Any], Any]] = {
        "parts": split_list,
        "roles": split_list,
        "kwargs": parse_kwargs,
        "chat_template": template_source,
        "tools": lambda path: check_tools(read_tools(path)),
    }
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if name.endswith("_column"):
            settings.setdefault("columns", {})[name.removesuffix("_column")] = value
        else:
            setting = "template_kwargs" if name == "kwargs" else name
            settings[setting] = readers[name](value) if name in readers else value
    return settings
