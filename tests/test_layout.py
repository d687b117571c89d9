"""The layout of docs/architecture.md: the order of packages, their budgets, no import cycles."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tokentrace

SOURCE = Path(tokentrace.__file__).parent
ARCHITECTURE = Path(__file__).parents[1] / "docs" / "architecture.md"
STUBS = sorted(SOURCE.glob("*/__init__.pyi"))

DISPLAY_MODULES = {"showing"}
"""Modules that display results in notebooks and as text: they import `show` lazily."""


def modules() -> dict[str, Path]:
    """The path of every module by its dotted name inside the package."""
    paths = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


MODULES = modules()


def imports(module: str, *, when_loaded: bool) -> Iterator[str]:
    """The tokentrace modules that a module imports: anywhere in it, or only when it is loaded."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in run_when_loaded(tree) if when_loaded else ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        start = package[: len(package) - node.level + 1]
        base = ".".join([*filter(None, start), *([node.module] if node.module else [])])
        for name in node.names:
            inner = f"{base}.{name.name}".lstrip(".")
            yield inner if inner in MODULES else base


def run_when_loaded(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when a module is loaded: no bodies of functions, no ``if TYPE_CHECKING`` blocks."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from run_when_loaded(child)


def documented_stages() -> list[str]:
    """The stages in their order, as docs/architecture.md lists them."""
    block = re.search(r"```text\nsrc/tokentrace/\n(.*?)```", ARCHITECTURE.read_text(encoding="utf-8"), re.DOTALL)
    assert block, "docs/architecture.md has no list of the stages"
    return re.findall(r"^  (\w+)(?:/|\.py)", block[1], re.MULTILINE)


def stage(module: str) -> str:
    return module.split(".", maxsplit=1)[0]


def test_architecture_lists_every_stage_once() -> None:
    stages = documented_stages()
    assert len(stages) == len(set(stages))
    assert set(stages) == {stage(name) for name in MODULES if name and name != "__main__"}


@pytest.mark.parametrize("package", [path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()])
def test_no_package_outgrows_its_budget(package: str) -> None:
    lines = sum(path.read_text(encoding="utf-8").count("\n") for path in (SOURCE / package).rglob("*.py"))
    budget = re.search(rf"^  {package}/ +([\d,]+) ", ARCHITECTURE.read_text(encoding="utf-8"), re.MULTILINE)
    assert budget, "docs/architecture.md has no budget for it"
    assert lines <= int(budget[1].replace(",", "")), "make it smaller; a feature that does not fit replaces another"


def test_architecture_names_files_and_symbols_that_exist() -> None:
    references = re.findall(r"`(?!tests/)(\w+/[\w/]+\.py)(?:: ([\w.]+))?`", ARCHITECTURE.read_text(encoding="utf-8"))
    assert len(references) > 80
    for file, symbol in references:
        text = (SOURCE / file).read_text(encoding="utf-8")
        for name in filter(None, symbol.split(".")):
            assert re.search(rf"^ *(async def|def|class) {name}\b|^{name}\b.* = ", text, re.MULTILINE), (file, name)


def test_imports_point_to_earlier_stages() -> None:
    order = {name: at for at, name in enumerate(documented_stages())}
    violations = [
        f"{module} imports {target}"
        for module in MODULES
        if module and module != "__main__"
        for target in imports(module, when_loaded=False)
        if target and not (module in DISPLAY_MODULES and stage(target) == "show")
        if order[stage(target)] > order[stage(module)]
    ]
    assert violations == []


def test_there_are_no_import_cycles() -> None:
    visited: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in visited:
            for target in imports(module, when_loaded=True):
                if target in MODULES and target != module:
                    visit(target, (*path, module))
            visited.add(module)

    for name in MODULES:
        visit(name, ())


def test_every_public_name_is_there_and_documented() -> None:
    for name in tokentrace.__all__:
        value = getattr(tokentrace, name)
        assert name == "__version__" or getattr(value, "__doc__", None) or not callable(value), name


@pytest.mark.parametrize("stub", STUBS, ids=lambda stub: stub.parent.name)
def test_every_public_name_of_a_package_is_there(stub: Path) -> None:
    package = importlib.import_module(f"tokentrace.{stub.parent.name}")
    assert all(getattr(package, name) is not None for name in package.__all__)
