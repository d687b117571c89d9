"""The world that pocket lives in: questions, the tools that answer them, and a reward.

Every question has a small table of its own that only the look-up tool can read; the prompt does not show it. The same
seed always gives the same questions. What training sees and what is held back never meet: names are like "green lamp",
"Oakford" or "Ada Stone", and one in eight occurs only in held-back questions; one in eight questions, by the hash of
what is asked, is only ever held back (see `words.is_held_back`). The words that names are made of, and the ways to
ask, are the same on both sides.

>>> question = make_questions(0, 3, "held_back")[2]
>>> question.kind, question.prompt[-1]["content"], question.answer
('lookup', 'What does the round clock cost?', 678)
>>> reward(question, [*question.prompt, {"role": "assistant", "content": "It costs 678."}])
1.0
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .calculator import CalculatorError, calculate
from .questions import KINDS
from .script import ExpertReply, Purpose, Script
from .words import WORDS, is_held_back

SPLITS: Final = ("train", "held_back")

UNKNOWN: Final = "could not find"
"""What an answer has to say where there is none."""

_LAST_NUMBER: Final = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?!\d)")


@dataclass(frozen=True, slots=True)
class Question:
    """Something to ask, what the tools know of it, and what the answer is."""

    id: str
    kind: str
    difficulty: int
    """0: no tool at all, to 3: several calls that build on one another."""
    prompt: list[dict[str, Any]]
    """The first messages: perhaps a system message, then the user's."""
    follow_ups: tuple[str, ...]
    """What the user asks after each answer but the last."""
    tools: list[dict[str, Any]]
    """As OpenAI's clients give them."""
    table: dict[str, int]
    """What can be looked up."""
    answer: int | None
    """The last answer; None where the thing cannot be found."""
    mentions: str
    """What the answer has to name besides."""
    field: str
    """What the table is of: prices, ages, …"""
    style: str
    """How the look-up writes its results: ``"number"``, ``"pair"``, ``"json"`` or ``"sentence"``."""
    uses: dict[str, tuple[Purpose, str]]
    """For each tool what it is for, and its parameter."""
    script: tuple[tuple[ExpertReply, ...], ...]
    """How an expert goes about it, for each message of the user: what pocket was trained on."""


def make_questions(
    seed: int, count: int, split: str = "train", *, kinds: Sequence[str] = tuple(KINDS), start: int = 0
) -> list[Question]:
    """`count` questions, `kinds` in turn. Question `start` + i is the same however many are made."""
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or not kinds:
        raise ValueError(f"kinds are of {', '.join(KINDS)}, not {', '.join(unknown) or 'none'}")
    return [_make(seed, index, split, kinds[index % len(kinds)]) for index in range(start, start + count)]


def _make(seed: int, index: int, split: str, kind: str) -> Question:
    rng = random.Random(f"{split}/{seed}/{index}")
    held_back = split == "held_back"
    writer, difficulty = KINDS[kind]
    while True:  # until the hash of what is asked falls on this side
        script = Script(rng, held_back)
        writer(script)
        if is_held_back("\n".join(script.asked)) is held_back:
            break
    asked = list(script.asked)
    if rng.random() < 0.1:
        asked[0] = rng.choice(WORDS["around"]["openings"]) + asked[0]
    if rng.random() < 0.1:
        asked[-1] += rng.choice(WORDS["around"]["closings"])
    prompt = [{"role": "user", "content": asked[0]}]
    if rng.random() < 0.4:
        prompt.insert(0, {"role": "system", "content": rng.choice(WORDS["around"]["systems"])})
    chosen = {
        use: WORDS["tools"][use][0] if rng.random() < 0.75 else rng.choice(WORDS["tools"][use]) for use in script.uses
    }
    field = script.field_name
    rows = [
        (use, name.format(field=field), parameter, about.format(field=field))
        for use, (name, parameter, about) in chosen.items()
    ]
    if rng.random() < 0.2:
        rng.shuffle(rows)
    return Question(
        id=f"{split}-{seed}-{index}",
        kind=kind,
        difficulty=difficulty,
        prompt=prompt,
        follow_ups=tuple(asked[1:]),
        tools=[_schema(name, parameter, about) for _, name, parameter, about in rows],
        table=script.table,
        answer=script.answer,
        mentions=script.mentions,
        field=field,
        style=rng.choice(("number", "number", "pair", "json", "sentence")),
        uses={name: (use, parameter) for use, name, parameter, _ in rows},
        script=tuple(map(tuple, script.steps)),
    )


def _schema(name: str, parameter: str, about: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


# -- the tools


def run_tool(question: Question, name: str, arguments: Any) -> str:
    """What a tool answers. It never raises: whatever is wrong with a call comes back as text.

    >>> question = make_questions(2, 2)[1]
    >>> run_tool(question, "calculator", {"expression": "2 * (3 + 4)"})
    '14'
    >>> run_tool(question, "calculator", {"expression": "__import__('os')"})
    "Error: unexpected '_'"
    """
    if name not in question.uses:
        return f"Error: there is no tool {str(name)[:40]!r}; there are {', '.join(question.uses)}"
    use, parameter = question.uses[name]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return "Error: the arguments are not JSON"
    value = arguments.get(parameter) if isinstance(arguments, Mapping) else None
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**20:
        value = str(value)
    if not isinstance(value, str):
        return f"Error: {name} needs {parameter!r}, a string"
    if use is Purpose.CALCULATE:
        try:
            return str(calculate(value))
        except CalculatorError as error:
            return f"Error: {error}"
    if use is Purpose.CHECK:
        right = question.answer is not None and _last_number(value) == question.answer
        if name == "check_answer":
            return "correct" if right else "wrong"
        return f"Current parsed answer={value[:40]!r} reward={float(right)}"
    return _look_up(question, value)


def _look_up(question: Question, asked: str) -> str:
    wanted = " ".join(asked.split()).casefold()
    for name, value in question.table.items():
        if name.casefold() == wanted:
            match question.style:
                case "number":
                    return str(value)
                case "pair":
                    return f"{name}: {value}"
                case "json":
                    return json.dumps({name: value})
                case _:
                    return f"The {question.field} of {name} is {value}."
    return f"Error: no entry for {asked[:40]!r}"


# -- the answer


def follow_up(question: Question, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """What the user says next, after an answer; None after the last."""
    said = sum(message["role"] == "user" for message in messages)
    return {"role": "user", "content": question.follow_ups[said - 1]} if said <= len(question.follow_ups) else None


def reward(question: Question, messages: Sequence[Mapping[str, Any]]) -> float:
    """1.0 if the conversation was led to its end and its last number is the answer, else 0.0.

    Where there is no answer, the last reply has to say that the thing could not be found, and give no number.
    """
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        return 0.0
    if sum(message["role"] == "user" for message in messages) <= len(question.follow_ups):
        return 0.0
    content = messages[-1].get("content")
    if not isinstance(content, str) or question.mentions.casefold() not in content.casefold():
        return 0.0
    if question.answer is None:
        return float(UNKNOWN in content and _last_number(content) is None)
    return float(_last_number(content) == question.answer)


def _last_number(text: str) -> int | None:
    found = _LAST_NUMBER.findall(text)
    return int(found[-1].replace(",", "")) if found and len(found[-1]) < 40 else None
