"""Greedy rollouts of the NumPy model on held-back questions: ``python -m tests.pocket.held_back 60`` prints JSON.

A process of its own, so that the test can give it one BLAS thread: several, on cores that others use too, wait for
each other most of the time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from tokentrace import create_renderer
from tokentrace.demo.questions import Question, follow_up, reward, run_tool
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import load_pocket
from training.pocket.questions import make_questions

LONGEST = 160
TURNS = 12


def complete(caches: list[Any], new_ids: list[Any], stop: int) -> list[list[int]]:
    """The model's next turn in each conversation."""
    model = load_pocket()
    completions: list[list[int]] = [[] for _ in caches]
    going = list(range(len(caches)))
    for _ in range(LONGEST):
        logits = model.extend([caches[at] for at in going], new_ids)
        for at, token in zip(going, logits.argmax(-1).tolist(), strict=True):
            completions[at].append(token)
        going = [at for at in going if completions[at][-1] != stop]
        if not going:
            break
        new_ids = [completions[at][-1:] for at in going]
    return completions


def roll_out(questions: list[Question]) -> list[list[dict[str, Any]]]:
    """The conversations that come about."""
    renderer, model = create_renderer(POCKET), load_pocket()
    (stop,) = renderer.get_stop_token_ids()
    talks = [list(question.prompt) for question in questions]
    prompts: list[Any] = [
        renderer.render(talk, tools=question.tools, add_generation_prompt=True).ids
        for question, talk in zip(questions, talks, strict=True)
    ]
    caches = [model.new_cache() for _ in questions]
    going = list(range(len(questions)))
    for _ in range(TURNS):
        fed = [prompts[at][caches[at].length :] for at in going]
        completions = complete([caches[at] for at in going], fed, stop) if going else []
        still = []
        for at, completion in zip(going, completions, strict=True):
            question, talk = questions[at], talks[at]
            parsed = renderer.parse_response(completion, tools=question.tools, prompt_ids=prompts[at])
            talk.append(parsed.to_message())
            new: list[dict[str, Any]] = [
                {
                    "role": "tool",
                    "tool_call_id": f"call_{call.index}",
                    "content": run_tool(question, call.name or "", call.arguments)
                    if call.ok
                    else f"Error: {call.problem}",
                }
                for call in parsed.tool_calls
            ]
            text = follow_up(question, talk) if not new else None
            new += [] if text is None else [{"role": "user", "content": text}]
            bridged = renderer.bridge_to_next_turn(prompts[at], completion, new, tools=question.tools) if new else None
            if bridged is not None:
                talk += new
                prompts[at] = bridged.ids
                still.append(at)
        going = still
    return talks


def main() -> None:
    questions = make_questions(424242, int(sys.argv[1]), "held_back")
    rewards = [reward(question, talk) for question, talk in zip(questions, roll_out(questions), strict=True)]
    lost = [question.id for question, value in zip(questions, rewards, strict=True) if not value]
    print(json.dumps({"solved": sum(rewards) / len(rewards), "lost": lost}))


if __name__ == "__main__":
    main()
