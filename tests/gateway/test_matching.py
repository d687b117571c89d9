"""Matchers: built-in ones by name, and the operator's own functions."""

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.diagnose.test_message_keys import assistant, key, user
from tokentrace.errors import InputError
from tokentrace.gateway.matching import load_matcher
from tokentrace.gateway.requests import RequestError

CUSTOM = """
def words(message):
    return [word for word in str(message.get("content")).split() if not word.startswith("#")]

def broken(message):
    return 1 / 0

def foreign(message):
    return {1, 2}

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "own.py").write_text(CUSTOM, encoding="utf-8")
    return tmp_path


def test_a_custom_function_decides_what_counts(folder: Path) -> None:
    matcher = load_matcher("./own.py:words", folder)
    assert key(user("hello  there #12"), means=matcher) == key(user("hello there #13"), means=matcher)
    assert key(user("hello there"), means=matcher) != key(user("hello you"), means=matcher)
    assert key(user("hello"), means=matcher) != key(assistant("hello"), means=matcher), "the role counts all the same"


@pytest.mark.parametrize("name", ["broken", "foreign"])
def test_a_function_that_fails_says_which(folder: Path, name: str) -> None:
    with pytest.raises(RequestError, match=rf"own\.py:{name} failed on a message: \w+Error") as raised:
        key(user("x"), means=load_matcher(f"./own.py:{name}", folder))
    assert raised.value.status == 500


@pytest.mark.parametrize("name", ["loose", "", "./own.py:nobody", "./own.py:number", "nowhere_at_all:f"])
def test_a_matcher_that_does_not_exist_is_refused(folder: Path, name: str) -> None:
    with pytest.raises(InputError):
        load_matcher(name, folder)


def test_the_example_of_the_guide() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
    example = next(block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "without_clock" in block)
    names: dict[str, Any] = {}
    exec(textwrap.dedent(example), names)
    matcher = names["without_clock"]
    assert key(user("[10:31] hello"), means=matcher) == key(user("[10:32] hello"), means=matcher)
    assert key(user("[10:31] hello"), means=matcher) != key(user("[10:31] hallo"), means=matcher)
