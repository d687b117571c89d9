"""Pocket's questions as tasks of a run: what ``data: {questions: …}`` of a configuration stands for."""

from __future__ import annotations

from typing import Final

from ..rollout.config import Section
from ..rollout.setup import TaskSet, TaskSource
from .questions import KINDS
from .rollouts import FollowUps, question_reward, question_task
from .tasks import SPLITS, make_questions


def question_source(asked: Section, limit: int | None) -> TaskSet:
    """Questions with their tools, a user who asks what else they have, and the reward."""
    asked.check_keys(["count", "seed", "split", "kinds"])
    kinds = asked.read("kinds", list, default=list(KINDS))
    if unknown := [kind for kind in kinds if not isinstance(kind, str) or kind not in KINDS]:
        raise asked.error(f"there is no {unknown[0]!r}; there are {', '.join(KINDS)}", "kinds")
    count = asked.count("count", 64)
    split = asked.choice("split", SPLITS, "held_back")
    count = count if limit is None else min(count, limit)
    made = make_questions(asked.read("seed", int, default=0), count, split, kinds=kinds or tuple(KINDS))
    return TaskSet([question_task(question) for question in made], FollowUps(), question_reward)


SOURCES: Final[dict[str, TaskSource]] = {"questions": question_source}
