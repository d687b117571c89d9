"""Few questions in which everything happens that the demo is about."""

from __future__ import annotations

from tests.support import FULL
from tokentrace.demo.rollouts import question_tasks
from tokentrace.rollout.loop import Task

ROLLOUTS = 12 if FULL else 3


def few_tasks(seed: int, _: int = ROLLOUTS) -> list[Task]:
    """The last of twelve questions, of which the very last goes on after its first answer.

    With the seed 1, at temperature 1, streams break by each cause that the noise makes.
    """
    return question_tasks(seed, 12)[-ROLLOUTS:]
