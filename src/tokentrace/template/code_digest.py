"""A hash of what a Python function does: the text of the modules that it is written in.

Text, because it is the same in every process and for every version of Python; compiled code is not. It is read when it
is asked for, so it is the text that was run, unless the file changed since it was imported.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import CodeType, FunctionType, ModuleType
from typing import Any


def code_digest(name: str, function: Callable[..., Any]) -> str:
    """The SHA-256 of a function: its module and those of the same package that it imports, and what it was made with.

    A function that has no text (typed into a shell, compiled from a string) is hashed by its compiled code, which is
    another one for each version of Python.
    """
    digest = hashlib.sha256(f"python:{name}\n".encode())
    for line in _described(function):
        digest.update(line.encode("utf-8", "surrogatepass") + b"\n")
    return digest.hexdigest()


def _described(function: Any) -> Iterator[str]:
    if isinstance(function, functools.partial):
        yield f"{_stable(function.args)} {_stable(function.keywords)}"
        yield from _described(function.func)
        return
    function = inspect.unwrap(function)
    plain = function if isinstance(function, FunctionType) else getattr(function, "__func__", None)
    if plain is None:  # an object that can be called
        plain = getattr(type(function), "__call__", None)  # noqa: B004
        yield _stable(getattr(function, "__dict__", {}))
    sources = list(_sources(sys.modules.get(getattr(plain, "__module__", None) or "")))
    yield f"{getattr(plain, '__qualname__', '')}"
    yield from sources
    if isinstance(plain, FunctionType):
        if not sources:
            yield _code(plain.__code__)
        cells = [cell.cell_contents for cell in plain.__closure__ or () if _is_filled(cell)]
        yield _stable([plain.__defaults__, plain.__kwdefaults__, cells])


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _sources(module: ModuleType | None) -> Iterator[str]:
    """The text of a module, and of those beside it that it imports."""
    waiting, seen = [module], set[str]()
    while waiting:
        one = waiting.pop(0)
        if one is None or one.__name__ in seen:
            continue
        seen.add(one.__name__)
        try:
            text = inspect.getsource(one)
            tree = ast.parse(text)
        except (OSError, TypeError, SyntaxError):
            continue
        yield f"{one.__name__}\n{text}"
        package = one.__package__ or ""
        waiting += [sys.modules.get(name) for name in _imported(tree, package) if _is_beside(name, package)]


def _is_beside(name: str, package: str) -> bool:
    return bool(package) and name.startswith(package + ".")


def _imported(tree: ast.Module, package: str) -> list[str]:
    """The full names of what a module imports; some are no modules."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            names.update((home, *(f"{home}.{alias.name}" for alias in node.names)))
    return sorted(names)


def _code(code: CodeType) -> str:
    inner = [_code(value) if isinstance(value, CodeType) else _stable(value) for value in code.co_consts]
    return f"{code.co_code.hex()} {inner} {code.co_names} {code.co_varnames}"


def _stable(value: Any) -> str:
    """A value as text that is the same in every process: no addresses, no order of sets."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(sorted(f"{_stable(key)}: {_stable(one)}" for key, one in value.items())) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_stable, value)) + "]"
    if isinstance(value, (set, frozenset)):
        return "{" + ", ".join(sorted(map(_stable, value))) + "}"
    if isinstance(value, (str, bytes, int, float, complex, type(None))):
        return repr(value)
    if isinstance(value, FunctionType):
        return f"{value.__module__}.{value.__qualname__} {_code(value.__code__) if not value.__module__ else ''}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
