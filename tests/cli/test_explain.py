"""``tokentrace explain``: two lists of ids, or a trajectory file and a prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tokentrace import Trajectory, create_renderer, save_trajectory
from tokentrace.cli import main
from tokentrace.pocket import POCKET

ASKED = [{"role": "user", "content": "2+2?"}]
ANSWER = {"role": "assistant", "content": "four"}
MORE = {"role": "user", "content": "Sure?"}
RENDERER = create_renderer(POCKET)
PROMPT = RENDERER.render_ids(ASKED, add_generation_prompt=True)
LETTERS = [index for letter in "four" for index in RENDERER.tokenizer.encode(letter).tolist()]
SAMPLED = [*LETTERS, *RENDERER.tokenizer.encode("<|end|>").tolist()]
AGAIN = RENDERER.render_ids([*ASKED, ANSWER, MORE], add_generation_prompt=True)
FIRST = next(at for at, pair in enumerate(zip(PROMPT + SAMPLED, AGAIN, strict=False)) if pair[0] != pair[1])


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, ["explain", *map(str, args)])


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """A trajectory file with one turn, sampled letter by letter."""
    trajectory = Trajectory(logprobs=False)
    trajectory.begin(PROMPT)
    trajectory.append_completion(SAMPLED, None, finish_reason="stop")
    save_trajectory(trajectory, tmp_path / "rollout.tt")
    return tmp_path / "rollout.tt"


def written(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def test_a_prompt_that_was_encoded_again_is_explained(record: Path, tmp_path: Path) -> None:
    result = run(record, written(tmp_path / "next.json", AGAIN))
    assert result.exit_code == 1
    assert f"break at token {FIRST}" in result.output
    assert "BPE re-merge" in result.output


def test_a_prompt_that_extends_the_stream_is_no_break(record: Path, tmp_path: Path) -> None:
    bridged = RENDERER.bridge_to_next_turn(PROMPT, SAMPLED, [MORE])
    assert bridged is not None
    result = run(record, written(tmp_path / "next.json", bridged.token_ids))
    assert result.exit_code == 0
    assert f"{len(bridged.new_ids)} new ones" in result.output


def test_one_file_may_hold_both(tmp_path: Path) -> None:
    given = {"stream": PROMPT + SAMPLED, "next_prompt": AGAIN, "prompt_length": len(PROMPT)}
    result = run(written(tmp_path / "both.json", given), "--json")
    row = json.loads(result.stdout)
    assert result.exit_code == 1
    assert (row["cause"], row["position"], row["extends"]) == ("BPE re-merge", FIRST, False)
    assert "completion" in row["region"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("no json", "neither a trajectory file nor JSON"),
        ('{"stream": [1]}', "no next_prompt"),
        ('{"stream": "x", "next_prompt": [1]}', "must hold a list of token ids"),
        ('{"stream": [1, -2], "next_prompt": [1]}', "no token id"),
        ('{"stream": [1, "a"], "next_prompt": [1]}', "list of token ids"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "given.json"
    path.write_text(content, encoding="utf-8")
    result = run(path)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output
