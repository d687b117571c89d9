"""``tokentrace tokenize``: files of conversations to rows, from the command line."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from tests.data.generate import conversations, write_conversations, write_lines
from tests.pages import read_page
from tokentrace import build_supervised_sample, create_renderer
from tokentrace.cli import main
from tokentrace.data.tables import read_metadata, read_samples
from tokentrace.pocket import POCKET

GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    return write_conversations(tmp_path / "chats.jsonl", 12, seed=1)


def invoke(*arguments: Any, **options: Any) -> Result:
    return CliRunner().invoke(main, ["tokenize", "-t", str(POCKET), *map(str, arguments)], **options)


def test_rows_are_written_and_counted(chats: Path, tmp_path: Path) -> None:
    result = invoke(chats, "-o", tmp_path / "rows.parquet", "--stats")
    assert result.exit_code == 0, result.output
    samples = list(read_samples(tmp_path / "rows.parquet"))
    tokens, trained = sum(map(len, samples)), sum(sample.trained for sample in samples)
    assert f"12 samples of 12 rows · {tokens:,} tokens, {trained:,} trained" in result.stdout
    for length in (min(map(len, samples)), max(map(len, samples))):
        assert f"{length:,}" in result.stdout
    assert not (tmp_path / "rows.bad.jsonl").exists()
    result = invoke("-", "-o", tmp_path / "stdin.parquet", input=json.dumps(GOOD) + "\n")
    assert "1 sample of 1 row" in result.stdout


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_rows_are_replaced_only_with_overwrite_and_never_by_no_rows(chats: Path, tmp_path: Path, name: str) -> None:
    output = tmp_path / name
    assert invoke(chats, "-o", output).exit_code == 0
    before = output.read_bytes()
    again = invoke(chats, "-o", output)
    assert (again.exit_code, "--overwrite" in again.stderr) == (2, True)
    bad = tmp_path / "bad.json"
    bad.write_text('[{"messages": []}, {"text": "no conversation"}]', encoding="utf-8")
    for options in ([], ["--overwrite"]):
        assert invoke(bad, "-o", output, *options).exit_code == 2
        assert output.read_bytes() == before
    reasons = [json.loads(line)["reason"] for line in (tmp_path / "rows.bad.jsonl").read_text().splitlines()]
    assert len(reasons) == 2
    none = invoke(bad, "-o", tmp_path / f"none-{name}")
    assert (none.exit_code, "no row gave a sample" in " ".join(none.stderr.split())) == (2, True)
    assert "has no messages" in none.stderr, "the first reason is told at once"
    assert [path.name for path in tmp_path.glob("none*")] == ["none-rows.bad.jsonl"]
    assert invoke(chats, "-o", output, "--overwrite", "--turns", "last").exit_code == 0
    assert output.read_bytes() != before


def test_options_reach_the_settings(chats: Path, tmp_path: Path) -> None:
    output = tmp_path / "rows.parquet"
    options = ["--turns", "last", "--parts", "content,stop", "--roles", "assistant,tool", "--past", "template"]
    options += ["--max-length", "900", "--overlong", "right", "--no-labels", "--kwargs", "enable_thinking=false"]
    assert invoke(chats, "-o", output, "-q", *options).exit_code == 0
    recorded = read_metadata(output)["settings"]
    expected = {
        "turns": "last",
        "parts": ["content", "stop"],
        "roles": ["assistant", "tool"],
        "past": "template",
        "max_length": 900,
        "overlong": "right",
        "labels": False,
        "template_kwargs": {"enable_thinking": False},
    }
    assert {name: recorded[name] for name in expected} == expected
    assert "labels" not in pq.read_schema(output).names


def test_show_prints_samples_and_rows_make_a_page(chats: Path, tmp_path: Path) -> None:
    result = invoke(chats, "--show", "2")
    assert result.exit_code == 0
    renderer = create_renderer(POCKET)
    for row in list(conversations(12, seed=1))[:2]:
        sample = build_supervised_sample(renderer, row["messages"])
        assert f"{len(sample):,} tokens, {sample.trained:,} trained" in result.stdout
    assert result.stdout.count("## ") == 2
    with chats.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "<script>x"}, *GOOD["messages"][1:]]}) + "\n")
    page = tmp_path / "rows.html"
    assert invoke(chats, "--show", "20", "--html", page).exit_code == 0
    text = page.read_text(encoding="utf-8")
    assert [track["means"] for track in read_page(text)["tracks"]] == ["trained"] * 13
    assert "<script>x" not in text


def test_errors_are_one_line_and_name_the_option_that_helps(chats: Path, tmp_path: Path) -> None:
    assert invoke(chats, "-o", tmp_path / "rows.parquet", "--parts", "feelings").exit_code == 2
    assert "name the file to write with -o" in invoke(chats).stderr
    assert "name it with -o" in invoke(chats, "--stats", "--show", "1").stderr
    assert "no file or folder" in invoke("./nothing.jsonl", "-o", tmp_path / "x.parquet").stderr


def test_an_interrupted_run_says_that_nothing_was_written(
    chats: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokentrace.data import job

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(job, "tokenize_files", interrupted)
    result = invoke(chats, "-o", tmp_path / "rows.parquet")
    assert result.exit_code == 130
    assert "nothing was written" in result.stderr


def test_bad_rows_have_a_file_and_their_most_frequent_reasons_are_printed_with_a_place(tmp_path: Path) -> None:
    alien = [{"messages": [{"role": f"alien{at}", "content": "x"}]} for at in range(3)]
    broken = [{"messages": []}, {"messages": []}, {"no": 1}, {"messages": [{"role": "user"}]}, {"messages": "x"}, "no"]
    chats = write_lines(tmp_path / "chats.jsonl", [*broken, *alien, GOOD])
    result = invoke(chats, "-o", tmp_path / "rows.jsonl")
    assert result.exit_code == 1
    assert len(list(read_samples(tmp_path / "rows.jsonl"))) == 1
    assert "9 rows gave no sample (8 InputError, 1 unreadable)" in result.stdout
    rows = [json.loads(line) for line in (tmp_path / "rows.bad.jsonl").read_text().splitlines()]
    assert [row["line"] for row in rows] == [*range(1, 10)]
    assert [row["line"] for row in rows if row["kind"] == "unreadable"] == [6]
    reasons = [line for line in result.stdout.splitlines() if " × " in line]
    assert len(reasons) == 5
    assert reasons[0].startswith("    3 × message 0, role: 'alien0' is not a known role")
    assert reasons[0].endswith("chats.jsonl, row 7)")
    assert reasons[1].startswith("    2 × ")
