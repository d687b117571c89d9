"""The command line: input and output, errors, completion, colours, JSON for every table, the examples."""

import importlib.util
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner, Result

from tests.diagnose.planted import SHAPES, rollouts
from tests.pages import Page, assert_only_its_own_code_runs
from tokentrace import InputError, create_renderer, load_tokenizer
from tokentrace.cli import COMMANDS, main
from tokentrace.data.tables import read_samples
from tokentrace.formats.dialects import DIALECTS
from tokentrace.formats.families import FAMILIES
from tokentrace.pocket import EXAMPLE, POCKET
from tokentrace.trajectory.storage import load_trajectory

MESSAGES = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
CONSOLE_SCRIPT = Path(sys.executable).parent / "tokentrace"
ROOT = Path(__file__).parents[2]
NAMES = [family.name for family in FAMILIES]


def run(*args: Any, stdin: str | None = None, color: bool = False, **env: str) -> Result:
    return CliRunner().invoke(main, [str(arg) for arg in args], input=stdin, color=color, env=env or None)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write_file(tmp_path, MESSAGES, "chat.json")


def write_file(tmp_path: Path, value: Any, name: str = "given.json") -> Path:
    path = tmp_path / name
    path.write_text(value if isinstance(value, str) else json.dumps(value), encoding="utf-8")
    return path


# -- render


def test_json_holds_what_the_library_renders_and_pocket_is_the_default(chat: Path) -> None:
    result = run("render", chat, "--tokenizer", POCKET, "--format", "json")
    assert (result.exit_code, result.stderr) == (0, "")
    view, expected = json.loads(result.stdout), create_renderer(POCKET).render(MESSAGES)
    assert (view["token_ids"], view["sampled"]) == (expected.token_ids, expected.sampled)
    default = run("render", chat, "-f", "json")
    assert "pocket" in default.stderr
    assert default.stdout == result.stdout
    assert "sampled by the model" in run("render", chat, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="90").stdout


def test_open_shows_the_page(chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", opened.append)
    out = tmp_path / "report.html"
    assert run("render", chat, "-o", out, "--open").exit_code == 0
    assert run("render", chat, "--open").exit_code == 0
    assert opened[0] == str(out)
    Page(Path(opened[1]).read_text(encoding="utf-8"))
    assert run("render", chat, "-f", "json", "--open").exit_code == 2


def test_messages_are_read_from_an_object_from_stdin_and_from_lines(tmp_path: Path) -> None:
    row = {"messages": MESSAGES, "tools": json.loads(EXAMPLE.read_text(encoding="utf-8"))["tools"]}
    text = json.dumps(row)
    expected = create_renderer(POCKET).render(MESSAGES, tools=row["tools"]).token_ids
    other = json.dumps([{"role": "user", "content": "another"}])
    for result in (
        run("render", write_file(tmp_path, row), "-f", "json"),
        run("render", "-", "-f", "json", stdin=text),
        (first := run("render", write_file(tmp_path, f"{text}\n\n{other}\n", "rows.jsonl"), "-f", "json")),
        run("render", write_file(tmp_path, f"{other}\n{text}\n", "rows.jsonl"), "-f", "json", "--index", 1),
        run("render", "-", "-f", "json", "--index", "-1", stdin=f"{other}\n{text}"),
    ):
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout)["token_ids"] == expected
        assert ("conversation 1 of 2; --index chooses another" in result.stderr) == (result is first)


def test_options_reach_the_renderer(chat: Path, tmp_path: Path) -> None:
    prompted = run("render", chat, "-g", "--kwargs", "enable_thinking=false", "-f", "json")
    assert json.loads(prompted.stdout)["text"].endswith("<|turn|>assistant\n<think>\n\n</think>\n\n")
    template = write_file(tmp_path, "{% for m in messages %}{{ m.content }}/{% endfor %}", "own.jinja")
    custom = run("render", chat, "--chat-template", template, "--renderer", "default", "-f", "json")
    assert json.loads(custom.stdout)["text"] == "2+2?/4/"
    assert run("render", chat, "--past", "patched", "--lost", "error", "-f", "json").exit_code == 0


# -- errors


def test_an_error_is_one_line_that_names_message_and_field_and_debug_shows_the_traceback(tmp_path: Path) -> None:
    path = write_file(tmp_path, [*MESSAGES, {"role": "user", "content": 3}])
    result = run("render", path, "-t", POCKET)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: message 2, content: ")
    assert result.stderr.count("\n") == 1
    for args in (("--debug", "render", path), ("render", path, "--debug")):
        assert isinstance(run(*args).exception, InputError)


@pytest.mark.parametrize(
    ("name", "content", "options", "words"),
    [
        ("chat.json", b'[\n  {"role": user}\n]', [], "chat.json, line 2, column 12: not valid JSON"),
        ("chat.json", b"", [], "chat.json, line 1, column 1: not valid JSON"),
        ("chat.json", b"[{", [], "chat.json, line 1, column 3: not valid JSON"),
        ("chat.json", b"[" * 100_000, [], "nested too deeply"),
        ("chat.json", b"[" + b"1" * 5_000 + b"]", [], "a number is too long"),
        ("chat.json", b'["\xe9"]', [], "not UTF-8: invalid byte 2"),
        ("chat.json", b'{"a": 1}\n{"a": 2}\n', [], "--index"),
        ("chat.json", b"[\n]", ["--index", 0], "--index chooses from JSON Lines"),
        ("chat.json", b"[]", ["--kwargs", "past=preserve"], "'past' is a setting, not a template variable"),
        ("chat.json", b'{"chat": []}', [], "needs 'messages'"),
        ("rows.jsonl", b'[]\n\n[{"role"}]\n', ["--index", 1], "line 3, column 9: not valid JSON"),
        ("rows.jsonl", b'[]\n\n[{"role"}]\n', ["--index", 2], "there is no conversation 2; it has 2"),
        ("chat.json", b"[]", ["-t", "./absent"], "absent"),
        ("chat.json", b"[]", ["--tokeniser", "x"], "--tokenizer"),
        ("chat.json", b"[]", ["--renderer", "gpt-os"], "there is no renderer 'gpt-os'; there are auto, "),
    ],
)
def test_input_that_cannot_be_rendered_is_named(
    name: str, content: bytes, options: list[Any], words: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    result = run("render", tmp_path / name, *options)
    assert (result.exit_code, words in result.stderr) == (2, True), result.output


# -- families, demo, help


def test_families_are_listed_and_each_shows_its_grammar() -> None:
    table, rows = run("families").stdout, json.loads(run("families", "--json").stdout)
    assert [row["name"] for row in rows] == NAMES
    assert json.loads(run("families", FAMILIES[0].name, "--json").stdout) == rows[0]
    for family in FAMILIES:
        assert family.name in table
        result = run("families", family.name, COLUMNS="400")
        assert family.models in result.stdout
        assert family.answer.split("\n")[0] in result.stdout


def test_the_demo_of_rendering_shows_writes_and_explains(tmp_path: Path) -> None:
    out = tmp_path / "demo" / "example.html"
    result = run("demo", "--render", "-o", out.parent)
    assert result.exit_code == 0
    assert "247 of 621 tokens are sampled" in result.stdout
    assert (
        "the user typed <|end|> <|turn|> <|end|>. It stayed text: 0 of its tokens are control tokens" in result.stdout
    )
    assert_only_its_own_code_runs(out.read_text(encoding="utf-8"))


def test_the_demo_compares_paths_and_writes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    result = run("demo", "--rollouts", 1, "--seed", 3, "-o", out, COLUMNS="100")
    assert result.exit_code == 0, result.output
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert (summary["seed"], list(summary["paths"])) == (3, ["re-render", "fixed base", "tokentrace"])
    ours = summary["paths"]["tokentrace"]
    assert (ours["rollouts"], ours["breaks"], ours["samples"], ours["mismatched_tokens"]) == (1, 0, 1, 0)
    assert ours["largest_logprob_gap"] < 1e-4
    assert_only_its_own_code_runs((out / "report.html").read_text(encoding="utf-8"))
    assert all(remark in result.stdout for remark in summary["remarks"])
    for path, row in summary["paths"].items():
        stored = [
            load_trajectory(file).trajectory for file in (out / "trajectories" / path.replace(" ", "-")).iterdir()
        ]
        assert len(stored) == 1
        assert sum(one.num_samples for one in stored) == row["samples"]
        assert f"{row['samples']} from 1" in result.stdout
    rows = list(read_samples(out / "rows.parquet"))
    assert sum(row.trained for row in rows) == ours["sampled_tokens"]
    for name in ("rows.parquet", "trajectories", "report.html"):
        assert str(out / name) in result.stderr
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert json.loads(run("demo", "-n", 1, "-o", out, "--json").stdout)["seed"] == 0
    assert len(list((out / "trajectories").rglob("*.tt"))) == 3, "those of the run before are replaced"
    row = json.loads((out / "rows.jsonl").read_text(encoding="utf-8"))
    assert [value is not None for value in row["logprobs"]] == row["loss_mask"]


def test_every_command_has_help_and_a_wrong_name_a_hint() -> None:
    top = run("--help")
    for name, about in COMMANDS.items():
        assert about in top.stdout
        assert "--debug" in run(name, "--help").stdout
    assert "Examples:" in run("render", "-h").stdout
    hints = {"tokenise": "'tokenise'", "families qwen33": "there are qwen3,", "render absent.json": "not exist"}
    for words, hint in hints.items():
        result = run(*words.split())
        assert (result.exit_code, hint in result.stderr) == (2, True), result.output


def test_the_console_script_runs(chat: Path) -> None:
    version = subprocess.run([CONSOLE_SCRIPT, "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("tokentrace, version ")
    rendered = subprocess.run([CONSOLE_SCRIPT, "render", chat], capture_output=True, text=True, check=True)
    assert "\x1b" not in rendered.stdout + rendered.stderr
    failed = subprocess.run([CONSOLE_SCRIPT, "render", "-"], input="{", capture_output=True, text=True, check=False)
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.startswith("error: stdin, line 1, column 2")


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.stem)
def test_examples_run_and_are_short(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60


# -- completion


def completed(*words: str) -> list[str]:
    items = ShellComplete(main, {}, "tokentrace", "_TOKENTRACE_COMPLETE").get_completions(list(words[:-1]), words[-1])
    return [item.value if item.type == "plain" else item.type for item in items]


def test_commands_options_families_dialects_and_paths_are_completed() -> None:
    assert completed("ch") == ["check"]
    assert completed("render", "--renderer", "") == ["auto", "default", *NAMES]
    assert completed("render", "--renderer", "glm") == [name for name in NAMES if name.startswith("glm")]
    assert completed("families", "kimi") == [name for name in NAMES if name.startswith("kimi")]
    assert completed("audit", "--tool-parser", "he") == [name for name in DIALECTS if name.startswith("he")]
    assert all("--debug" in completed(command, "--de") for command in COMMANDS)
    assert completed("render", "-t", "./") == ["file"]
    assert all(completed(command, "./") == ["file"] for command in ("audit", "check", "view", "export", "render"))


# -- colours and JSON


def test_every_table_prints_without_colours_and_as_json(tmp_path: Path) -> None:
    """Run every command that prints a table or a view and needs no server."""
    lines = SHAPES["calls lines"](rollouts("pocket")[:3], False)
    dump = write_file(tmp_path, "".join(json.dumps(line) + "\n" for line in lines), "dump.jsonl")
    chats = write_file(tmp_path, json.dumps({"messages": MESSAGES}) + "\n", "chats.jsonl")
    rows, slow = tmp_path / "rows.parquet", (["audit", POCKET],)
    commands: list[list[Any]] = [
        ["families"],
        ["families", "qwen3"],
        ["render", EXAMPLE],
        ["audit", "--on", EXAMPLE],
        ["audit", "--grammar"],
        ["check", dump, "-t", POCKET],
        ["tokenize", chats, "-o", rows, "-t", POCKET, "--overwrite", "--stats"],
        ["check", rows],
        *slow,
        ["families", "nobody"],
    ]
    terminal = {"FORCE_COLOR": "1", "TERM": "xterm-256color", "COLUMNS": "120"}
    coloured = 0
    for args in commands:
        if args in slow:
            assert json.loads(run(*args, "--json").stdout), args
            continue
        plain = run(*args, color=True, NO_COLOR="1", **terminal)
        assert "\x1b[" not in plain.stdout, args
        assert not any(code in plain.stderr for code in ("\x1b[1m", "\x1b[2m", "\x1b[3", "\x1b[9")), args
        result = run(*args, "--json")
        assert result.exit_code == plain.exit_code, (args, result.output)
        assert args[-1] == "nobody" or json.loads(result.stdout), args
        bright = run(*args, color=True, NO_COLOR="", **terminal)
        coloured += "\x1b[" in bright.stdout + bright.stderr
    assert coloured >= len(commands) - len(slow) - 1


# -- models


def test_pocket_is_a_name_of_the_embedded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pocket").mkdir()  # a folder of that name without a tokenizer is ignored
    monkeypatch.chdir(tmp_path)
    assert load_tokenizer("pocket").digest == load_tokenizer(POCKET).digest
    assert run("render", EXAMPLE, "-t", "pocket").stdout == run("render", EXAMPLE).stdout
