"""Every code block in README.md and docs/ runs, or states why it cannot; the few exceptions are listed here."""

import ast
import contextlib
import pkgutil
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tests.assets import family_dir
from tests.gateway.real_agents.install import environment
from tests.gateway.real_agents.running import need
from tests.guides import GUIDES, ROOT, blocks, has_code, run_page

ALL = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in ALL if page.parent != GUIDES]
AGENTS = ["docs/agents.md"]
"""Pages whose code runs agents, in a separate environment."""
QWEN3 = ["docs/audit.md"]
"""Pages that need a template that drops the reasoning of past turns; pocket's keeps it."""

NOT_RUN = {
    "docs/agents.md": 1,  # Claude Code
    "docs/check.md": 1,  # what other programs recorded
    "docs/engines.md": 3,  # starts vLLM, SGLang, llama.cpp
    "docs/gateway.md": 1,  # an engine's server
    "docs/guides/trl.md": 4,  # vLLM and a GPU, a gateway, TRL's kernel, seven minutes
    "docs/guides/verl.md": 1,  # verl's trainer
}
"""The number of blocks marked as not run, by page; each mark states its reason."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in QWEN3 and has_code(ROOT / name)])
def test_page_runs(name: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    if name in AGENTS:
        need(pytestconfig, "current")
    pythons = {"agents": environment("current")} if name in AGENTS else {}
    run_page(ROOT / name, tmp_path, pythons=pythons)


@pytest.mark.parametrize("name", QWEN3)
def test_page_with_a_real_template_runs(name: str, tmp_path: Path) -> None:
    run_page(ROOT / name, tmp_path, models={"Qwen3-8B": family_dir("qwen3")})


@pytest.mark.parametrize("name", ["README.md", "docs/start.md", "docs/agents.md"])
def test_a_page_imports_only_what_it_says_to_install(name: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    installed, imported = set(project["dependencies"]), set()
    for block in blocks(ROOT / name):
        if block.language == "console":
            for word in shlex.split(
                " ".join(re.findall(r"^\$ pip install (.*)", block.code, re.MULTILINE)), comments=True
            ):
                _, _, extras = word.rstrip("]").partition("[")
                requirements = [project["optional-dependencies"][extra] for extra in extras.split(",") if extra]
                installed |= set().union([word], *requirements)
        elif block.language == "python" and "with" not in block.marks:
            for node in ast.walk(ast.parse(block.code)):
                names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                imported |= {module.partition(".")[0] for module in names}
    packages = {re.split(r"[^\w-]", requirement)[0] for requirement in installed}
    assert imported <= packages | set(sys.stdlib_module_names)


def test_few_blocks_are_not_run() -> None:
    counts = {
        str(page.relative_to(ROOT)): sum("not run" in block.marks for block in blocks(page))
        for page in ALL
        if any("not run" in block.marks for block in blocks(page))
    }
    assert counts == NOT_RUN


@pytest.mark.parametrize("page", ALL, ids=lambda page: str(page.relative_to(ROOT)))
def test_code_is_in_fenced_blocks_that_name_a_language(page: Path) -> None:
    assert all(block.language for block in blocks(page))
    outside = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert not re.findall(r"(?m)^(?![-*\d ]).*\n\n    \S.*", outside), "an indented block is code that nobody runs"


PROSE = [*ALL, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "training").rglob("*.md"))]


@pytest.mark.parametrize("page", PROSE, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_on_a_page_exist(page: Path) -> None:
    for name in sorted(set(re.findall(r"`(tokentrace(?:\.\w+)+)", page.read_text(encoding="utf-8")))):
        module, _, attribute = name.rpartition(".")
        with contextlib.suppress(AttributeError):
            assert pkgutil.resolve_name(name) is not None
            continue
        path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")  # its dependency is not installed here
        assert path.exists(), name
        assert f"def {attribute}(" in path.read_text(encoding="utf-8"), name


WRONG = {
    "an error": "```python\n1 / 0\n```",
    "another output": '```python\nprint(1)\n```\n\n```text title="output"\n2\n```',
    "another value": "```python\n[1 + 1][0]  # 3\n```",
    "another exit code": "```console\n$ tokentrace check missing.jsonl\n```",
    "other words of a command": "```console\n$ echo yes\nno\n```",
    "an extra that is not there": '```console\n$ pip install "tokentrace[everything]"\n```',
    "a target that is not there": "```console\n$ make coffee\n```",
    "a block that is not JSON": "```json\n{nothing}\n```",
    "no language": "```\nanything\n```",
    "no code": "```text\nanything\n```",
}


@pytest.mark.parametrize("block", WRONG.values(), ids=WRONG)
def test_a_wrong_block_is_found(block: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Wrong\n\n{block}\n", encoding="utf-8")
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError)):
        run_page(page, tmp_path)
