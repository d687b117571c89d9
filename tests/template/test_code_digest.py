"""The digest of a format that is written in Python: another one whenever its code is another, and only then."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tokentrace.formats.deepseek import DEEPSEEK_V4, DEEPSEEK_V32
from tokentrace.template.chat_template import PythonFormat

FORMAT = """
from . import words
from .marks import END

def write(messages, tools, add_generation_prompt, trace, **variables):
    for message in messages:
        yield words.lead(message["role"])
        yield message["content"]
        yield END
"""
FILES = {
    "__init__.py": "",
    "format.py": FORMAT,
    "marks.py": 'END = "<|end|>"\n',
    "words.py": "from .deeper import START\n\ndef lead(role):\n    return START\n",
    "deeper.py": 'START = "<|start|>"\n',
    "aside.py": "ANOTHER = 1\n",
}


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The digest of the format in a package of these files, imported anew."""
    made: list[str] = []

    def digest(**changes: str) -> str:
        package = f"written{len(made)}"
        made.append(package)
        folder = tmp_path / str(len(made)) / "written_format"
        folder.mkdir(parents=True)
        for name, text in (FILES | {f"{key}.py": value for key, value in changes.items()}).items():
            (folder / name).write_text(text, encoding="utf-8")
        for name in [name for name in sys.modules if name.startswith("written_format")]:
            del sys.modules[name]
        monkeypatch.syspath_prepend(folder.parent)
        importlib.invalidate_caches()
        module = importlib.import_module("written_format.format")
        return PythonFormat("written", module.write, ()).digest

    yield digest
    for name in [name for name in sys.modules if name.startswith("written_format")]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("format", 'message["content"]', 'message["content"].strip()'),
        ("marks", "<|end|>", "<|stop|>"),
        ("words", "return START", "return START + role"),
        ("deeper", "<|start|>", "<|begin|>"),
    ],
)
def test_code_that_changes_changes_the_digest(digest_of: Callable[..., str], module: str, old: str, new: str) -> None:
    changed = FILES[f"{module}.py"].replace(old, new)
    assert changed != FILES[f"{module}.py"]
    assert digest_of() != digest_of(**{module: changed})


def test_code_that_is_not_its_own_does_not(digest_of: Callable[..., str]) -> None:
    assert digest_of() == digest_of() == digest_of(aside="ANOTHER = 2\n")


def _made(mark: str) -> Callable[..., Iterator[str]]:
    def write(*_: Any, **__: Any) -> Iterator[str]:
        yield mark

    return write


def _shouted(mark: str, *_: Any, **__: Any) -> Iterator[str]:
    yield mark


def test_what_a_function_was_made_with_is_part_of_it() -> None:
    def digest(function: Callable[..., Iterator[Any]]) -> str:
        return PythonFormat("made", function, ()).digest

    assert digest(_made("a")) == digest(_made("a")) != digest(_made("b"))
    one, other = functools.partial(_shouted, "a"), functools.partial(_shouted, "b")
    assert digest(one) == digest(functools.partial(_shouted, "a")) != digest(other)
    scope: dict[str, Any] = {}
    exec("def f(*a, **k):\n    yield 'a'\ndef g(*a, **k):\n    yield 'b'\nf.__module__ = g.__module__ = ''\n", scope)
    scope["g"].__qualname__ = scope["f"].__qualname__
    assert digest(scope["f"]) != digest(scope["g"])


def test_digests_are_the_same_in_every_process_and_differ_by_name() -> None:
    assert DEEPSEEK_V32.digest != DEEPSEEK_V4.digest
    code = "from tokentrace.formats.deepseek import *; print(DEEPSEEK_V32.digest, DEEPSEEK_V4.digest)"
    for seed in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert done.stdout.split() == [DEEPSEEK_V32.digest, DEEPSEEK_V4.digest]
