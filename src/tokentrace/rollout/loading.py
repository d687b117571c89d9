"""YAML configurations, and the functions, classes, tools and users that they name."""

import asyncio
import contextlib
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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..errors import InputError, brief
from ..settings import explain_invalid
from ..values.place import is_list
from .calling import describe_error
from .interactions import BaseInteraction, as_interactions
from .mcp import MCPConfig, mcp_tools
from .tools import AdoptedTool, BaseTool, FunctionTool, as_tools

Built = TypeVar("Built")


class ConfigError(InputError):
    """A configuration cannot be used. Names the file, the line and the setting."""


Place = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its values, and their lines by path."""

    file: Path
    folder: Path
    values: dict[str, Any]
    lines: Mapping[Place, int]

    def error(self, problem: str, *path: str | int) -> ConfigError:
        line = next(self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines)
        where = f"{'.'.join(map(str, path))}: " if path else ""
        return ConfigError(f"{self.file}, line {line}: {where}{problem}")

    @contextlib.contextmanager
    def at(self, *path: str | int, schema: Any = Any) -> Iterator[None]:
        """Turn errors into a ConfigError. What user code prints goes to stderr."""
        try:
            with contextlib.redirect_stdout(sys.stderr):
                yield
        except ConfigError:
            raise
        except msgspec.ValidationError as error:
            inner, problem = explain_invalid(error, schema)
            raise self.error(problem, *path, *inner) from error
        except Exception as error:
            raise self.error(describe_error(error), *path) from error

    def convert(self, kind: type[Built], values: Any, *path: str | int) -> Built:
        """Convert values to a struct or a dataclass. Raises ConfigError."""
        if is_dataclass(kind) and isinstance(values, Mapping):
            self.check_names(values, [one.name for one in fields(kind)], *path)
        with self.at(*path, schema=kind):
            return msgspec.convert(values, kind)

    def check_names(self, values: Mapping[str, Any], names: Sequence[str], *path: str | int) -> None:
        for key in values:
            if key not in names:
                raise self.error(f"there is no such setting; choose from {', '.join(names)}", *path, key)


def read_config(path: str | Path) -> Document:
    """Read a YAML file. Raises ConfigError."""
    try:
        import yaml
    except ImportError:
        raise InputError("YAML configurations need PyYAML: install tokentrace[rollout]") from None
    lines: dict[Place, int] = {}
    cache: dict[int, Any] = {}  # an anchor is read once, however often aliases repeat it

    def fault(problem: str, node: Any) -> Exception:
        error: Exception = yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        return error

    def value_of(node: Any, place: Place) -> Any:
        lines.setdefault(place, node.start_mark.line + 1)
        if id(node) in cache:
            return cache[id(node)]
        if node.id == "sequence":
            cache[id(node)] = [value_of(one, (*place, at)) for at, one in enumerate(node.value)]
            return cache[id(node)]
        if node.id == "scalar":
            try:
                return loader.construct_object(node, deep=True)
            except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:
                # month 13
                raise fault(f"{brief(node.value)} cannot be read: {error}; quote it", node) from error
        value: dict[str, Any] = {}
        for key, one in node.value:
            if key.id != "scalar":
                raise fault("the name of a setting must be text", key)
            if key.value in value:
                raise fault(f"{key.value!r} is set twice", key)
            lines[*place, key.value] = key.start_mark.line + 1
            value[key.value] = value_of(one, (*place, key.value))
        cache[id(node)] = value  # at the end: an anchor that contains itself is an error
        return value

    try:
        loader = yaml.SafeLoader(Path(path).read_text(encoding="utf-8-sig"))
        root = loader.get_single_node()
        if root is None or root.id != "mapping":
            raise ConfigError(f"{path}: must be a mapping of settings")
        return Document(Path(path), Path(path).resolve().parent, value_of(root, ()), lines)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{path}: is nested too deeply, or an anchor contains itself") from error
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def read_section(path: str | Path, key: str) -> Document:
    """Read a YAML file with only this section. Raises ConfigError."""
    document = read_config(path)
    document.check_names(document.values, [key])
    return document


def load_object(name: str, folder: Path) -> Any:
    """Import ``package.module.Name``, ``module:name`` or ``./file.py:name``."""
    module_name, _, attribute = name.rpartition(":" if ":" in name else ".")
    if not module_name or not attribute:
        raise InputError(f"{name!r} must be module:name, module.Name or file.py:name")
    is_file = module_name.endswith(".py")
    beside = folder / (module_name if is_file else f"{module_name.replace('.', '/')}.py")
    try:
        try:
            module = _from_file(beside) if is_file else importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if is_file or not beside.is_file() or not module_name.startswith(str(error.name)):
                raise
            module = _from_file(beside)
    except Exception as error:
        raise InputError(f"{module_name} cannot be imported: {type(error).__name__}: {error}") from error
    if not hasattr(module, attribute):
        raise InputError(f"{module_name} has no {attribute}")
    return getattr(module, attribute)


def _from_file(path: Path) -> types.ModuleType:
    path = path.resolve(strict=True)
    name = f"tokentrace_config_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{path} is not a module")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(sys.modules[name])
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


class ToolSection(Struct, forbid_unknown_fields=True, omit_defaults=True):
    class_name: str | None = None
    config: dict[str, Any] = {}
    tool_schema: dict[str, Any] | None = None
    function: str | None = None
    name: str | None = None
    mcp: dict[str, Any] | None = None


class _ServerFile(Struct):
    servers: dict[str, dict[str, Any]] = msgspec.field(name="mcpServers")


def load_tools(path: str | Path) -> list[BaseTool]:
    """Load the tools of a YAML file: classes as in verl, functions, MCP servers."""
    return make_tools(read_section(path, "tools"))


def make_tools(document: Document) -> list[BaseTool]:
    tools: list[BaseTool] = []
    for at, section in enumerate(
        document.convert(list[ToolSection], document.values.get("tools"), "tools")
    ):
        kinds = ("mcp", "function", "class_name")
        kind = next((name for name in kinds if getattr(section, name) is not None), None)
        if kind is None:
            raise document.error("a tool needs a class_name, a function or mcp", "tools", at)
        with document.at("tools", at, kind):
            if kind == "mcp":
                tools += _server_tools(document, section, "tools", at, "mcp")
            elif kind == "function":
                function = load_object(str(section.function), document.folder)
                if isinstance(function, type) or not callable(function):
                    raise InputError("is not a function; name a class with class_name")
                tools.append(FunctionTool(function, name=section.name))
            else:
                tools.append(_make_tool(load_object(str(section.class_name), document.folder), section))
            as_tools(tools)
    return tools


def _server_tools(document: Document, section: ToolSection, *path: str | int) -> list[BaseTool]:
    if section.class_name is not None:  # as in verl's mcp_tool_config.yaml
        ignored = f"{section.class_name} is ignored: the tools of an MCP server need no class"
        warnings.warn(str(document.error(ignored, *path)), stacklevel=3)
    names = {"mcp_servers_config_path": "file", "tool_selected_list": "tools"}
    values = {names.get(key, key): value for key, value in (section.mcp or {}).items()}
    listed, selected = [values], None
    if "file" in values:
        selected, file = values.get("tools"), (document.folder / values["file"]).read_bytes()
        listed = list(msgspec.json.decode(file, type=_ServerFile).servers.values())
    servers = [document.convert(MCPConfig, one, *path) for one in listed]
    for server in servers:
        server.cwd = str(document.folder / (server.cwd or "")) if server.command else None

    async def list_tools() -> list[BaseTool]:
        return [tool for server in servers for tool in await mcp_tools(server)]

    with ThreadPoolExecutor(1) as thread:  # an event loop may be running in this one
        tools = {tool.name: tool for tool in thread.submit(asyncio.run, list_tools()).result()}
    if missing := [name for name in selected or () if name not in tools]:
        raise InputError(f"there is no tool {brief(missing[0])}")
    return [tool for name, tool in tools.items() if selected is None or name in selected]


def _make_tool(kind: Any, section: ToolSection) -> BaseTool:
    if not (isinstance(kind, type) and callable(getattr(kind, "execute", None))):
        raise InputError("is not a class with an execute method; name a function with function")
    if issubclass(kind, BaseTool):
        tool: BaseTool = kind(section.config, section.tool_schema)
        return tool
    _check_placeholders(section.config)
    schema = _as_annotated(kind, section.tool_schema)
    adopted = typing.cast(Any, kind)(config=section.config, tool_schema=schema)
    # verl's schema class drops fields; the model sees what the file has
    unchanged = schema is not None and getattr(adopted, "tool_schema", None) is schema
    return AdoptedTool(adopted, section.tool_schema if unchanged else None)


def _as_annotated(kind: type, schema: dict[str, Any] | None) -> Any:
    """A schema as a constructor takes it, perhaps as a pydantic model."""
    for one in kind.__mro__ if schema is not None else ():
        constructor = vars(one).get("__init__")
        if constructor is None or "tool_schema" not in inspect.signature(constructor).parameters:
            continue
        with contextlib.suppress(NameError):  # a name that only type checkers import
            hint = typing.get_type_hints(constructor).get("tool_schema")
            for option in (hint, *typing.get_args(hint)):
                if hasattr(option, "model_validate"):
                    return option.model_validate(schema)
    return schema


def _check_placeholders(value: Any) -> None:
    if isinstance(value, str) and re.search(r"\$\{[^}]*\}", value):
        raise InputError(f"config: {brief(value)} is an OmegaConf placeholder, which is not supported")
    for one in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        _check_placeholders(one)


class UserSection(Struct, forbid_unknown_fields=True, omit_defaults=True):
    class_name: str
    name: str | None = None
    config: dict[str, Any] = {}


def load_interactions(path: str | Path) -> dict[str, BaseInteraction]:
    """Load the simulated users of a YAML file by name; a single one is called ""."""
    return make_interactions(read_section(path, "interaction"))


def make_interactions(document: Document) -> dict[str, BaseInteraction]:
    sections = document.values.get("interaction")
    listed = document.convert(
        list[UserSection], sections if is_list(sections) else [sections], "interaction"
    )
    if not listed:
        raise document.error("there must be at least one", "interaction")
    users: dict[str, BaseInteraction] = {}
    for at, section in enumerate(listed):
        with document.at("interaction", at, "class_name"):
            kind = load_object(section.class_name, document.folder)
            if not isinstance(kind, type) or not callable(getattr(kind, "generate_response", None)):
                raise InputError("is not a class with generate_response, such as BaseInteraction")
            if not issubclass(kind, BaseInteraction):
                _check_placeholders(section.config)
            name = section.name or ""
            if not name and len(listed) > 1:  # verl's default name: gsm8k for Gsm8kInteraction
                name = (kind.__name__.removesuffix("Interaction") or kind.__name__).lower()
            if name in users:
                raise InputError(f"two simulated users are called {name!r}: give each a name")
            users |= as_interactions(
                {name: kind({**section.config, "name": name} if name else section.config)}
            )
    return users
