"""The command line: hints for typos, completion, colours, JSON for every table, and models that cannot be loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from tests.cli.test_cli import MESSAGES, written
from tests.diagnose.planted import SHAPES, rollouts
from tokentrace import load_tokenizer
from tokentrace.cli import COMMANDS, main
from tokentrace.errors import TokenizerError
from tokentrace.formats.dialects import DIALECTS
from tokentrace.formats.families import FAMILIES
from tokentrace.pocket import EXAMPLE, POCKET

NAMES = [family.name for family in FAMILIES]


def run(*args: Any, color: bool = False, **env: str) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], color=color, env=env or None)


# -- typos


def test_the_module_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "tokentrace", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tokentrace, version ")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["tokenise", "x"], "'tokenise'"),
        (["render", EXAMPLE, "--tokeniser", "x"], "--tokenizer"),
        (["families", "qwen33"], "did you mean 'qwen3'?"),
        (["render", EXAMPLE, "--renderer", "gpt-os"], "did you mean 'gpt_oss'?"),
    ],
    ids=["command", "option", "family", "renderer"],
)
def test_a_name_that_is_not_there_has_a_hint(args: list[Any], said: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert said in result.stderr


# -- completion


def completed(*words: str) -> list[str]:
    found = ShellComplete(main, {}, "tokentrace", "_TOKENTRACE_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else item.type for item in found]


def test_commands_families_and_dialects_are_completed() -> None:
    assert completed("ch") == ["check"]
    assert completed("render", "--renderer", "") == ["auto", "default", *NAMES]
    assert completed("render", "--renderer", "glm") == [name for name in NAMES if name.startswith("glm")]
    assert completed("families", "kimi") == [name for name in NAMES if name.startswith("kimi")]
    assert completed("audit", "--tool-parser", "he") == [name for name in DIALECTS if name.startswith("he")]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_its_options(command: str) -> None:
    assert "--debug" in completed(command, "--de")


def test_models_are_completed_as_folders_and_inputs_as_files() -> None:
    assert completed("render", "-t", "./") == completed("audit", "./") == ["dir"]
    for command in ("check", "view", "export", "render"):
        assert completed(command, "./") == ["file"]


# -- colours


@pytest.fixture
def dump(tmp_path: Path) -> Path:
    lines = SHAPES["calls lines"](rollouts("pocket")[:3], False)
    return written(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "dump.jsonl")


def tables(tmp_path: Path, dump: Path) -> dict[str, list[Any]]:
    """A call of every command that prints a table or a view and needs no server."""
    chats = written(tmp_path, json.dumps({"messages": MESSAGES}) + "\n", "chats.jsonl")
    rows = tmp_path / "rows.parquet"
    return {
        "families": ["families"],
        "families NAME": ["families", "qwen3"],
        "render": ["render", EXAMPLE],
        "audit --on": ["audit", "--on", EXAMPLE],
        "audit --grammar": ["audit", "--grammar"],
        "check rollouts": ["check", dump, "-t", POCKET],
        "tokenize": ["tokenize", chats, "-o", rows, "-t", POCKET, "--overwrite", "--stats"],
        "check": ["check", rows],
        "audit": ["audit", POCKET],
        "demo": ["demo", "-n", "1", "-o", tmp_path / "demo"],
    }


def test_no_color_is_heeded_everywhere(tmp_path: Path, dump: Path) -> None:
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
    coloured = 0
    for name, args in (*tables(tmp_path, dump).items(), ("error", ["families", "nobody"])):
        bright = run(*args, color=True, NO_COLOR="", **terminal)
        plain = run(*args, color=True, NO_COLOR="1", **terminal)
        assert bright.exit_code == plain.exit_code, name
        assert "\x1b[" not in plain.stdout, name
        assert not any(code in plain.stderr for code in ("\x1b[1m", "\x1b[2m", "\x1b[3", "\x1b[9")), name
        coloured += "\x1b[" in bright.stdout + bright.stderr
    assert coloured >= 10


# -- JSON


def test_every_table_can_be_had_as_json(tmp_path: Path, dump: Path) -> None:
    for name, args in tables(tmp_path, dump).items():
        result = run(*args, "--json")
        assert result.exit_code in (0, 1), (name, result.output)
        assert json.loads(result.stdout), name


# -- models


def test_pocket_is_a_name_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket").mkdir()  # a folder of that name without a tokenizer is not meant
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("pocket").digest == load_tokenizer(POCKET).digest
    assert run("render", EXAMPLE, "-t", "pocket").stdout == run("render", EXAMPLE).stdout


@pytest.mark.parametrize(
    ("error", "words"),
    [
        ("LocalEntryNotFoundError", "the hub could not be reached"),
        ("OfflineModeIsEnabled", "the hub could not be reached"),
        ("RepositoryNotFoundError", "the hub has no such model, or it needs a login"),
        ("GatedRepoError", "the hub requires a login for it"),
        ("RevisionNotFoundError", "the hub has no such revision of it"),
        ("HFValidationError", "that is not the name of a model on the hub"),
    ],
)
def test_a_model_that_cannot_be_fetched(error: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    long = "Got: ConnectError: [Errno -2] Name or service not known\nand a page of advice"

    def download(*_: Any, **__: Any) -> str:
        raise type(error, (Exception,), {})(long)

    hub = types.SimpleNamespace(snapshot_download=download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer("someone/something")
    assert str(caught.value) == f"'someone/something' is not a folder here, and {words}"


def test_a_tokenizer_that_the_library_does_not_know(tmp_path: Path) -> None:
    spec = json.loads((POCKET / "tokenizer.json").read_text(encoding="utf-8")) | {"pre_tokenizer": {"type": "Nope"}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec), encoding="utf-8")
    with pytest.raises(TokenizerError) as caught:
        load_tokenizer(tmp_path).encode("x")
    assert "untagged enum" not in str(caught.value)
    assert "tokenizers" in str(caught.value)
