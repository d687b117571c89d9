"""The guide's code and the example run; verl finds our parser by the setting that the guide names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.guides import run_guide

ROOT = Path(__file__).parents[3]


def run(*arguments: str, **more: str) -> str:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_guide_runs(tmp_path: Path) -> None:
    names = run_guide("verl", tmp_path)
    rows = names["batch"].batch
    assert rows["response_mask"].sum(-1).min() > 0
    assert any(message["role"] == "tool" for message in names["batch"].non_tensor_batch["extras"][0]["messages"])


def test_the_example_runs() -> None:
    said = run("examples/verl/rollouts.py")
    assert said.count(" sampled, mean logprob -") == 3
    assert "<tool_call>" in said


def test_verl_finds_the_parser_by_its_own_setting() -> None:
    code = "from verl.experimental.agent_loop.tool_parser import ToolParser; print(sorted(ToolParser._registry))"
    assert "'tokentrace'" in run("-c", code, VERL_USE_EXTERNAL_MODULES="tokentrace.integrations.verl")
