"""Configuration in YAML: checked key by key, with errors that name the line and the fix."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

from ..errors import InputError
from .interactions import BaseInteraction
from .tools import BaseTool, FunctionTool, as_tools

Made = TypeVar("Made")


class ConfigError(InputError):
    """A configuration that cannot be used. Names the file, the line and the key."""


class Section:
    """A mapping of a YAML file that knows where each of its keys stands."""

    def __init__(self, values: Mapping[str, Any], lines: Mapping[str, int], line: int, place: str, file: str) -> None:
        self._values = dict(values)
        self._lines = dict(lines)
        self.line = line
        self.place = place
        self.file = file

    def error(self, problem: str, key: str | None = None) -> ConfigError:
        """An error at a key, or at the section."""
        line = self._lines.get(key, self.line) if key is not None else self.line
        where = ".".join(part for part in (self.place, key) if part)
        return ConfigError(f"{self.file}, line {line}: {where + ': ' if where else ''}{problem}")

    def check_keys(self, known: Sequence[str]) -> None:
        """Raise for the first key that nobody reads."""
        for key in self._values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, 1)
                hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}"
                raise self.error(f"no such setting; {hint}", key)

    def get(self, key: str, kind: type | tuple[type, ...] | None = None, default: Any = None) -> Any:
        """A value of some type, or the default where there is none."""
        value = self._values.get(key)
        if value is None:
            return default
        if kind is not None and (not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool)):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            wanted = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            raise self.error(f"must be {wanted}, not {value!r}", key)
        return value

    def need(self, key: str, kind: type | tuple[type, ...] | None = None) -> Any:
        """A value that has to be there."""
        if self._values.get(key) is None:
            raise self.error(f"{key!r} is missing")
        return self.get(key, kind)

    def section(self, key: str) -> Section | None:
        """A section below this one."""
        value = self._values.get(key)
        if value is None:
            return None
        if not isinstance(value, Section):
            raise self.error("must be a mapping of settings", key)
        return value

    def sections(self, key: str) -> list[Section]:
        """A list of sections."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, Section) for one in value):
            raise self.error("must be a list of mappings", key)
        return value

    def plain(self) -> dict[str, Any]:
        """The values without their places."""
        return {key: _plain(value) for key, value in self._values.items()}

    def make(self, kind: Callable[..., Made], **more: Any) -> Made:
        """A dataclass of the section's values; keys are its fields, and what it refuses is told with the line."""
        known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
        self.check_keys([name for name in known if name not in more])
        for name, one in known.items():
            needed = one.default is MISSING and one.default_factory is MISSING
            if needed and name not in more and self._values.get(name) is None:
                raise self.error(f"{name!r} is missing")
        try:
            return kind(**{**self.plain(), **more})
        except (TypeError, ValueError, InputError) as error:
            raise self.error(str(error)) from error

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.plain()
    return [_plain(one) for one in value] if isinstance(value, list) else value


def read_config(path: str | Path) -> Section:
    """The top section of a YAML file, or ConfigError with line and column."""
    try:
        import yaml
    except ImportError:
        raise InputError("configurations are YAML: install tokentrace[rollout]") from None
    name = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        loader = yaml.SafeLoader(text)
        if node is None or node.id != "mapping":
            raise ConfigError(f"{name}: must be a mapping of settings")
        made = _made(node, loader, "", name)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(made, Section):
        raise ConfigError(f"{name}: must be a mapping of settings")
    return made


def _made(node: Any, loader: Any, place: str, file: str) -> Any:
    line = node.start_mark.line + 1
    if node.id == "mapping":
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key = str(loader.construct_object(key_node, deep=True))
            if key in values:
                raise ConfigError(f"{file}, line {key_node.start_mark.line + 1}: {key!r} is there twice")
            lines[key] = key_node.start_mark.line + 1
            values[key] = _made(value_node, loader, f"{place}.{key}" if place else key, file)
        return Section(values, lines, line, place, file)
    if node.id == "sequence":
        return [_made(one, loader, f"{place}.{at}", file) for at, one in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


# -- what configurations name


def load_object(name: str, folder: Path) -> Any:
    """What ``package.module.Name``, ``package.module:name`` or ``./file.py:name`` stands for."""
    module_name, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise InputError(f"{name!r} must be module:name, module.Name or file.py:name")
    if module_name.endswith(".py"):
        path = (folder / module_name).resolve()
        spec = importlib.util.spec_from_file_location(f"tokentrace_config_{path.stem}", path)
        if spec is None or spec.loader is None or not path.is_file():
            raise InputError(f"there is no file {module_name}")
        module = sys.modules.get(spec.name) or importlib.util.module_from_spec(spec)
        if spec.name not in sys.modules:
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ImportError as error:
            raise InputError(f"{module_name} cannot be imported: {error}") from error
    found = getattr(module, attribute, None)
    if found is None:
        raise InputError(f"{module_name} has no {attribute}")
    return found


def load_tools(path: str | Path) -> list[BaseTool]:
    """The tools of a YAML file: a list under ``tools`` of ``class_name``, ``config`` and ``tool_schema`` each.

    ``function`` in place of ``class_name`` names a plain function.
    """
    top = read_config(path)
    top.check_keys(["tools"])
    return make_tools(top.sections("tools"), Path(path).parent)


def make_tools(sections: Sequence[Section], folder: Path) -> list[BaseTool]:
    """Tools from their sections of a configuration."""
    made: list[BaseTool] = []
    for section in sections:
        section.check_keys(["class_name", "function", "name", "config", "tool_schema"])
        key = "function" if "function" in section else "class_name"
        found = _named(section, key, folder)
        if key == "function":
            made.append(FunctionTool(found, name=section.get("name", str)))
            continue
        if not (isinstance(found, type) and issubclass(found, BaseTool)):
            raise section.error("is no subclass of tokentrace's BaseTool", key)
        config, schema = section.section("config"), section.section("tool_schema")
        try:
            made.append(found(config.plain() if config else {}, schema.plain() if schema else None))
        except Exception as error:
            raise section.error(f"cannot be made: {error}", key) from error
    return as_tools(made)


def make_interaction(section: Section, folder: Path) -> BaseInteraction:
    """A simulated user from its section of a configuration."""
    section.check_keys(["class_name", "config"])
    found = _named(section, "class_name", folder)
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise section.error("is no subclass of tokentrace's BaseInteraction", "class_name")
    config = section.section("config")
    made: BaseInteraction = found(config.plain() if config else {})
    return made


def _named(section: Section, key: str, folder: Path) -> Any:
    try:
        return load_object(section.need(key, str), folder)
    except ConfigError:
        raise
    except InputError as error:
        raise section.error(str(error), key) from error
