"""Configuration in YAML: values become typed structs, and errors name the file, the line and the setting."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from ..errors import InputError, TokentraceError, brief

Built = TypeVar("Built")
_MAX_BYTES: Final = 16 << 20


class ConfigError(InputError):
    """A configuration that cannot be used. Names the file, the line and the setting (`path`)."""

    def __init__(self, problem: str, *, path: tuple[str | int, ...] = ()) -> None:
        self.path = path
        super().__init__(problem)


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file: its values, and the nodes that know their lines."""

    file: str
    values: dict[str, Any]
    root: Any

    def error(self, problem: str, *path: str | int) -> ConfigError:
        where = ".".join(map(str, path))
        return ConfigError(f"{self.file}, line {self.line(path)}: {where + ': ' if where else ''}{problem}", path=path)

    def line(self, path: tuple[str | int, ...]) -> int:
        """Return the line of a setting, or of the closest one around it."""
        node, line = self.root, self.root.start_mark.line
        for part in path:
            if node.id == "mapping":
                pairs = [(key, value) for key, value in node.value if str(key.value) == part]
                if not pairs:
                    break
                line, node = pairs[0][0].start_mark.line, pairs[0][1]
            elif node.id == "sequence" and isinstance(part, int):
                node = node.value[part]
                line = node.start_mark.line
        return int(line) + 1

    def convert(self, kind: type[Built], values: Any, *path: str | int) -> Built:
        """Return values as a struct. Raises ConfigError at the first that does not fit."""
        try:
            return msgspec.convert(values, kind)
        except msgspec.ValidationError as error:
            message, _, where = str(error).partition(" - at `$")
            inner = [int(at) if at else name for name, at in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", where)]
            if match := re.search(r"contains unknown field `(.*)`", message):
                inner, message = [*inner, match[1]], "there is no such setting"
            raise self.error(message, *path, *inner) from error

    def build(self, kind: type[Built], values: Any, *path: str | int, **more: Any) -> Built:
        """Return values as a dataclass, whose fields are the only settings. Raises ConfigError as `convert` does."""
        if not isinstance(values, Mapping):
            raise self.error(f"must be a mapping of settings, not {brief(values)}", *path)
        names = [one.name for one in fields(kind) if one.name not in more]  # type: ignore[arg-type]
        for key in values:
            if key not in names:
                raise self.error(f"there is no such setting; there are {', '.join(names)}", *path, key)
        try:
            return self.convert(kind, {**values, **more}, *path)
        except ConfigError:
            raise
        except TokentraceError as error:
            raise self.error(str(error), *path) from error


def read_config(path: str | Path) -> Document:
    """Read a YAML file of at most 16 MiB. Raises ConfigError with line and column."""
    try:
        import yaml
    except ImportError:
        raise InputError("configurations are YAML: install tokentrace[rollout]") from None
    name = str(path)
    try:
        with open(path, "rb") as file:
            raw = file.read(_MAX_BYTES + 1)
        text = raw.decode("utf-8-sig")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{name} cannot be read: {error}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{name} has more than {_MAX_BYTES >> 20} MiB, which is no configuration")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is None or node.id != "mapping":
            raise ConfigError(f"{name}: must be a mapping of settings")
        return Document(name, _value(node, yaml.SafeLoader(text), name, {}), node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ConfigError(f"{name}{line}: not valid YAML: {getattr(error, 'problem', error)}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: settings are nested too deeply, or an anchor contains itself") from error


def _value(node: Any, loader: Any, file: str, cache: dict[int, Any]) -> Any:
    """Return the value of a node. An alias shares the value of its anchor."""
    if id(node) in cache:
        return cache[id(node)]
    value: Any
    if node.id == "sequence":
        value = [_value(one, loader, file, cache) for one in node.value]
    elif node.id == "mapping":
        value = {}
        for key_node, value_node in node.value:
            where = f"{file}, line {key_node.start_mark.line + 1}"
            if key_node.id != "scalar":
                raise ConfigError(f"{where}: the name of a setting must be text")
            if key_node.value in value:
                raise ConfigError(f"{where}: {key_node.value!r} is there twice")
            value[key_node.value] = _value(value_node, loader, file, cache)
    else:
        try:
            value = loader.construct_object(node, deep=True)
        except (ValueError, ArithmeticError, LookupError, AttributeError, TypeError) as error:  # the 13th month
            problem = f"{brief(node.value)} cannot be read: {error}; quote it, and give it no tag"
            raise ConfigError(f"{file}, line {node.start_mark.line + 1}: {problem}") from error
    cache[id(node)] = value
    return value
