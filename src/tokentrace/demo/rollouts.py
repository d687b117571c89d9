"""Pocket's questions as tasks: their tools, the follow-ups of a simulated user, and the reward.

`SOURCES` is what ``data: {questions: …}`` of a rollout's configuration stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..rollout.config import Section
from ..rollout.interactions import BaseInteraction, Reply
from ..rollout.loop import Rollout, Task
from ..rollout.setup import TaskSet, TaskSource
from ..rollout.tools import BaseTool
from .questions import KINDS
from .tasks import SPLITS, Question, follow_up, make_questions, reward, run_tool


class QuestionTool(BaseTool):
    """A tool of one question: a calculator, or a look-up in its table."""

    def __init__(self, question: Question, tool_schema: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=tool_schema)
        self._question = question

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return run_tool(self._question, self.name, parameters)


class FollowUps(BaseInteraction):
    """A user who asks what else the question has, and then is content."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._questions: dict[str, Question] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._questions[instance_id] = kwargs["question"]

    async def generate_response(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        asked = follow_up(self._questions[instance_id], messages)
        return Reply(done=True) if asked is None else Reply(str(asked["content"]))

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._questions.pop(instance_id, None)


def question_task(question: Question) -> Task:
    """A question as a task; `question_reward` knows its answer."""
    return Task(
        messages=question.prompt,
        name=question.id,
        tools=[QuestionTool(question, schema) for schema in question.tools],
        interaction_settings={"question": question},
        metadata={"kind": question.kind, "difficulty": question.difficulty, "answer": question.answer},
    )


def question_tasks(seed: int, count: int) -> list[Task]:
    """Questions that are held back from training, as tasks."""
    return [question_task(question) for question in make_questions(seed, count, "held_back")]


def question_reward(rollout: Rollout) -> float:
    """1.0 for the right answer."""
    return reward(rollout.task.interaction_settings["question"], rollout.messages)


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
