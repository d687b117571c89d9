"""``tokentrace histories``: what it reads and prints, and what its exit code says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tests.pages import said
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.compare.histories import compare_histories
from tokentrace.pocket import POCKET

FORGETFUL = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}" + FORGETFUL
)
"""Reasoning before the last user message is dropped."""

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "4"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "reasoning_content": "By definition.", "content": "It is so."},
]


def run(*args: Any, stdin: str | None = None, **env: str) -> Result:
    return CliRunner().invoke(main, ["histories", *(str(arg) for arg in args)], input=stdin, env=env or None)


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps(MESSAGES), encoding="utf-8")
    return path


@pytest.fixture
def forgetful(tmp_path: Path) -> Path:
    path = tmp_path / "forgetful.jinja"
    path.write_text(TEMPLATE, encoding="utf-8")
    return path


def test_the_shipped_example_agrees_and_that_is_0() -> None:
    result = run()
    assert result.exit_code == 0
    assert result.stdout.startswith("• Production, rollout and training hold the same tokens at all 4 steps")
    assert "shipped example" in result.stderr
    assert "pocket" in result.stderr


def test_a_difference_is_1_and_is_told(chat: Path, forgetful: Path) -> None:
    result = run(chat, "--chat-template", forgetful, "--renderer", "default", "-t", POCKET)
    assert result.exit_code == 1
    assert result.stderr == ""
    assert "\x1b" not in result.stdout
    renderer = create_renderer(POCKET, "default", chat_template=TEMPLATE)
    assert result.stdout == f"{compare_histories(renderer, MESSAGES)}\n"
    assert "drop the reasoning of message 1 once a user message follows" in result.stdout
    coloured = run(
        chat, "--chat-template", forgetful, "-t", POCKET, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="90"
    )
    assert coloured.exit_code == 1


def test_flags_reach_the_renderer(chat: Path, forgetful: Path) -> None:
    given = (chat, "--chat-template", forgetful, "-t", POCKET, "--json")
    kept = json.loads(run(*given, "--preserve-all-thinking").stdout)
    assert "rollout and training keep it" in kept["summary"][0]
    broken = json.loads(run(*given, "--history", "inference").stdout)
    assert [step["break"] and step["break"]["reason"] for step in broken["steps"]] == [None, "rewrites_past"]
    patched = json.loads(run(*given, "--use-patched", "--preserve-thinking-between-tool-calls").stdout)
    assert patched["settings"]["use_patched"] is True
    assert patched["settings"]["preserve_thinking_between_tool_calls"] is True


def test_json_is_the_report(chat: Path, forgetful: Path) -> None:
    result = run("-", "--chat-template", forgetful, "-t", POCKET, "--json", stdin=json.dumps({"messages": MESSAGES}))
    renderer = create_renderer(POCKET, chat_template=TEMPLATE)
    assert json.loads(result.stdout) == json.loads(json.dumps(compare_histories(renderer, MESSAGES).to_json()))
    lines = f"{json.dumps([MESSAGES[0]])}\n{json.dumps(MESSAGES)}\n"
    second = run("-", "--index", 1, "--chat-template", forgetful, "-t", POCKET, "--json", stdin=lines)
    assert second.stdout == result.stdout


def test_one_step(chat: Path, forgetful: Path) -> None:
    given = (chat, "--chat-template", forgetful, "-t", POCKET)
    shown = run(*given, "--step", 1).stdout
    assert "step 1, message 3" in shown
    assert "step 0" not in shown
    absent = run(*given, "--step", 2)
    assert absent.exit_code == 2
    assert absent.stderr == "error: --step: there is no step 2; there are 2, counted from 0\n"


def test_a_page_is_written_and_opened(
    chat: Path, forgetful: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(click, "launch", opened.append)
    out = tmp_path / "report.html"
    result = run(chat, "--chat-template", forgetful, "--html", out, "--open")
    assert result.exit_code == 1
    assert opened == [str(out)]
    assert str(out) in result.stderr.replace("\n", "")
    assert "chat.json" in said(out.read_text(encoding="utf-8"))
    assert run(chat, "--open").exit_code == 2


def test_errors_are_2(tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text('[{"role": "user"}]', encoding="utf-8")
    result = run(bad, "-t", POCKET)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: message 0, content: ")
    assert run(tmp_path / "absent.json").exit_code == 2
    assert run(bad, "--kwargs", "messages=[]").exit_code == 2


def test_help_says_what_the_exit_code_means() -> None:
    shown = " ".join(run("--help").stdout.split())
    assert "0 if all three agree" in shown
    assert "Examples:" in shown
