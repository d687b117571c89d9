"""One batch of rollouts by verl's own worker, shared by several tests."""

import asyncio
import importlib
import warnings
from pathlib import Path

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's own warnings and those of its imports
    importlib.import_module("verl.trainer.sft_trainer")
    importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")

from tests.apart.verl.servers import Done, rollouts


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A batch of four questions, some with calculator calls."""
    folder: Path = tmp_path_factory.mktemp("verl")
    questions = ["What is 17 * 23 + 4?", "What is 2 + 2?", "What is 91 - 8 * 3?", "What is 12 * 12?"]
    return asyncio.run(rollouts(folder, questions))
