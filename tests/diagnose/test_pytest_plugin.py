"""The pytest plugin and the hooks for pre-commit, run in a repository of a team."""

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

from tests.diagnose.brute import write_dropping
from tests.guides import ROOT
from tokentrace import create_renderer
from tokentrace.pocket import POCKET
from tokentrace.samples.supervised import build_supervised_sample

pytest_plugins = ["pytester"]

CHAT = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "Four."}]


@pytest.fixture
def team(pytester: pytest.Pytester) -> Path:
    """A repository with a model, one whose template drops reasoning, good rows and bad ones."""
    root = pytester.path
    shutil.copytree(POCKET, root / "model", ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    write_dropping(root / "dropping")
    sample = build_supervised_sample(create_renderer(POCKET), CHAT)
    row = {"messages": CHAT, "input_ids": sample.token_ids, "loss_mask": sample.loss_mask}
    (root / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    (root / "bad.jsonl").write_text(json.dumps({**row, "input_ids": sample.token_ids[::-1]}) + "\n", encoding="utf-8")
    return root


@pytest.mark.usefixtures("team")
def test_a_safe_template_passes_and_an_unsafe_one_fails_with_its_reasons(pytester: pytest.Pytester) -> None:
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

        def test_no_use(assert_safe):
            with pytest.raises(pytest.fail.Exception, match="name at least one use"):
                assert_safe("model", [])
        """
    )
    result = pytester.runpytest_inprocess("-p", "tokentrace.pytest_plugin", "-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, failed=2)
    result.stdout.fnmatch_lines(["*dropping is not safe for rl-append-only*", "*loop.last*", "*'models/our'*"])
    assert "Traceback" not in result.stdout.str()


def test_pytest_loads_the_plugin_by_itself() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"tokentrace.pytest_plugin": "tokentrace.pytest_plugin"}


def test_hooks_pass_and_fail_as_the_files_do(team: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clientlib = pytest.importorskip("pre_commit.clientlib")
    manifest = clientlib.load_manifest(str(ROOT / ".pre-commit-hooks.yaml"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    audit, check = (next(row for row in manifest if row["id"] == f"tokentrace-{name}") for name in ("audit", "check"))
    rows = {**check, "args": ["--tokenizer", "model"]}
    hooks: list[dict[str, Any]] = [
        {**audit, "name": "good template", "args": ["model", "--require", "rl-append-only"]},
        {**rows, "name": "good rows", "files": "^rows.jsonl$"},
        {**audit, "name": "bad template", "args": ["dropping", "--require", "rl-append-only"]},
        {**rows, "name": "bad rows", "files": "^bad"},
    ]
    names = ("id", "name", "entry", "args", "files", "pass_filenames", "always_run", "types", "types_or")
    for hook in hooks:
        hook["entry"] = f"{sys.executable} -m {hook['entry']}"
    local = [{name: hook[name] for name in names if name in hook} | {"language": "system"} for hook in hooks]
    config = {"repos": [{"repo": "local", "hooks": local}]}
    (team / ".pre-commit-config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    subprocess.run(["git", "init", "-q"], cwd=team, check=True)
    subprocess.run(["git", "add", "-A"], cwd=team, check=True)
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    result = subprocess.run(command, cwd=team, capture_output=True, text=True, check=False)
    verdicts = re.findall(r"^(good|bad)\b.*?\.(Passed|Failed)$", result.stdout, re.MULTILINE)
    assert verdicts == [("good", "Passed")] * 2 + [("bad", "Failed")] * 2, result.stdout + result.stderr
    assert "rl-append-only is required, and partly" in result.stdout
