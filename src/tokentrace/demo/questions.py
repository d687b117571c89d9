"""The demo's questions as tasks: prompts, tools, a simulated user and the reward.

Pocket's training never saw those in `questions.json` (see ``training/pocket/questions.py``).
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated, Any, NamedTuple

from msgspec import Meta, Struct, convert
from msgspec.json import decode

from ..rollout.interactions import BaseInteraction
from ..rollout.loop import Rollout, Task
from ..rollout.setup import TaskSet
from ..rollout.tools import BaseTool
from .calculator import CalculatorError, calculate

FILE = "questions.json"


class Function(NamedTuple):
    """A tool. Its `purpose` is ``"calculate"``, ``"look_up"`` or ``"check"``."""

    purpose: str
    name: str
    parameter: str
    about: str

    @property
    def schema(self) -> dict[str, Any]:
        properties = {self.parameter: {"type": "string"}}
        parameters = {"type": "object", "properties": properties, "required": [self.parameter]}
        signature = {"name": self.name, "description": self.about, "parameters": parameters}
        return {"type": "function", "function": signature}


@dataclass(frozen=True, slots=True)
class Question:
    """A question, the user's message after each answer, and the final answer (None if there is none).

    `table` has values of a `field` to look up, shown as a ``"number"``, ``"pair"``, ``"json"``
    or ``"sentence"``. The final reply must contain `mentions`.
    """

    id: str
    kind: str
    prompt: list[dict[str, Any]]
    follow_ups: tuple[str, ...]
    functions: tuple[Function, ...]
    table: dict[str, int]
    field: str
    style: str
    answer: int | None
    mentions: str

    @property
    def tools(self) -> list[dict[str, Any]]:
        return [function.schema for function in self.functions]


@functools.cache
def all_questions() -> tuple[Question, ...]:
    return decode(resources.files(__package__).joinpath(FILE).read_bytes(), type=tuple[Question, ...])


def pick_questions(count: int, seed: int = 0, kinds: Sequence[str] = ()) -> list[Question]:
    """Pick questions of the given kinds, or of all. Starts over after the last one."""
    choices = [question for question in all_questions() if question.kind in kinds or not kinds]
    picked = []
    for at in range(count):
        question, again = choices[(seed * count + at) % len(choices)], at // len(choices)
        picked.append(replace(question, id=f"{question.id}.{again}") if again else question)
    return picked


def run_tool(question: Question, name: str, arguments: Any) -> str:
    """A tool's answer. Never raises: errors are answers too."""
    functions = {function.name: function for function in question.functions}
    if name not in functions:
        return f"Error: there is no tool {str(name)[:40]!r}; there are {', '.join(functions)}"
    purpose, parameter = functions[name].purpose, functions[name].parameter
    value = arguments.get(parameter) if isinstance(arguments, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20:
        value = str(value)
    if not isinstance(value, str):
        return f"Error: {name} needs {parameter!r}, a string"
    if purpose == "look_up":
        for item, number in question.table.items():
            if item.casefold() == " ".join(value.split()).casefold():
                sentence = f"The {question.field} of {item} is {number}."
                styles = {"number": str(number), "pair": f"{item}: {number}"}
                styles["json"] = json.dumps({item: number})
                return styles.get(question.style, sentence)
        return f"Error: no entry for {value[:40]!r}"
    if purpose == "check":
        right = question.answer is not None and _last_number(value) == question.answer
        if name == "check_answer":
            return "correct" if right else "wrong"
        return f"Current parsed answer={value[:40]!r} reward={float(right)}"
    try:
        return str(calculate(value))
    except CalculatorError as error:
        return f"Error: {error}"


class QuestionTool(BaseTool):
    def __init__(self, question: Question, tool_schema: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=tool_schema)
        self._question = question

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return run_tool(self._question, self.name, parameters)


def follow_up(question: Question, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """The user's next message; None after the last."""
    count = sum(message["role"] == "user" for message in messages)
    return question.follow_ups[count - 1] if count <= len(question.follow_ups) else None


class FollowUps(BaseInteraction):
    """A simulated user who asks the follow-ups."""

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return follow_up(kwargs["question"], messages)


def reward(question: Question, messages: Sequence[Mapping[str, Any]]) -> float:
    """1.0 if the conversation ended and its last number is the answer, else 0.0.

    If there is no answer, the last reply must say so, without a number.
    """
    last = messages[-1] if messages else {"role": ""}
    content = last.get("content")
    if last["role"] != "assistant" or last.get("tool_calls") or not isinstance(content, str):
        return 0.0
    if follow_up(question, messages) is not None or question.mentions.casefold() not in content.casefold():
        return 0.0
    right = _last_number(content) == question.answer
    return float(right and (question.answer is not None or "could not find" in content))


def _last_number(text: str) -> int | None:
    numbers = re.findall(r"(?<![\w.])-?\d+(?:,\d{3})*(?!\d)", text)
    return int(numbers[-1].replace(",", "")) if numbers and len(numbers[-1]) < 40 else None


def question_task(question: Question) -> Task:
    return Task(
        messages=question.prompt,
        name=question.id,
        tools=[QuestionTool(question, schema) for schema in question.tools],
        interaction_settings={"question": question},
        metadata={"kind": question.kind, "answer": question.answer},
    )


def question_reward(rollout: Rollout) -> float:
    return reward(rollout.task.interaction_settings["question"], rollout.messages)


class QuestionSettings(Struct, forbid_unknown_fields=True):
    count: Annotated[int, Meta(ge=1)] = 64
    seed: int = 0


def question_tasks(settings: Mapping[str, Any], limit: int | None) -> TaskSet:
    """The tasks for ``data: {questions: ...}`` in a run's configuration."""
    options = convert(settings, QuestionSettings)
    count = options.count if limit is None else min(options.count, limit)
    tasks = [question_task(question) for question in pick_questions(count, options.seed)]
    return TaskSet(tasks, FollowUps(), question_reward)
