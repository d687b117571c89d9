"""What a test file needs beside the base install: packages, and the assets that `make assets` fetches."""

from __future__ import annotations

import ast
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
    """The packages that a test file imports when it is loaded, itself or through others of ours, that are not here."""
    return sorted({name for name in _packages(path, frozenset()) if not _is_here(name)})


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


def _packages(path: Path, seen: frozenset[Path]) -> Iterator[str]:
    for module in _imported(syntax_tree(path)):
        top = module.partition(".")[0]
        if top in ("tests", "bench"):
            inner = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            if inner.exists() and inner not in seen:
                yield from _packages(inner, seen | {path})
        elif top not in sys.stdlib_module_names:
            yield top


def _imported(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
