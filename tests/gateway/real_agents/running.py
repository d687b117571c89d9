"""Runs an agent's script in its environment, without ours, and with connections to this machine only."""

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
"""Settings that keep agents from calling home. `confined` enforces it."""


def need(config: pytest.Config, *names: str) -> None:
    """Skip the test if an environment is not installed; with ``--all`` that is an error."""
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
    connections: str


def run_agent(
    name: str, script: Path, runs: Any, folder: Path, extra: Mapping[str, str] = MappingProxyType({})
) -> Outcome:
    """Run an agent's script in an environment, without ours and with connections to this machine only."""
    log = folder / f"{script.stem}.log"
    log.touch()
    inherited = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LD_LIBRARY_PATH")}
    guard = {"HOME": str(folder), "PYTHONPATH": str(SCRIPTS / "confined"), "CONFINED_LOG": str(log), "PYTHONUTF8": "1"}
    process = subprocess.run(
        [environment(name), script, json.dumps(runs)],
        env={**inherited, **QUIET, **guard, **extra},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    return Outcome(process.returncode, process.stdout, log.read_text(encoding="utf-8"))
