"""A run of the demo, which takes seconds, shared by the tests of its paths and of its report."""

from __future__ import annotations

import asyncio

import pytest

from tests.support import FULL
from tokentrace.demo.paths import Demo, run_demo

ROLLOUTS = 12 if FULL else 2


@pytest.fixture(scope="session")
def demo() -> Demo:
    return asyncio.run(run_demo(rollouts=ROLLOUTS))
