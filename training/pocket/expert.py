"""The expert whose conversations pocket learns from: it solves each question with tools."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

from tokentrace.demo.questions import run_tool
from training.pocket.questions import Lesson
from training.pocket.script import ExpertReply
from training.pocket.words import WORDS


def solve(question: Lesson, *, seed: int = 0, think: bool = True, slips: float = 0.0) -> list[dict[str, Any]]:
    """The expert's whole conversation: reasoning, calls, results of the real tools, the answer.

    `seed` varies the wording. Without `think` there is no reasoning. `slips` is the probability that a reply with calls
    is preceded by a wrong one, which has ``"train": False``; the expert then corrects it.
    """
    rng = random.Random(f"{question.id}/{seed}")
    messages: list[dict[str, Any]] = [dict(message) for message in question.prompt]
    for turn, steps in enumerate(question.script):
        if turn:
            messages.append({"role": "user", "content": question.follow_ups[turn - 1]})
        for step in steps:
            thought = rng.choice(step.thoughts)
            if step.calls and rng.random() < slips:
                messages.extend(_slip(question, rng, step, thought if think else ""))
                thought = rng.choice(("That went wrong. I try again.", "An error. Once more."))
            messages.extend(_reply(question, rng, step, thought if think else ""))
    return messages


def _reply(question: Lesson, rng: random.Random, step: ExpertReply, thought: str) -> Iterator[dict[str, Any]]:
    message: dict[str, Any] = {"role": "assistant"}
    if thought:
        message["reasoning_content"] = thought
    message["content"] = rng.choice(step.says)
    if not step.calls:
        yield message
        return
    by_use = {function.purpose: (function.name, function.parameter) for function in question.functions}
    calls = [(by_use[use], value) for use, value in step.calls]
    message["tool_calls"] = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": {parameter: value}}}
        for at, ((name, parameter), value) in enumerate(calls)
    ]
    yield message
    for at, ((name, parameter), value) in enumerate(calls):
        result = run_tool(question, name, {parameter: value})
        yield {"role": "tool", "tool_call_id": f"call_{at}", "content": result}


def _slip(question: Lesson, rng: random.Random, step: ExpertReply, thought: str) -> Iterator[dict[str, Any]]:
    """A wrong reply and its result: a misspelled argument, a call that is not JSON, or a tool that fails."""
    use, value = step.calls[0]
    at = rng.randrange(len(value))
    spoiled = value[:at] + rng.choice("?&_x") + value[at + rng.randrange(2) :]
    way = rng.random()
    messages = list(_reply(question, rng, ExpertReply((), ("",), ((use, value if way < 0.6 else spoiled),)), thought))
    if way < 0.3:
        function = messages[0].pop("tool_calls")[0]["function"]
        text = json.dumps({"name": function["name"], "arguments": function["arguments"]})
        text = rng.choice((text[:-1], text[:-2], text.replace('"', "", 1)))
        messages[0]["content"] = f"<tool_call>\n{text}\n</tool_call>"
        messages[1]["content"] = rng.choice(WORDS["slips"]["unreadable"])
    elif way < 0.6:
        messages[1]["content"] = rng.choice(WORDS["slips"]["failed"])
    elif not messages[1]["content"].startswith("Error"):
        return
    messages[0]["train"] = False
    yield from messages
