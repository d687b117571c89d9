"""``tokentrace check``: what it reads and prints, and what its exit code says."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from tests.data.generate import write_conversations
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import build_supervised_sample

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "It is four."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]
RENDERER = create_renderer(POCKET)
SAMPLE = build_supervised_sample(RENDERER, MESSAGES)
ROW: dict[str, Any] = {"messages": MESSAGES, "input_ids": SAMPLE.token_ids, "loss_mask": SAMPLE.loss_mask}


def run(*args: Any, **env: str) -> Result:
    return CliRunner().invoke(main, ["check", *(str(arg) for arg in args)], env=env or None)


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return lines(tmp_path / "good.jsonl", ROW, ROW)


@pytest.fixture
def poor(tmp_path: Path) -> Path:
    doubled = {**ROW, "input_ids": [SAMPLE.token_ids[0], *SAMPLE.token_ids], "loss_mask": [0, *SAMPLE.loss_mask]}
    untrained = {**ROW, "loss_mask": [*SAMPLE.loss_mask[:-1], 0]}
    return lines(tmp_path / "poor.jsonl", ROW, doubled, untrained, {"text": "no ids"})


def test_rows_that_are_all_the_same_are_0(good: Path) -> None:
    result = run(good, "-t", POCKET)
    assert result.exit_code == 0
    assert result.stdout.startswith("✓ all 2 rows are what the template gives: ids and mask\n")
    assert result.stderr == ""
    assert "pocket" in run(good).stderr


def test_rows_that_differ_are_1_and_told_with_place_and_tokens(poor: Path) -> None:
    result = run(poor, "-t", POCKET)
    assert result.exit_code == 1
    shown = result.stdout
    assert shown.startswith("✗ 3 of 4 rows are not what the template gives\n")
    assert "\x1b" not in shown
    for said in ("outcome", "BOS token doubled", "not trained, and should be", "the row holds no ids"):
        assert said in shown
    assert f"{poor}, row 2: ids differ" in shown
    assert "expected  <|bos|>│⟦⟧│<|turn|>│user│\\n" in shown
    assert "found     <|bos|>│⟦<|bos|>⟧│<|turn|>│user│\\n" in shown
    assert f"token {len(SAMPLE) - 1}: stop token of 1 assistant turn not trained (1 token)" in shown
    coloured = run(poor, "-t", POCKET, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="90")
    assert coloured.exit_code == 1
    assert "BOS token doubled" in coloured.stdout


def test_json_and_the_report_file_say_the_same(poor: Path, tmp_path: Path) -> None:
    result = run(poor, "-t", POCKET, "--json", "-o", tmp_path / "report.json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["outcomes"] == {"same": 1, "ids differ": 1, "mask differs": 1, "bad": 1}
    assert report["causes"] == {"BOS token doubled": 1}
    assert report["mask"] == [
        {"role": "assistant", "part": "stop", "trained": False, "tokens": 1, "messages": 1, "rows": 1}
    ]
    assert report["examples"]["ids differ"][0]["position"] == 1
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8")) == report
    written = run(poor, "-t", POCKET, "-o", tmp_path / "report.txt")
    assert (tmp_path / "report.txt").read_text(encoding="utf-8") == written.stdout


def test_a_file_of_ours_is_checked_with_its_own_settings(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write_conversations(tmp_path / "chats.jsonl", 5)
    out = tmp_path / "rows.parquet"
    made = ["tokenize", str(tmp_path / "chats.jsonl"), "-o", str(out), "-t", str(POCKET), "-q", "--turns", "last"]
    assert CliRunner().invoke(main, made).exit_code == 0
    given = (out, "-t", POCKET, "--source", tmp_path / "chats.jsonl")
    assert run(*given).exit_code == 0
    other = run(*given, "--turns", "all")
    assert other.exit_code == 1
    assert "made with other settings: turns" in other.stdout
    assert "mask differs" in other.stdout


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize("packed", [False, True])
def test_a_file_of_ours_finds_its_own_source(
    suffix: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the check is run, and wherever both were moved to together."""
    pytest.importorskip("pyarrow")
    (tmp_path / "here" / "data").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here" / "data")
    write_conversations(Path("chats.jsonl"), 5)
    if packed:
        Path("chats.jsonl.gz").write_bytes(gzip.compress(Path("chats.jsonl").read_bytes()))
        Path("chats.jsonl").unlink()
    given = "chats.jsonl.gz" if packed else "chats.jsonl"
    made = ["tokenize", given, "-o", f"../rows{suffix}", "-t", str(POCKET), "-q", "--turns", "last"]
    assert CliRunner().invoke(main, made).exit_code == 0
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").rename(tmp_path / "there")
    result = run(tmp_path / "there" / f"rows{suffix}", "-t", POCKET)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("✓ all 5 rows are what the template gives: ids and mask\n")


def test_a_source_that_is_gone_or_changed_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    chats, out = tmp_path / "chats.jsonl", tmp_path / "rows.parquet"
    write_conversations(chats, 5)
    assert CliRunner().invoke(main, ["tokenize", str(chats), "-o", str(out), "-t", str(POCKET), "-q"]).exit_code == 0
    before, time = chats.read_bytes(), chats.stat().st_mtime_ns
    chats.write_bytes(before.replace(b"river", b"RIVER"))
    os.utime(chats, ns=(time, time))
    changed = run(out, "-t", POCKET)
    assert changed.exit_code == 1
    assert "has changed since" in changed.stdout
    assert "ids differ" in changed.stdout
    assert "has changed since" in run(out, "-t", POCKET, "--source", chats).stdout
    chats.rename(tmp_path / "moved.jsonl")
    gone = run(out, "-t", POCKET)
    assert gone.exit_code == 1
    assert "is not there any more: give it with --source" in " ".join(gone.stdout.split())
    assert "unchecked" in gone.stdout
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "chats.jsonl").write_bytes(before)
    assert run(out, "-t", POCKET, "--source", tmp_path / "elsewhere" / "chats.jsonl").exit_code == 0


def test_rows_of_stdin_say_that_their_source_is_no_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    out = tmp_path / "rows.jsonl"
    text = json.dumps({"messages": MESSAGES}) + "\n"
    made = CliRunner().invoke(main, ["tokenize", "-", "-o", str(out), "-t", str(POCKET), "-q"], input=text)
    assert made.exit_code == 0, made.output
    result = run(out, "-t", POCKET)
    assert result.exit_code == 1
    assert "made of stdin, which is not a file: give it with --source" in " ".join(result.stdout.split())


def test_rows_that_cannot_be_checked_are_1_unless_they_are_allowed(tmp_path: Path) -> None:
    path = lines(tmp_path / "bare.jsonl", {"input_ids": SAMPLE.token_ids, "loss_mask": SAMPLE.loss_mask})
    result = run(path, "-t", POCKET)
    assert result.exit_code == 1
    assert result.stdout.startswith("• 1 of 1 rows have no conversation to compare them with\n")
    assert run(path, "-t", POCKET, "--allow-unchecked").exit_code == 0
    wrong = lines(tmp_path / "wrong.jsonl", {"input_ids": SAMPLE.token_ids, "loss_mask": [1] * len(SAMPLE)})
    assert run(wrong, "-t", POCKET, "--allow-unchecked").exit_code == 1


def test_options_reach_the_check(tmp_path: Path) -> None:
    template = tmp_path / "plain.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}{{ mark }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    source = template.read_text(encoding="utf-8")
    renderer = create_renderer(POCKET, "default", chat_template=source, lost="ignore", mark="!")
    sample = build_supervised_sample(renderer, MESSAGES, roles=["assistant", "user"], parts=["content"])
    labels = np.where(sample.mask, sample.ids, -100).tolist()
    pad = renderer.tokenizer.token_id("<|turn|>")
    row = {"talk": MESSAGES, "x": [pad, pad, *sample.token_ids], "y": [-100, -100, *labels]}
    path = lines(tmp_path / "rows.jsonl", row, {"x": 1})
    given: list[Any] = [path, "-t", POCKET, "--renderer", "default", "--chat-template", template, "--kwargs", "mark=!"]
    given += ["--ids-column", "x", "--mask-column", "y", "--messages-column", "talk", "--limit", 1]
    given += ["--roles", "assistant,user", "--parts", "content", "--pad-token", "<|turn|>"]
    result = run(*given)
    assert result.exit_code == 0, result.output
    assert "2 of padding taken off" in result.stdout
    assert "stopped after 1 row, as the limit says" in result.stdout


def test_errors_are_2(good: Path, tmp_path: Path) -> None:
    assert run().exit_code == 2
    absent = run(tmp_path / "absent.jsonl", "-t", POCKET)
    assert absent.exit_code == 2
    assert absent.stderr.startswith("error: there is no file or folder")
    assert run(good, "-t", POCKET, "--parts", "colour").exit_code == 2
    assert run(good, "-t", POCKET, "--pad-token", "nothing").exit_code == 2
    assert run(good, "-t", POCKET, "--source", tmp_path / "absent.jsonl").exit_code == 2


def test_no_rows_are_1(tmp_path: Path) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("", encoding="utf-8")
    result = run(empty, "-t", POCKET)
    assert (result.exit_code, "there are no rows" in result.stdout) == (1, True)


def test_help_says_what_the_exit_code_means() -> None:
    shown = " ".join(run("--help").stdout.split())
    assert "0 if every row is the same" in shown
    assert "Examples:" in shown
