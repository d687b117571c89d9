"""Pocket's questions: the same for the same seed, two sides that never meet, an expert who always gets it right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokentrace import build_supervised_sample, create_renderer
from tokentrace.demo.questions import Question, all_questions, reward
from tokentrace.pocket import POCKET
from training.pocket.expert import solve
from training.pocket.questions import SHIPPED, SPLITS, Lesson, make_questions, shipped

RENDERER = create_renderer(POCKET)


def asked(question: Question) -> str:
    return "\n".join([question.prompt[-1]["content"], *question.follow_ups])


def question_of(kind: str, index: int = 0) -> Lesson:
    return make_questions(0, index + 1, "held_back", kinds=[kind])[index]


def test_the_questions_that_ship_are_those_that_are_made() -> None:
    written = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(shipped()))
    assert [question.id for question in all_questions()] == [row["id"] for row in written]


def test_the_two_sides_share_no_question() -> None:
    train, held_back = (make_questions(3, 1200, split) for split in SPLITS)
    assert not {asked(question) for question in train} & {asked(question) for question in held_back}
    seen = {name for question in train for name in question.table}
    assert not [question.id for question in held_back if seen & set(question.table)]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", [{}, {"seed": 3}, {"think": False}, {"slips": 0.5}])
def test_the_expert_solves_every_question(split: str, how: dict[str, Any]) -> None:
    for question in make_questions(11, 360, split):
        assert reward(question, solve(question, **how)) == 1.0, question.id


def test_slips_carry_no_loss() -> None:
    slipped = 0
    for question in make_questions(2, 60):
        talk = solve(question, slips=1.0)
        sample = build_supervised_sample(RENDERER, talk, tools=question.tools, turns="flagged")
        trained = {int(index) for index in sample.messages[sample.mask]}
        expected = {
            at for at, message in enumerate(talk) if message["role"] == "assistant" and message.get("train", True)
        }
        assert trained == expected
        slipped += sum(message.get("train") is False for message in talk)
    assert slipped > 60
