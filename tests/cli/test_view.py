"""Pages from the command line: trajectories, rows, and the results of checks."""

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.pages import assert_only_its_own_code_runs, columns, read_page
from tests.show.results import first_turn, trajectory
from tokentrace import trajectory_samples
from tokentrace.cli import main
from tokentrace.data.tables import write_samples
from tokentrace.pocket import POCKET


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def page(path: Path) -> dict[str, Any]:
    text = path.read_text(encoding="utf-8")
    assert_only_its_own_code_runs(text)
    return read_page(text)


def test_a_trajectory_is_viewed_with_its_tree(tmp_path: Path) -> None:
    trajectory().save(tmp_path / "one.tt")
    result = run("view", tmp_path / "one.tt", "-t", POCKET, "--html", tmp_path / "page.html")
    assert result.exit_code == 0, result.output
    document = page(tmp_path / "page.html")
    assert columns(document, 1)["id"] == trajectory().stream(1).tolist()
    assert len(document["branches"]) == 2
    assert document["title"] == "one.tt · pocket"


def test_rows_are_viewed_and_a_browser_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", opened.append)
    rows = trajectory_samples(trajectory(), reward=1.0)
    write_samples(tmp_path / "rows.parquet", rows)
    assert run("view", tmp_path / "rows.parquet", "-t", POCKET, "--rows", 1).exit_code == 0
    document = page(Path(opened[0]))
    assert columns(document, 0)["id"] == rows[0].token_ids
    assert len(document["tracks"]) == 1
    (tmp_path / "others.jsonl").write_text('{"input_ids": [1, 2], "labels": [-100, 2]}\n')
    assert run("view", tmp_path / "others.jsonl", "--html", tmp_path / "page.html").exit_code == 0
    assert columns(page(tmp_path / "page.html"), 0)["id"] == [1, 2]


@pytest.mark.parametrize("name", ["rows.parquet", "rows.jsonl"])
def test_ids_of_another_tokenizer_are_not_spelled_with_the_embedded_one(tmp_path: Path, name: str) -> None:
    metadata = {"tokenizer": "Qwen/Qwen3-8B", "tokenizer_sha256": "ab" * 32}
    write_samples(tmp_path / name, trajectory_samples(trajectory()), metadata)
    command = ("view", tmp_path / name, "--html", tmp_path / "page.html")
    result = run(*command)
    assert result.exit_code == 2
    assert f"{name} was made with the tokenizer Qwen/Qwen3-8B" in result.output
    assert "with -t" in result.output
    assert not (tmp_path / "page.html").exists()
    result = run(*command, "-t", POCKET)
    assert (result.exit_code, "the texts on the page may be wrong" in result.output) == (0, True)


def test_view_and_check_read_the_files_of_other_commands(tmp_path: Path) -> None:
    """Files for trainers, the output folder of a run, and its rows."""
    pytest.importorskip("pyarrow")
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n", encoding="utf-8")
    for name in ("trl.jsonl", "trl.parquet"):
        assert run("tokenize", chats, "-o", tmp_path / name, "-t", "pocket", "--for", "trl", "-q").exit_code == 0
    (tmp_path / "run.yaml").write_text(
        "engine: {kind: embedded}\ntokenizer: pocket\ndata: {questions: {count: 1, seed: 0}}\n"
        "budget: {turns: 4}\noutput: run\n",
        encoding="utf-8",
    )
    assert run("rollout", tmp_path / "run.yaml", "-o", tmp_path / "run", "-q").exit_code == 0
    for name in ("trl.jsonl", "trl.parquet", "run", "run/rows.parquet"):
        checked = run("check", tmp_path / name)
        assert checked.exit_code == 0, (name, checked.output)
        viewed = run("view", tmp_path / name, "--html", tmp_path / "page.html")
        assert viewed.exit_code == 0, (name, viewed.output)
        assert page(tmp_path / "page.html")["tracks"]


def test_a_break_a_check_and_an_inspection_make_pages(tmp_path: Path) -> None:
    prompt, completion = first_turn()
    (tmp_path / "stream.json").write_text(json.dumps(prompt + completion))
    (tmp_path / "next.json").write_text(json.dumps(prompt + completion[:4] + completion[6:]))
    args = ["check", tmp_path / "stream.json", "--prompt", tmp_path / "next.json", "-t", POCKET]
    assert run(*args, "--html", tmp_path / "break.html").exit_code == 1
    assert len(page(tmp_path / "break.html")["contrasts"]) == 1
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input_ids": prompt, "messages": messages}) + "\n")
    assert run("check", tmp_path / "rows.jsonl", "-t", POCKET, "--html", tmp_path / "check.html").exit_code == 1
    assert page(tmp_path / "check.html")["contrasts"]
    trajectory().save(tmp_path / "one.tt")
    assert run("check", tmp_path / "one.tt", "-t", POCKET, "--html", tmp_path / "inspect.html").exit_code == 1
    assert len(page(tmp_path / "inspect.html")["contrasts"]) == 1
