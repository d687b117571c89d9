"""``tokentrace audit``: its output, pages and exit codes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.diagnose.brute import write_dropping
from tests.pages import read_page, said
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.diagnose import compare_histories
from tokentrace.pocket import EXAMPLE, POCKET


def run(*args: Any) -> Result:
    return CliRunner().invoke(main, ["audit", *(str(arg) for arg in args)])


@pytest.fixture(scope="module")
def dropping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose name is hostile."""
    folder = tmp_path_factory.mktemp("models") / "dropping<script>"
    write_dropping(folder)
    return folder


def test_exit_codes_say_whether_uses_hold(dropping: Path) -> None:
    good = run("-t", "pocket", "--require", "rl-append-only,production-parity")
    assert good.exit_code == 0, good.output
    assert "RL, tools only: holds" in good.output
    bad = run(dropping)
    assert bad.exit_code == 1
    assert bad.stdout.startswith("• SFT: safe with --past expand. RL: use the bridge; ")
    assert "rl-append-only partly" in run(dropping, "-q").stderr
    required = run(dropping, "-q", "--require", "rl-append-only")
    assert required.exit_code == 1
    assert "rl-append-only is required, and partly" in required.output
    assert "loop.last" in required.output
    assert run(dropping, "-q", "--require", "rl-append-only", "--allow-partly").exit_code == 0


@pytest.mark.parametrize("beside", [True, False])
def test_the_page_is_titled_by_the_template(dropping: Path, tmp_path: Path, beside: bool) -> None:
    template = dropping / "chat_template.jinja" if beside else shutil.copy(dropping / "chat_template.jinja", tmp_path)
    words = [template] if beside else [POCKET, "--chat-template", template]
    assert run(*words, "--html", tmp_path / "page.html").exit_code == 1, "a use does not hold"
    title = read_page((tmp_path / "page.html").read_text(encoding="utf-8"))["title"]
    assert title == f"Audit of chat_template.jinja of {dropping.name if beside else 'pocket'}"


def test_json_has_the_whole_report(dropping: Path) -> None:
    (report,) = json.loads(run(dropping, "--json").output)
    assert {row["use"]: row["grade"] for row in report["verdicts"]}["rl-append-only"] == "partly"
    broken = [cell for cell in report["cells"] if cell["outcome"] == "breaks"]
    assert broken
    for cell in broken:
        blame = cell["breaks"][0]["blame"]
        assert "loop.last" in blame["source"]
        assert cell["messages"][-1]["role"] in ("tool", "user", "system", "assistant")


def test_several_models_make_one_table_and_one_page(dropping: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    result = run(POCKET, dropping, "--html", page)
    assert result.exit_code == 1, result.output
    assert "pocket" in result.output
    text = page.read_text(encoding="utf-8")
    assert read_page(text)["title"] == f"Audit of pocket and {dropping.name}"
    assert "dropping\\u003cscript\\u003e" in text  # the viewer puts it into the page as text
    assert "dropping<script>" not in text
    assert "loop.last" in text


# -- bad arguments


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([POCKET, "--html", "nowhere/page.html"], "there is no folder nowhere"),
        ([POCKET, "--require", ""], "names no use"),
        ([POCKET, "--require", " ,"], "names no use"),
        ([POCKET, "--require", "rl"], "rl-append-only"),
        (["mine.jinja"], "audit MODEL --chat-template mine.jinja"),
        (["--step", 1], "--step goes with --on"),
        (["--tool-parser", "hermes"], "--tool-parser goes with --grammar"),
        (["--grammar", "--tool-parser", "klingon"], "klingon"),
        (["--grammar", "--on", EXAMPLE], "give one of them"),
        (["--grammar", "--require", "sft-one-row", "pocket"], "gives no verdict"),
    ],
)
def test_bad_arguments_are_refused_before_the_audit(
    arguments: list[Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tokentrace.diagnose.certify.audit_template", None)
    Path("mine.jinja").write_text("{{ messages }}", encoding="utf-8")
    result = run(*arguments)
    assert (result.exit_code, words in result.output) == (2, True), result.output


# -- a conversation


TEMPLATE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages if m.role == 'user' %}"
    "{% set ns.last = messages.index(m) %}{% endfor %}"
    "{% for m in messages %}<|turn|>{{ m.role }}\n{% if m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n{% endif %}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
"""Reasoning before the last user message is dropped."""

MESSAGES = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "reasoning_content": "Two and two.", "content": "4"},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "reasoning_content": "By definition.", "content": "It is so."},
]


@pytest.fixture
def on(tmp_path: Path) -> list[Any]:
    (tmp_path / "chat.json").write_text(json.dumps(MESSAGES), encoding="utf-8")
    (tmp_path / "forgetful.jinja").write_text(TEMPLATE, encoding="utf-8")
    return ["pocket", "--chat-template", tmp_path / "forgetful.jinja", "--on", tmp_path / "chat.json"]


def test_a_conversation_agrees_or_differs(on: list[Any], tmp_path: Path) -> None:
    same = run("--on", EXAMPLE)
    assert same.exit_code == 0
    assert same.stdout.startswith("• Production, rollout and training hold the same tokens at all 4 steps")
    result = run(*on, "--html", tmp_path / "report.html")
    assert result.exit_code == 1
    report = compare_histories(create_renderer("pocket", chat_template=TEMPLATE), MESSAGES)
    assert result.stdout == f"{report}\n"
    assert json.loads(run(*on, "--json").stdout) == json.loads(json.dumps(report.to_json()))
    assert "chat.json" in said(tmp_path.joinpath("report.html").read_text(encoding="utf-8"))


def test_settings_reach_the_comparison(on: list[Any]) -> None:
    preserved = json.loads(run(*on, "--json", "--past", "preserve").stdout)
    assert preserved["summary"][0].startswith("Production drops the reasoning")
    broken = json.loads(run(*on, "--json", "--past", "inference").stdout)
    assert [step["break"] and step["break"]["reason"] for step in broken["steps"]] == [None, "rewrites_past"]


def test_one_step_of_a_conversation(on: list[Any]) -> None:
    printed = run(*on, "--step", 1).stdout
    assert ("step 1, message 3" in printed, "step 0" in printed) == (True, False)
    absent = run(*on, "--step", 2)
    assert (absent.exit_code, "there is no step 2; there are 2" in absent.output) == (2, True)


# -- the grammar


def test_the_grammar_of_a_template() -> None:
    result = run("--grammar")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "family default · dialect hermes"
    assert "stop <|end|> 4066" in lines
    data = json.loads(run("--grammar", "--json", "--kwargs", "enable_thinking=false").stdout)
    assert (data["closes_reasoning"], data["stop_token_ids"]) == (True, [4066])
    assert "⟨name⟩(⟨key⟩=⟨value⟩, …)" in run("--grammar", "--tool-parser", "pythonic").stdout
