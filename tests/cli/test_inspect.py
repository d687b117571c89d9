"""``tokentrace inspect``: the report, its JSON, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.audit.planted import SHAPES, clean, rollouts
from tokentrace.audit.dumps.shapes import NAMES
from tokentrace.cli import main
from tokentrace.cli.inspect import SHAPES as CHOICES
from tokentrace.pocket import POCKET


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, ["inspect", *map(str, args)])


def dump(folder: Path, told: Any, shape: str = "verl calls") -> Path:
    file = folder / "dump.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in SHAPES[shape](told, False)), encoding="utf-8")
    return file


def test_the_choices_are_the_shapes_that_are_known() -> None:
    assert CHOICES == NAMES


def test_breaks_are_listed_with_cause_place_diff_and_share(tmp_path: Path) -> None:
    result = run(dump(tmp_path, rollouts("pocket")), "-t", POCKET)
    assert result.exit_code == 0, result.output
    said = result.stdout
    assert "13 of 16 rollouts break (81.2 %), 13 times" in said
    assert "verl (calls of the server, one a line)" in said
    for words in ("boolean or None case", "6.2 %", "[ true][}}]", "to do: keep the"):
        assert words in said
    assert "tokens read again" in said
    assert "the same text in other tokens" in said
    assert "\x1b" not in said


def test_the_exit_code_is_for_ci(tmp_path: Path) -> None:
    broken = dump(tmp_path, rollouts("pocket"))
    assert run(broken, "-t", POCKET, "--fail-on", "breaks").exit_code == 1
    assert run(broken, "-t", POCKET, "--fail-on", "masks", "--fail-on", "logprobs").exit_code == 0
    fine = dump(tmp_path, clean("pocket"))
    result = run(fine, "-t", POCKET, "--fail-on", "any")
    assert (result.exit_code, "every prompt extends its stream" in result.stdout) == (0, True)
    fine.write_text(fine.read_text() + "{\n", encoding="utf-8")
    result = run(fine, "-t", POCKET)
    assert result.exit_code == 1
    assert "dump.jsonl, line 11: not valid JSON" in result.stdout
    assert run(tmp_path / "gone.jsonl").exit_code == 2


def test_json_says_it_all(tmp_path: Path) -> None:
    result = run(dump(tmp_path, rollouts("pocket")), "-t", POCKET, "--json")
    report = json.loads(result.stdout)
    assert (report["rollouts"], report["breaks"], report["samples"]) == (16, 13, 30)
    first = report["causes"][0]["examples"][0]
    assert {"rollout", "where", "position", "explained", "reprefilled", "lost"} <= first.keys()
    assert report["lengths"]["calls_per_rollout"]["most"] == 5


def test_causes_need_a_tokenizer_and_that_is_said(tmp_path: Path) -> None:
    result = run(dump(tmp_path, rollouts("pocket")))
    assert "no --tokenizer given: breaks are found, and not explained" in result.stderr
    assert "not looked into" in result.stdout
    said = " ".join(run("--help").stdout.split())
    assert "[default: what the folder of a run names, or none]" in said
    assert "[default: the embedded pocket model]" not in said


@pytest.mark.parametrize("shape", ["verl", "trl"])
def test_a_shape_can_be_said(tmp_path: Path, shape: str) -> None:
    result = run(dump(tmp_path, clean("pocket")), "--shape", shape, "-t", POCKET)
    assert result.exit_code == (0 if shape == "verl" else 2)
    assert ("none of what trl writes" in result.stderr) == (shape == "trl")


def test_logprobs_beside_the_embedded_engine(tmp_path: Path) -> None:
    result = run(dump(tmp_path, clean("pocket")[:1]), "-t", POCKET, "--engine", "embedded")
    assert "logprobs beside an engine's" in result.stdout, result.output
    assert "of 4 completions" in result.stdout


def test_quiet_says_nothing_but_what_failed(tmp_path: Path) -> None:
    fine = run(dump(tmp_path, clean("pocket")), "-t", POCKET, "-q", "--fail-on", "any")
    assert (fine.exit_code, fine.stdout, fine.stderr) == (0, "", "")
    broken = run(dump(tmp_path, rollouts("pocket")), "-t", POCKET, "-q", "--fail-on", "breaks")
    assert (broken.exit_code, broken.stdout) == (1, "")
    assert broken.stderr == "13 of 16 rollouts break (81.2 %), 13 times\n"


def test_one_rollout_breaks(tmp_path: Path) -> None:
    said = run(dump(tmp_path, [one for one in rollouts("pocket") if one.name == "json_format"]), "-t", POCKET).stdout
    assert "1 of 1 rollout breaks (100.0 %)" in said
