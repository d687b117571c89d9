"""The demo's questions as tasks: prompts, tools, a simulated user and the reward.

`questions.json` holds questions that pocket's training never saw (see ``training/pocket/questions.py``). Each has a
small table that only its look-up tool can read.

>>> question = pick_questions(1, kinds=["lookup"])[0]
>>> question.prompt[-1]["content"], question.answer
('What does the round clock cost?', 678)
>>> reward(question, [*question.prompt, {"role": "assistant", "content": "It costs 678."}])
1.0
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated, Any, Final, NamedTuple

from msgspec import Meta, Struct

from ..errors import InputError
from ..rollout.interactions import BaseInteraction, Reply
from ..rollout.loop import Rollout, Task
from ..rollout.setup import TaskSet, TaskSource
from ..rollout.tools import BaseTool
from .calculator import CalculatorError, calculate

FILE: Final = "questions.json"
KINDS: Final = (
    *("direct", "arithmetic", "lookup", "missing", "singular", "word_problem"),
    *("parallel", "compare", "checked", "total", "chain", "follow_up"),
)
"""Kinds of questions, from the easiest to the hardest."""
UNKNOWN: Final = "could not find"
"""What a reply must say if there is no answer."""

_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?!\d)")


class Function(NamedTuple):
    """A tool of a question. Names differ between questions; the purpose does not."""

    purpose: str
    """``"calculate"``, ``"look_up"`` or ``"check"``."""
    name: str
    parameter: str
    about: str


@dataclass(frozen=True, slots=True)
class Question:
    """A question, what its tools know, and the answer."""

    id: str
    kind: str
    prompt: list[dict[str, Any]]
    """The first messages: perhaps a system message, then the user's."""
    follow_ups: tuple[str, ...]
    """The user's next messages, one after each answer."""
    functions: tuple[Function, ...]
    table: dict[str, int]
    """What can be looked up."""
    field: str
    """What the table is about: prices, ages, …"""
    style: str
    """How the look-up formats a result: ``"number"``, ``"pair"``, ``"json"`` or ``"sentence"``."""
    answer: int | None
    """The last answer; None if the item cannot be found."""
    mentions: str
    """What the answer must also name."""

    @property
    def tools(self) -> list[dict[str, Any]]:
        """The tools in OpenAI's shape."""
        return [_schema(function) for function in self.functions]


def _schema(function: Function) -> dict[str, Any]:
    properties = {function.parameter: {"type": "string"}}
    parameters = {"type": "object", "properties": properties, "required": [function.parameter]}
    signature = {"name": function.name, "description": function.about, "parameters": parameters}
    return {"type": "function", "function": signature}


@functools.cache
def all_questions() -> tuple[Question, ...]:
    """Return every question, in the order of the demo."""
    rows = json.loads(resources.files(__package__).joinpath(FILE).read_text("utf-8"))
    for row in rows:
        row["functions"] = tuple(Function(*function) for function in row["functions"])
        row["follow_ups"] = tuple(row["follow_ups"])
    return tuple(Question(**row) for row in rows)


def pick_questions(count: int, seed: int = 0, kinds: Sequence[str] = KINDS) -> list[Question]:
    """Pick `count` questions; `seed` picks others. After the last the first comes again, under another id."""
    choices = [question for question in all_questions() if question.kind in kinds]
    start, picked = seed * count % len(choices), []
    for at in range(count):
        question = choices[(start + at) % len(choices)]
        again = at // len(choices)
        picked.append(replace(question, id=f"{question.id}.{again}") if again else question)
    return picked


# -- the tools


def run_tool(question: Question, name: str, arguments: Any) -> str:
    """Return what a tool answers. It never raises: errors are results too."""
    function = next((one for one in question.functions if one.name == name), None)
    if function is None:
        names = ", ".join(one.name for one in question.functions)
        return f"Error: there is no tool {str(name)[:40]!r}; there are {names}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "Error: the arguments are not JSON"
    value = arguments.get(function.parameter) if isinstance(arguments, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20:
        value = str(value)
    if not isinstance(value, str):
        return f"Error: {name} needs {function.parameter!r}, a string"
    match function.purpose:
        case "calculate":
            try:
                return str(calculate(value))
            except CalculatorError as error:
                return f"Error: {error}"
        case "check":
            right = question.answer is not None and _last_number(value) == question.answer
            if name == "check_answer":
                return "correct" if right else "wrong"
            return f"Current parsed answer={value[:40]!r} reward={float(right)}"
        case _:
            return _look_up(question, value)


def _look_up(question: Question, text: str) -> str:
    item = " ".join(text.split()).casefold()
    name = next((name for name in question.table if name.casefold() == item), None)
    if name is None:
        return f"Error: no entry for {text[:40]!r}"
    value = question.table[name]
    sentence = f"The {question.field} of {name} is {value}."
    return {"number": str(value), "pair": f"{name}: {value}", "json": json.dumps({name: value})}.get(
        question.style, sentence
    )


class QuestionTool(BaseTool):
    """A tool of one question."""

    def __init__(self, question: Question, tool_schema: Mapping[str, Any]) -> None:
        super().__init__(tool_schema=tool_schema)
        self._question = question

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return run_tool(self._question, self.name, parameters)


# -- the user and the reward


def follow_up(question: Question, messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the user's next message after an answer; None after the last."""
    count = sum(message["role"] == "user" for message in messages)
    return question.follow_ups[count - 1] if count <= len(question.follow_ups) else None


class FollowUps(BaseInteraction):
    """A simulated user who asks the follow-ups."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        self._questions: dict[str, Question] = {}

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._questions[instance_id] = kwargs["question"]

    async def generate_response(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Reply:
        text = follow_up(self._questions[instance_id], messages)
        return Reply(done=True) if text is None else Reply(text)

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        self._questions.pop(instance_id, None)


def reward(question: Question, messages: Sequence[Mapping[str, Any]]) -> float:
    """Return 1.0 if the conversation ended and its last number is the answer, else 0.0.

    If there is no answer, the last reply must say that the item could not be found, and contain no number.
    """
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        return 0.0
    content = messages[-1].get("content")
    if follow_up(question, messages) is not None or not isinstance(content, str):
        return 0.0
    if question.mentions.casefold() not in content.casefold():
        return 0.0
    number = _last_number(content)
    return float(UNKNOWN in content and number is None if question.answer is None else number == question.answer)


def _last_number(text: str) -> int | None:
    numbers = _NUMBER.findall(text)
    return int(numbers[-1].replace(",", "")) if numbers and len(numbers[-1]) < 40 else None


# -- as tasks of rollouts


def question_task(question: Question) -> Task:
    """Return a question as a task; `question_reward` knows its answer."""
    return Task(
        messages=question.prompt,
        name=question.id,
        tools=[QuestionTool(question, schema) for schema in question.tools],
        interaction_settings={"question": question},
        metadata={"kind": question.kind, "answer": question.answer},
    )


def question_reward(rollout: Rollout) -> float:
    """1.0 for the right answer."""
    return reward(rollout.task.interaction_settings["question"], rollout.messages)


class QuestionSettings(Struct, forbid_unknown_fields=True):
    """``data: {questions: ...}`` in a rollout's configuration."""

    count: Annotated[int, Meta(ge=1)] = 64
    seed: int = 0
    kinds: list[str] = []


def question_source(settings: QuestionSettings, limit: int | None) -> TaskSet:
    """Return the tasks of `QuestionSettings`."""
    if unknown := [kind for kind in settings.kinds if kind not in KINDS]:
        raise InputError(f"kinds: there is no {unknown[0]!r}; there are {', '.join(KINDS)}")
    count = settings.count if limit is None else min(settings.count, limit)
    picked = pick_questions(count, settings.seed, settings.kinds or KINDS)
    return TaskSet([question_task(question) for question in picked], FollowUps(), question_reward)


SOURCES: Final[dict[str, TaskSource]] = {"questions": TaskSource(QuestionSettings, question_source)}
"""What a configuration of rollouts may name under ``data``."""
