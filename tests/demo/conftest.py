"""A run of the demo, which takes seconds, shared by the tests of its paths and of its trials."""

from __future__ import annotations

import asyncio

import pytest

from tests.demo.few import few_tasks
from tokentrace import create_renderer
from tokentrace.demo.trials import Demo, run_demo
from tokentrace.pocket import POCKET


@pytest.fixture(scope="session")
def demo() -> Demo:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokentrace.demo.paths.question_tasks", few_tasks)
        return asyncio.run(run_demo(create_renderer(POCKET), seed=1))
