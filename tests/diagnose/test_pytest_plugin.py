"""The pytest plugin and the hooks for pre-commit, run as a team would."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.guides import ROOT
from tokentrace import create_renderer
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import build_supervised_sample

pytest_plugins = ["pytester"]

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}]


@pytest.fixture
def team(pytester: pytest.Pytester) -> Path:
    """A team's repository: a model, one whose template drops reasoning, good rows and bad ones."""
    root = pytester.path
    for name in ("model", "dropping"):
        shutil.copytree(POCKET, root / name, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    template = root / "dropping" / "chat_template.jinja"
    old = "{%- for message in messages -%}"
    added = old + "{%- if not loop.last and message.reasoning_content -%}<i>{%- endif -%}"
    template.write_text(template.read_text(encoding="utf-8").replace(old, added), encoding="utf-8")
    sample = build_supervised_sample(create_renderer(POCKET), CHAT)
    row = {"messages": CHAT, "input_ids": sample.token_ids, "loss_mask": sample.loss_mask}
    (root / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (root / "bad.jsonl").write_text(json.dumps({**row, "input_ids": sample.token_ids[::-1]}) + "\n", encoding="utf-8")
    return root


def run(pytester: pytest.Pytester, *args: str) -> pytest.RunResult:
    return pytester.runpytest_inprocess("-p", "tokentrace.pytest_plugin", "-p", "no:cacheprovider", *args)


def test_what_is_safe_passes_and_what_is_not_fails_with_its_reasons(team: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import pytest
        from tokentrace import create_renderer

        def test_good(assert_safe):
            renderer = create_renderer("model")
            report = assert_safe(renderer, ["rl-append-only", "sft-per-turn"])
            assert report is assert_safe(renderer, "production-parity")  # audited once

        def test_dropping(assert_safe):
            assert_safe("dropping", ["rl-append-only"])

        def test_partly(assert_safe):
            assert_safe("dropping", ["rl-append-only"], partly=True)

        def test_mistyped(assert_safe):
            assert_safe("models/our", "rl-append-only")

        @pytest.mark.parametrize(("uses", "problem"), [("rl", "rl-append-only"), ([], "has to be safe for")])
        def test_unknown(assert_safe, uses, problem):
            with pytest.raises(pytest.fail.Exception, match=problem):
                assert_safe("model", uses)
        """
    )
    result = run(pytester)
    result.assert_outcomes(passed=4, failed=2)
    result.stdout.fnmatch_lines(
        ["*dropping is not safe for rl-append-only*", "*loop.last*", "*'models/our' is not a folder here*"]
    )
    assert "Traceback" not in result.stdout.str()


def test_pytest_finds_the_plugin_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["pytest11"]
    assert points == {"tokentrace.pytest_plugin": "tokentrace.pytest_plugin"}


# -- pre-commit


def hooks() -> dict[str, dict[str, Any]]:
    rows = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    return {row["id"]: row for row in rows}


def committed(root: Path, *hooks: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    """What pre-commit says of all files of a repository, with these hooks run by the Python at hand."""
    own = [{**row, "language": "system", "entry": f"{sys.executable} -m {row['entry']}"} for row in hooks]
    for row in own:
        row.pop("additional_dependencies", None)
    config = {"repos": [{"repo": "local", "hooks": own}]}
    (root / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    subprocess.run(["git", "add", "-A"], cwd=root, check=True)
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_the_manifest_is_one_that_pre_commit_reads() -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib")
    assert {row["id"] for row in clientlib.load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))} == set(hooks())


def test_hooks_pass_and_fail_as_the_files_do(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pre_commit")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    audit, check = hooks()["tokentrace-audit"], hooks()["tokentrace-check"]
    rows = {**check, "args": ["--tokenizer", "model"]}
    told = committed(
        team,
        {**audit, "name": "good template", "args": ["model", "--require", "rl-append-only"]},
        {**rows, "name": "good rows", "files": "^rows.jsonl$"},
        {**audit, "name": "bad template", "args": ["dropping", "--require", "rl-append-only"]},
        {**rows, "name": "bad rows", "files": "^bad"},
        {**audit, "name": "forgotten"},
    )
    verdicts = re.findall(r"^(good|bad|forgotten)\b.*?\.(Passed|Failed)$", told.stdout, re.MULTILINE)
    good, bad = [("good", "Passed")] * 2, [("bad", "Failed")] * 2
    assert verdicts == [*good, *bad, ("forgotten", "Failed")], told.stdout + told.stderr
    assert told.returncode == 1
    assert "rl-append-only is required, and partly" in told.stdout
    assert "name the tokenizer" in told.stdout
