"""tokentrace: train on the exact tokens the model saw and sampled.

>>> import tokentrace
>>> from tokentrace.pocket import POCKET
>>> renderer = tokentrace.create_renderer(POCKET)
>>> rendered = renderer.render([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> rendered.decode(rendered.mask)
'4<|end|>'
"""

import ast
import importlib
from pathlib import Path
from typing import Any


def _public_names() -> dict[str, str]:
    """The public names with the module of each, as the stub beside this file declares them."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [statement for statement in stub.body if isinstance(statement, ast.ImportFrom)]
    return {name.name: f".{line.module}" for line in imports for name in line.names}


_HOMES = _public_names()
__all__ = [*sorted(_HOMES), "__version__"]  # noqa: PLE0604  (names are strings)


def __getattr__(name: str) -> Any:
    """A public name is loaded when it is first asked for: `import tokentrace` costs next to nothing."""
    if name == "__version__":
        value: Any = _installed_version()
    elif name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name], __name__), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def _installed_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("tokentrace")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "unknown"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
