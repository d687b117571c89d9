"""Configuration in YAML: checked key by key, with errors that name the line and the fix."""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

from ..errors import InputError, TokentraceError, shown
from ..settings import nearest
from .checks import MOST, count

Made = TypeVar("Made")


class ConfigError(InputError):
    """A configuration that cannot be used. Names the file, the line and the key."""


class Section(dict[str, Any]):
    """A mapping of a YAML file that knows where each of its keys stands."""

    def __init__(self, file: str, place: str, line: int) -> None:
        super().__init__()
        self.file = file
        self.place = place
        self.line = line
        self.lines: dict[str, int] = {}

    def error(self, problem: str, key: str | None = None) -> ConfigError:
        """An error at a key, or at the section."""
        line = self.line if key is None else self.lines.get(key, self.line)
        where = ".".join(part for part in (self.place, key) if part)
        return ConfigError(f"{self.file}, line {line}: {where + ': ' if where else ''}{problem}")

    def check_keys(self, known: Sequence[str]) -> None:
        """Raise for the first key that is not known."""
        for key in self:
            if key not in known:
                raise self.error(f"no such setting; {nearest(key, known)}", key)

    def read(self, key: str, *kinds: type, default: Any = None) -> Any:
        """A value of some type, or the default where there is none."""
        value = self.get(key)
        if value is None:
            return default
        # a whole number is a number too; true and false are neither
        found = {type(value)} if type(value) is not int else {int, float}
        if kinds and not found & set(kinds):
            wanted = " or ".join(_NAMES.get(one, one.__name__) for one in kinds)
            raise self.error(f"must be {wanted}, not {_shown(value)}", key)
        return value

    def need(self, key: str, *kinds: type, hint: str = "") -> Any:
        """A value that has to be there."""
        if self.get(key) is None:
            raise self.error(f"{key!r} is missing{hint and ': '}{hint}")
        return self.read(key, *kinds)

    def choice(self, key: str, names: Sequence[str], default: str | None = None) -> Any:
        """One of some names, or the default."""
        value = self.read(key, str, default=default)
        if value is not None and value not in names:
            raise self.error(f"there is no {value!r}; {nearest(value, names)}", key)
        return value

    def count(self, key: str, default: Any = None, *, least: int = 1, most: int = MOST) -> Any:
        """A whole number that is neither too small nor too large."""
        value = self.read(key, int, default=default)
        return None if value is None else self.checked(key, lambda: count(key, value, least=least, most=most))

    def rename(self, names: Mapping[str, str]) -> None:
        """Give keys that are spelled as elsewhere the names that are used here."""
        for other, name in names.items():
            if other in self and name in self:
                raise self.error(f"{name} says the same: leave one of them out", other)
            if other in self:
                self[name], self.lines[name] = self.pop(other), self.lines.pop(other)

    def sections(self, key: str) -> list[Section]:
        """A list of sections."""
        found: list[Section] = self.read(key, list, default=[])
        if not all(isinstance(one, Section) for one in found):
            raise self.error("must be a list of mappings of settings", key)
        return found

    def plain(self) -> dict[str, Any]:
        """The values without their places."""
        return {key: _plain(value) for key, value in self.items()}

    def make(self, kind: Callable[..., Made], **more: Any) -> Made:
        """A dataclass of the section's values; keys are its fields, and what it refuses is told with the line."""
        known = {one.name: one for one in fields(kind)}  # type: ignore[arg-type]
        self.check_keys([name for name in known if name not in more])
        for name, one in known.items():
            if one.default is MISSING and one.default_factory is MISSING and name not in more:
                self.need(name)
        hints = typing.get_type_hints(kind)
        given = {key: self._typed(key, hints[key]) for key in self}
        return self.checked(None, lambda: kind(**{**given, **more}))

    def checked(self, key: str | None, make: Callable[[], Made]) -> Made:
        """What a function returns; what it refuses is told with the line of the key, or of the key that it names."""
        try:
            return make()
        except (TypeError, ValueError, TokentraceError) as error:
            first, _, rest = str(error).partition(" ")
            names_key = first in (self if key is None else [key])
            raise self.error(rest if names_key else str(error), first if names_key else key) from error

    def _typed(self, key: str, hint: Any) -> Any:
        """A value as a field's type wants it."""
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        kinds = [typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,))]
        value = self[key]
        if value is None and type(None) not in kinds:
            raise self.error("has no value: give it one, or leave the key out", key)
        for one in kinds:
            if value is not None and issubclass(one, Enum):
                return one(self.choice(key, [str(member.value) for member in one]))
        written = {tuple: list}  # YAML has no tuples
        wanted = [Section if issubclass(dict, one) else written.get(one, one) for one in kinds if one is not type(None)]
        return _plain(self.read(key, *wanted))


_NAMES: Final = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    Section: "a mapping of settings",
}


def _shown(value: Any) -> str:
    return _NAMES[type(value)] if isinstance(value, Section | list) else shown(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Section):
        return value.plain()
    return [_plain(one) for one in value] if isinstance(value, list) else value


_MOST_BYTES: Final = 16 << 20


def read_config(path: str | Path) -> Section:
    """The top section of a YAML file of at most 16 MiB. Raises ConfigError with line and column."""
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
        raise ConfigError(f"{name} cannot be a configuration: it has more than {_MOST_BYTES >> 20} MiB")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or node.id != "mapping":
            raise ConfigError(f"{name}: must be a mapping of settings")
        made = _value(node, yaml.SafeLoader(text), name, "")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: settings are nested too deeply, or an anchor holds itself") from error
    assert isinstance(made, Section)
    return made


def _value(node: Any, loader: Any, file: str, place: str) -> Any:
    """What a node stands for: a section, a list or a scalar."""
    if node.id == "sequence":
        return [_value(one, loader, file, f"{place}.{at}") for at, one in enumerate(node.value)]
    line = node.start_mark.line + 1
    if node.id != "mapping":
        try:
            return loader.construct_object(node, deep=True)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:  # the 13th month
            problem = f"{shown(node.value)} cannot be read: {error}; quote it, and give it no tag"
            raise ConfigError(f"{file}, line {line}: {f'{place}: ' if place else ''}{problem}") from error
    made = Section(file, place, line)
    for key_node, value_node in node.value:
        key_line = key_node.start_mark.line + 1
        if key_node.id != "scalar":
            raise ConfigError(f"{file}, line {key_line}: the name of a setting must be text")
        key = str(_value(key_node, loader, file, ""))
        if key in made:
            raise ConfigError(f"{file}, line {key_line}: {key!r} is there twice")
        made.lines[key] = key_line
        made[key] = _value(value_node, loader, file, f"{place}.{key}" if place else key)
    return made
