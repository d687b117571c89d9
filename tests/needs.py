"""What a test file needs beside the base install: packages, and the assets that `make assets` fetches."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSET_MODULES = ("tests.assets", "tests.oracle", "tests.rendering.bridge.rollouts")
ASSET_NAMES = frozenset({"load_family", "make_renderer", "per_family", "templates_of_trl"})
ASSET_FIXTURES = frozenset({"family", "any_family", "tokenizer", "renderer", "encoding"})


def missing_packages(path: Path) -> list[str]:
    """The packages that a file imports when it is loaded, itself or through others of ours, that are not here."""
    return sorted(name for name in _packages(path) if not _is_here(name))


def missing_package(error: BaseException | None) -> str | None:
    """The package for want of which an error came about, if it did."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and error.name:
            return error.name.partition(".")[0]
        error = error.__cause__ or error.__context__
    return None


@cache
def needs_assets(path: Path) -> bool:
    """Whether a test file uses real tokenizers and templates."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in (*ASSET_MODULES, *ASSET_NAMES)):
        return False
    for node in ast.walk(syntax_tree(path)):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module.startswith(ASSET_MODULES):
                return True
            if node.module.startswith("tests.") and ASSET_NAMES & {name.name for name in node.names}:
                return True
    return False


@cache
def _is_here(package: str) -> bool:
    return find_spec(package) is not None


@cache
def syntax_tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


_LONG_TEXT = re.compile(r"(\"{3}|'{3}).*?\1", re.DOTALL)
_STATEMENT = re.compile(r"^(?:from|import) [^(\n]*(?:\([^)]*\))?", re.MULTILINE)


def _imports(path: Path) -> Iterator[ast.Import | ast.ImportFrom]:
    """The imports at the left margin of a file, without parsing the rest, which takes ten times as long."""
    for statement in _STATEMENT.findall(_LONG_TEXT.sub("", path.read_text(encoding="utf-8"))):
        yield from (node for node in ast.parse(statement).body if isinstance(node, ast.Import | ast.ImportFrom))


@cache
def _packages(path: Path) -> frozenset[str]:
    """The packages that are imported when a file is, by itself or by files of ours that it imports."""
    found, seen, waiting = set[str](), set[Path](), [path]
    while waiting:
        at = waiting.pop()
        if at in seen:
            continue
        seen.add(at)
        for module in _imported(at):
            top = module.partition(".")[0]
            if top in _OWN:
                waiting += _files_of(module)
            elif top not in sys.stdlib_module_names:
                found.add(top)
    return frozenset(found)


_OWN = {"tests": ROOT, "bench": ROOT, "tokentrace": ROOT / "src"}


@cache
def _files_of(module: str) -> tuple[Path, ...]:
    """The files that are run when a module of ours is imported: its own, and those of the packages it is in."""
    path = _OWN[module.partition(".")[0]].joinpath(*module.split("."))
    inside = [folder / "__init__.py" for folder in (path, *path.parents) if folder.is_relative_to(ROOT)]
    return tuple(file for file in (path.with_name(f"{path.name}.py"), *inside) if file.exists())


@cache
def _imported(path: Path) -> tuple[str, ...]:
    """The modules that a file imports as it is loaded, and what may be modules among the names it imports of them."""
    found: list[str] = []
    for node in _imports(path):
        if isinstance(node, ast.Import):
            found += (name.name for name in node.names)
        else:
            module = node.module or ""
            if node.level:
                package = path.parents[node.level - 1].relative_to(ROOT / "src" if "src" in path.parts else ROOT)
                module = ".".join([*package.parts, *([module] if module else [])])
            found += (module, *(f"{module}.{name.name}" for name in node.names))
    return tuple(found)
