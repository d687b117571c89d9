"""Public names, loaded on first use, as declared in the stub of each package."""

import ast
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_on_use(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package, from the imports of its stub.

    Importing tokentrace then costs little, and needs no optional dependency.
    """
    lines = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8")).body
    imports = [line for line in lines if isinstance(line, ast.ImportFrom)]
    homes = {name.name: f"{'.' * line.level}{line.module or ''}" for line in imports for name in line.names}
    namespace = importlib.import_module(package).__dict__

    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = namespace[name] = getattr(importlib.import_module(homes[name], package), name)
        return value

    return load, lambda: sorted({*namespace, *homes}), sorted(homes)
