"""What configurations name: functions and classes, and the tools and simulated users that are made of them."""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import types
import typing
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, TokentraceError, shown
from .config import ConfigError, Section, read_config
from .interactions import BaseInteraction, as_interactions
from .mcp import MCPConfig, read_servers, tools_now
from .tools import AdoptedTool, BaseTool, FunctionTool, as_tools


def load_object(name: str, folder: Path) -> Any:
    """What ``package.module.Name``, ``package.module:name`` or ``./file.py:name`` stands for.

    Files, and modules that are not installed, are looked for in `folder`.
    """
    module_name, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise InputError(f"{name!r} must be module:name, module.Name or file.py:name")
    is_file = module_name.endswith(".py")
    beside = folder / (module_name if is_file else f"{module_name.replace('.', '/')}.py")
    if is_file and not beside.is_file():
        raise InputError(f"there is no file {beside}")
    try:
        try:
            module = _from_file(beside) if is_file else importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if is_file or not beside.is_file() or not module_name.startswith(str(error.name)):
                raise
            module = _from_file(beside)
    except Exception as error:
        raise InputError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        near = difflib.get_close_matches(attribute, dir(module), 1)
        raise InputError(f"{module_name} has no {attribute}{f'; did you mean {near[0]!r}?' if near else ''}")
    return found


def _from_file(path: Path) -> types.ModuleType:
    """The module in a file, which is run once however often it is named."""
    path = path.resolve()
    name = f"tokentrace_config_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def load_named(section: Section, key: str, folder: Path) -> Any:
    """What the name at a key stands for."""
    name = section.need(key, str)
    return section.checked(key, lambda: load_object(name, folder))


# -- tools


def load_tools(path: str | Path) -> list[BaseTool]:
    """The tools of a YAML file: a list under ``tools`` of ``class_name``, ``config`` and ``tool_schema`` each, as verl
    has it.

    ``function`` in place of ``class_name`` names a plain function, ``mcp`` a server whose tools are taken.
    """
    top = read_config(path)
    top.check_keys(["tools"])
    return make_tools(top.sections("tools"), Path(path).parent)


def make_tools(sections: Sequence[Section], folder: Path) -> list[BaseTool]:
    """Tools from their sections of a configuration."""
    made: list[BaseTool] = []
    for section in sections:
        key = next((key for key in _TOOL_KEYS if key in section), "class_name")
        section.check_keys(_TOOL_KEYS[key])
        if key == "mcp" and "class_name" in section:  # as in verl's mcp_tool_config.yaml
            remark = f"{section['class_name']} is ignored, with its config: the tools of an MCP server need no class"
            warnings.warn(str(section.error(remark, "class_name")), stacklevel=2)
        if key == "class_name":
            made.append(_made_tool(section, folder))
        elif key == "mcp":
            made += _server_tools(section.need("mcp", Section), folder)
        else:
            found = load_named(section, key, folder)
            if isinstance(found, type) or not callable(found):
                raise section.error("is not a function; a class is named by class_name", key)
            with _making(section, key):
                made.append(FunctionTool(found, name=section.read("name", str)))
        with _making(section, key):
            as_tools(made)
    return made


_TOOL_KEYS: Final[Mapping[str, Sequence[str]]] = {
    "mcp": ["mcp", "class_name", "config"],
    "function": ["function", "name"],
    "class_name": ["class_name", "config", "tool_schema", "function", "mcp"],
}


def _server_tools(section: Section, folder: Path) -> list[BaseTool]:
    """The tools of an MCP server, or of those in a file."""
    section.rename({"mcp_servers_config_path": "file", "tool_selected_list": "tools"})
    if "file" not in section:
        servers, wanted = [section.make(MCPConfig)], None
    else:
        section.check_keys(["file", "tools"])
        wanted = section.read("tools", list)
        file = folder / section.need("file", str)
        found = section.checked("file", lambda: read_servers(file))
        servers = [section.checked("file", partial(MCPConfig, **one)) for one in found.values()]
    servers = [replace(one, cwd=str(folder / (one.cwd or ""))) if one.command else one for one in servers]
    tools = section.checked(None, lambda: tools_now(servers))
    if missing := [name for name in wanted or () if name not in [tool.name for tool in tools]]:
        raise section.error(f"there is no tool {shown(missing[0])}", "tools")
    return [tool for tool in tools if wanted is None or tool.name in wanted]


def _made_tool(section: Section, folder: Path) -> BaseTool:
    """A tool of a class: ours, or anybody's with the methods."""
    found: Any = load_named(section, "class_name", folder)
    if not (isinstance(found, type) and callable(getattr(found, "execute", None))):
        raise section.error("is not a class with an execute method; a function is named by function", "class_name")
    config, schema = _below(section, "config") or {}, _below(section, "tool_schema")
    if issubclass(found, BaseTool):
        with _making(section, "class_name"):
            own: BaseTool = found(config, schema)
        return own
    _check_literal(section, "config", config)
    with _making(section, "class_name"):
        given = _as_annotated(found, schema)
        made = typing.cast(Any, found)(config=config, tool_schema=given)
        # the class may have kept less of the schema than the file says; what the file says is shown to the model
        kept = given is not None and getattr(made, "tool_schema", None) is given
        return AdoptedTool(made, schema if kept else None)


def _as_annotated(found: type, schema: dict[str, Any] | None) -> Any:
    """A schema as the class wants it: a pydantic model where its constructor, or that of a class above it, says so."""
    if schema is None:
        return None
    for one in found.__mro__:
        constructor = vars(one).get("__init__")
        if constructor is None or "tool_schema" not in inspect.signature(constructor).parameters:
            continue
        try:
            hint = typing.get_type_hints(constructor).get("tool_schema")
        except NameError:  # a name that only type checkers import
            continue
        for kind in (hint, *typing.get_args(hint)):
            if hasattr(kind, "model_validate"):
                return kind.model_validate(schema)
    return schema


def _check_literal(section: Section, key: str, value: Any) -> None:
    """Refuse what OmegaConf would have filled in: a class would get the placeholder itself."""
    if isinstance(value, str) and re.search(r"\$\{[^}]*\}", value):
        raise section.error(f"{shown(value)} is a placeholder of OmegaConf, which is not filled in here", key)
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_literal(section, key, one)


# -- simulated users


def load_interaction(path: str | Path) -> BaseInteraction:
    """The simulated user of a YAML file: ``class_name`` and ``config`` under ``interaction``, or in a list of one."""
    users = load_interactions(path)
    if len(users) != 1:
        raise ConfigError(f"{path}: there are {len(users)} simulated users: load_interactions reads several")
    return next(iter(users.values()))


def load_interactions(path: str | Path) -> dict[str, BaseInteraction]:
    """The simulated users of a YAML file by name, as `Agent` takes them: a list under ``interaction`` of ``name``,
    ``class_name`` and ``config`` each, as verl has it. One without a name serves every task, and is called ""."""
    top = read_config(path)
    top.check_keys(["interaction"])
    top.need("interaction")
    return make_interactions(top, Path(path).parent)


def make_interactions(top: Section, folder: Path) -> dict[str, BaseInteraction]:
    """Simulated users from a configuration, one or a list of them under ``interaction``."""
    listed = isinstance(top["interaction"], list)
    sections = top.sections("interaction") if listed else [top.need("interaction", Section)]
    if not sections:
        raise top.error("there must be one at least", "interaction")
    made: dict[str, BaseInteraction] = {}
    for section in sections:
        section.check_keys(["name", "class_name", "config"])
        found = load_named(section, "class_name", folder)
        if not isinstance(found, type) or not callable(getattr(found, "generate_response", None)):
            raise section.error("is not a class with generate_response, as BaseInteraction has it", "class_name")
        config = _below(section, "config") or {}
        if not issubclass(found, BaseInteraction):
            _check_literal(section, "config", config)
        name = section.read("name", str) or ("" if len(sections) == 1 else _name_of(found))
        if name in made:
            raise section.error(f"two simulated users are called {name!r}: give each a name", "class_name")
        with _making(section, "class_name"):
            user = found({**config, "name": name} if name else config)
            made |= as_interactions({name: user})
    return made


def _name_of(found: type) -> str:
    """What verl calls a simulated user without a name: ``gsm8k`` for Gsm8kInteraction."""
    return (found.__name__.removesuffix("Interaction") or found.__name__).lower()


def _below(section: Section, key: str) -> dict[str, Any] | None:
    found = section.read(key, Section)
    return None if found is None else found.plain()


@contextlib.contextmanager
def _making(section: Section, key: str) -> Iterator[None]:
    """Run somebody's constructor: what it prints goes to stderr, what it raises is told with the line."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except ConfigError:
        raise
    except Exception as error:
        why = str(error) if isinstance(error, TokentraceError) else f"{type(error).__name__}: {error}"
        raise section.error(f"cannot be made: {why}", key) from error
