"""Public names, loaded on first use. Each package declares them once, in the stub beside its ``__init__.py``."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_on_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the imports of its stub.

    `import tokentrace` then costs next to nothing, and an optional dependency is needed only by what uses it.
    """
    homes = _declared(Path(file).with_suffix(".pyi"))
    namespace = importlib.import_module(package).__dict__

    def load(name: str) -> Any:
        home = homes.get(name)
        if home is None:
            moved = None if "." in package else _stage_of(name, package, Path(file).parent)
            if moved is None:
                raise AttributeError(f"module {package!r} has no attribute {name!r}")
            home = f".{moved}"
            told = f"{package}.{name} is {package}.{moved}.{name} now; the short name goes away in 0.3"
            warnings.warn(told, DeprecationWarning, stacklevel=2)
        value = namespace[name] = getattr(importlib.import_module(home, package), name)
        return value

    return load, lambda: sorted({*namespace, *homes}), sorted(homes)


def _declared(stub: Path) -> dict[str, str]:
    """The names that a stub imports, with the module of each."""
    lines = ast.parse(stub.read_text(encoding="utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    return {name.name: f"{'.' * line.level}{line.module or ''}" for line in imports for name in line.names}


def _stage_of(name: str, package: str, folder: Path) -> str | None:
    """The stage that a name of version 0.1 moved to from the top."""
    if name.startswith("_") or (folder / name).is_dir() or (folder / f"{name}.py").is_file():
        return None
    errors = importlib.import_module(".errors", package)
    if getattr(getattr(errors, name, None), "__module__", "") == errors.__name__:
        return "errors"
    return next((stub.parent.name for stub in folder.glob("*/__init__.pyi") if name in _declared(stub)), None)
