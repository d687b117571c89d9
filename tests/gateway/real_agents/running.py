"""Running an agent's script: in its environment, with nothing of ours, and no way out of this machine."""

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from tests.assets import AssetError
from tests.gateway.real_agents.install import environment

SCRIPTS = Path(__file__).parent
QUIET = {
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LANGSMITH_TRACING": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_TELEMETRY": "False",
    "OTEL_SDK_DISABLED": "true",
    "MSWEA_SILENT_STARTUP": "1",
    "INSPECT_DISPLAY": "none",
    "DO_NOT_TRACK": "1",
}
"""What keeps agents from calling home. `confined` makes sure."""


def need(config: pytest.Config, *names: str) -> None:
    """Skip where an environment is not installed; under ``--all`` that is an error."""
    try:
        for name in names:
            environment(name)
    except AssetError as error:
        if config.getoption("--all"):
            raise
        pytest.skip(str(error))


@dataclass(frozen=True)
class Outcome:
    status: int
    output: str
    strayed: str


def run_agent(
    name: str, script: Path, runs: Any, folder: Path, more: Mapping[str, str] = MappingProxyType({})
) -> Outcome:
    """Run an agent's script in an environment, with nothing of ours and no way out of this machine."""
    log = folder / f"{script.stem}.log"
    log.touch()
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    inside = {"HOME": str(folder), "PYTHONPATH": str(SCRIPTS / "confined"), "CONFINED_LOG": str(log), "PYTHONUTF8": "1"}
    done = subprocess.run(
        [environment(name), script, json.dumps(runs)],
        env={**kept, **QUIET, **inside, **more},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, log.read_text(encoding="utf-8"))
