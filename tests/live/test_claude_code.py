"""Claude Code, as the claude-agent-sdk bundles it, against a gateway: it runs unmodified and gives one row.

Not among the packages of the test environment, for its wheel has some hundred MB: name the program in
``TOKENTRACE_CLAUDE_CODE``, or install claude-agent-sdk.
"""

import importlib.util
import itertools
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.server import gateway_server
from tokentrace import Renderer, create_renderer, trajectory_samples
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.pocket import POCKET

TURNS = (
    "<think>\nI should look.\n</think>\n\nLet me look.\n<tool_call>\n"
    '{"name": "Bash", "arguments": {"command":  "echo hällo", "description": "say"}}\n</tool_call>',
    '<tool_call>\n{"name": "Read", "arguments": {"file_path": "FOLDER/a.txt"}}\n</tool_call>',
    "All done.",
)


def program() -> str | None:
    named = os.environ.get("TOKENTRACE_CLAUDE_CODE")
    found = importlib.util.find_spec("claude_agent_sdk")
    bundled = Path(found.origin).parent / "_bundled" / "claude" if found and found.origin else None
    return named or (str(bundled) if bundled and bundled.exists() else None)


CLAUDE = program()
if CLAUDE is None:
    pytest.skip(
        "claude-agent-sdk is not installed; name its program in TOKENTRACE_CLAUDE_CODE", allow_module_level=True
    )


def engine_for(made: Renderer, folder: Path) -> ScriptedEngine:
    stop = made.get_stop_token_ids()[0]
    turns = iter([[*made.tokenizer.encode(text.replace("FOLDER", str(folder))).tolist(), stop] for text in TURNS])
    return ScriptedEngine(lambda prompt, sampling: next(turns), piece=1)


def run_claude(url: str, folder: Path, home: Path) -> list[dict[str, Any]]:
    """What Claude Code says it did, event by event."""
    assert CLAUDE is not None
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    done = subprocess.run(
        [CLAUDE, "-p", "look around", "--allowedTools", "Bash,Read", "--output-format", "stream-json", "--verbose"],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=300,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_claude_code_runs_unmodified_and_gives_one_row(tmp_path: Path) -> None:
    folder, home = tmp_path / "work", tmp_path / "home"
    folder.mkdir()
    home.mkdir()
    (folder / "a.txt").write_text("content of a\n")
    made = create_renderer(POCKET, lost="ignore")
    engine = engine_for(made, folder)
    with gateway_server(lambda: engine, made) as served:
        said = run_claude(f"{served.url}/sessions/cc", folder, home)
        assert said[-1]["result"] == "All done."
        prompts = served.prompts
        assert len(prompts) == 3
        session = served.run(served.app.gateway.sessions.get("cc")).session
        [row] = trajectory_samples(session.trajectory)
    results = [block for event in said if event["type"] == "user" for block in event["message"]["content"]]
    assert [block["content"] for block in results] == ["hällo", "1\tcontent of a\n2\t"]
    assert [turn.cause for turn in session.turns] == [None, None, None]
    ids, mask = row.token_ids, list(row.loss_mask)
    assert ids[: len(prompts[-1])] == prompts[-1]
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
    sampled = made.tokenizer.decode([one for one, own in zip(ids, mask, strict=True) if own])
    assert sampled == "<|end|>".join([*(text.replace("FOLDER", str(folder)) for text in TURNS), ""])
