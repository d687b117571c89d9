"""Configuration in YAML: checked key by key, with errors that name the line and the fix."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import InputError, TokentraceError
from .checks import MOST, whole
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
        kinds = kind if isinstance(kind, tuple) else () if kind is None else (kind,)
        if kinds and not _is_one(value, kinds):
            wanted = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            raise self.error(f"must be {wanted}, not {_shown(value)}", key)
        return value

    def choice(self, key: str, names: Sequence[str], default: str | None = None) -> Any:
        """One of some names, or the default."""
        value = self.get(key, str, default)
        if value is not None and value not in names:
            near = difflib.get_close_matches(value, names, 1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(names)}"
            raise self.error(f"there is no {value!r}; {hint}", key)
        return value

    def count(self, key: str, default: Any = None, *, least: int = 1, most: int = MOST) -> Any:
        """A whole number that is neither too small nor too large."""
        value = self.get(key, int, default)
        if value is None:
            return None
        try:
            return whole(value, "it", least=least, most=most)
        except InputError as error:
            raise self.error(error.problem.removeprefix("it "), key) from error

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
            raise self.error(f"must be a mapping of settings, not {_shown(value)}", key)
        return value

    def sections(self, key: str) -> list[Section]:
        """A list of sections."""
        value = self._values.get(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(one, Section) for one in value):
            raise self.error("must be a list of mappings of settings", key)
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
        hints = typing.get_type_hints(kind)
        given = {key: self._typed(key, hints[key]) for key in self._values}
        try:
            return kind(**{**given, **more})
        except (TypeError, ValueError, TokentraceError) as error:
            first, _, rest = str(error).partition(" ")
            is_key = first in self._values
            raise self.error(rest if is_key else str(error), first if is_key else None) from error

    def _typed(self, key: str, hint: Any) -> Any:
        """A value as a field's type wants it."""
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = tuple(typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,)))
        value = self._values[key]
        if value is None and type(None) in kinds:
            return None
        if value is None:
            raise self.error("has no value: give it one, or leave the key out", key)
        if isinstance(value, Section) and any(issubclass(Section, one) or issubclass(dict, one) for one in kinds):
            return value.plain()
        for one in kinds:
            if issubclass(one, Enum):
                return one(self.choice(key, [str(member.value) for member in one]))
        return _plain(self.get(key, tuple(one for one in kinds if one is not type(None))))

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)


_NAMES = {str: "text", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}


def _is_one(value: Any, kinds: tuple[type, ...]) -> bool:
    """Whether a value is of one of the types. A whole number is a number too; true and false are none."""
    if isinstance(value, bool):
        return bool in kinds
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _shown(value: Any) -> str:
    if isinstance(value, Section | list):
        return "a list" if isinstance(value, list) else "a mapping of settings"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.plain()
    return [_plain(one) for one in value] if isinstance(value, list) else value


_MOST_BYTES: Final = 16 << 20
_MOST_VALUES: Final = 100_000
"""How many values a configuration may have, those that aliases repeat counted each time."""


def read_config(path: str | Path) -> Section:
    """The top section of a YAML file, or ConfigError with line and column.

    A file of more than 16 MiB is refused, and so is one that aliases blow up to more than 100,000 values or 16 MiB.
    """
    try:
        import yaml
    except ImportError:
        raise InputError("configurations are YAML: install tokentrace[rollout]") from None
    name = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if len(raw) > _MOST_BYTES:
        raise ConfigError(f"{name} is no configuration: it has more than {_MOST_BYTES >> 20} MiB")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or node.id != "mapping":
            raise ConfigError(f"{name}: must be a mapping of settings")
        made = _Reader(yaml.SafeLoader(text), name).read(node, "")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: settings are nested too deeply, or an anchor holds itself") from error
    assert isinstance(made, Section)
    return made


class _Reader:
    """Makes sections of the nodes of one file, and counts them: aliases can make a few lines into billions."""

    def __init__(self, loader: Any, file: str) -> None:
        self._loader = loader
        self._file = file
        self._values = self._characters = 0

    def read(self, node: Any, place: str) -> Any:
        line = node.start_mark.line + 1
        self._count(node, line)
        if node.id == "mapping":
            return self._section(node, place, line)
        if node.id == "sequence":
            return [self.read(one, f"{place}.{at}") for at, one in enumerate(node.value)]
        try:
            return self._loader.construct_object(node, deep=True)
        except (ValueError, ArithmeticError) as error:  # a date that is none
            shown = _shown(node.value)
            raise ConfigError(
                f"{self._file}, line {line}: {place}: {shown} cannot be read: {error}; quote it"
            ) from error

    def _section(self, node: Any, place: str, line: int) -> Section:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        for key_node, value_node in node.value:
            key_line = key_node.start_mark.line + 1
            self._count(key_node, key_line)
            if key_node.id != "scalar":
                raise ConfigError(f"{self._file}, line {key_line}: the name of a setting must be text")
            key = str(self._loader.construct_object(key_node, deep=True))
            if key in values:
                raise ConfigError(f"{self._file}, line {key_line}: {key!r} is there twice")
            lines[key] = key_line
            values[key] = self.read(value_node, f"{place}.{key}" if place else key)
        return Section(values, lines, line, place, self._file)

    def _count(self, node: Any, line: int) -> None:
        self._values += 1
        self._characters += len(node.value) if node.id == "scalar" else 0
        if self._values > _MOST_VALUES or self._characters > _MOST_BYTES:
            raise ConfigError(
                f"{self._file}, line {line}: aliases repeat what is here too often: the settings would have more than "
                f"{_MOST_VALUES:,} values, or {_MOST_BYTES >> 20} MiB"
            )


# -- what configurations name


def load_object(name: str, folder: Path) -> Any:
    """What ``package.module.Name``, ``package.module:name`` or ``./file.py:name`` stands for.

    Files, and modules that are not installed, are looked for in `folder`.
    """
    module_name, _, attribute = name.rpartition(":") if ":" in name else name.rpartition(".")
    if not module_name or not attribute:
        raise InputError(f"{name!r} must be module:name, module.Name or file.py:name")
    beside = folder / (module_name if module_name.endswith(".py") else f"{module_name.replace('.', '/')}.py")
    try:
        if module_name.endswith(".py"):
            if not beside.is_file():
                raise InputError(f"there is no file {beside}")
            module = _from_file(beside)
        else:
            try:
                module = importlib.import_module(module_name)
            except ModuleNotFoundError as error:
                if not beside.is_file() or not module_name.startswith(str(error.name)):
                    raise
                module = _from_file(beside)
    except InputError:
        raise
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
    if spec is None or spec.loader is None:
        raise InputError(f"{path} is no Python file")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


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
        is_function = "function" in section
        key = "function" if is_function else "class_name"
        section.check_keys(["function", "name"] if is_function else ["class_name", "config", "tool_schema", "function"])
        found = named(section, key, folder)
        if is_function and (isinstance(found, type) or not callable(found)):
            raise section.error("is no function; a class is named by class_name", key)
        if not is_function and not (isinstance(found, type) and issubclass(found, BaseTool)):
            raise section.error("is no subclass of tokentrace's BaseTool; a function is named by function", key)
        config, schema = section.section("config"), section.section("tool_schema")
        try:
            if is_function:
                made.append(FunctionTool(found, name=section.get("name", str)))
            else:
                made.append(found(config.plain() if config else {}, schema.plain() if schema else None))
            as_tools(made)
        except ConfigError:
            raise
        except Exception as error:
            raise section.error(f"cannot be made: {_why(error)}", key) from error
    return made


def load_interaction(path: str | Path) -> BaseInteraction:
    """The simulated user of a YAML file: ``class_name`` and ``config`` under ``interaction``, or in a list of one."""
    top = read_config(path)
    top.check_keys(["interaction"])
    listed = isinstance(top.need("interaction"), list)
    sections = top.sections("interaction") if listed else [top.section("interaction")]
    if len(sections) != 1 or sections[0] is None:
        raise top.error(f"there must be one, not {len(sections)}", "interaction")
    return make_interaction(sections[0], Path(path).parent)


def make_interaction(section: Section, folder: Path) -> BaseInteraction:
    """A simulated user from its section of a configuration."""
    section.check_keys(["class_name", "config"])
    found = named(section, "class_name", folder)
    if not (isinstance(found, type) and issubclass(found, BaseInteraction)):
        raise section.error("is no subclass of tokentrace's BaseInteraction", "class_name")
    config = section.section("config")
    try:
        made: BaseInteraction = found(config.plain() if config else {})
    except Exception as error:
        raise section.error(f"cannot be made: {_why(error)}", "class_name") from error
    return made


def named(section: Section, key: str, folder: Path) -> Any:
    """What the name at a key stands for."""
    name = section.need(key, str)
    try:
        return load_object(name, folder)
    except InputError as error:
        raise section.error(str(error), key) from error


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, TokentraceError) else f"{type(error).__name__}: {error}"
