"""Pocket's questions: the same for the same seed, two sides that never meet, an expert who always gets it right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokentrace import build_supervised_sample, create_renderer
from tokentrace.demo.questions import Question, all_questions, follow_up, reward
from tokentrace.pocket import POCKET
from training.pocket.expert import solve
from training.pocket.kinds import KINDS
from training.pocket.questions import SHIPPED, SPLITS, Lesson, make_questions, shipped
from training.pocket.words import is_held_back, names

RENDERER = create_renderer(POCKET)


def asked(question: Question) -> str:
    return "\n".join([question.prompt[-1]["content"], *question.follow_ups])


def question_of(kind: str, index: int = 0) -> Lesson:
    return make_questions(0, index + 1, "held_back", kinds=[kind])[index]


def test_the_questions_that_ship_are_those_that_are_made() -> None:
    written = json.loads(SHIPPED.read_text(encoding="utf-8"))
    assert written == json.loads(json.dumps(shipped()))
    assert [question.id for question in all_questions()] == [row["id"] for row in written]


def test_the_same_seed_gives_the_same_questions() -> None:
    whole = make_questions(7, 48, "held_back")
    assert whole == make_questions(7, 48, "held_back")
    assert whole[:20] == make_questions(7, 20, "held_back")
    assert whole[20:] == make_questions(7, 28, "held_back", start=20)
    assert [solve(question) for question in whole] == [solve(question) for question in whole]
    other = make_questions(8, 48, "held_back")
    assert sum(one.prompt == two.prompt for one, two in zip(whole, other, strict=True)) < 8


def test_kinds_come_in_turn() -> None:
    assert [question.kind for question in make_questions(1, 2 * len(KINDS))] == [*KINDS, *KINDS]
    assert {question.difficulty for question in make_questions(1, len(KINDS))} == {0, 1, 2, 3}
    with pytest.raises(ValueError, match="split is one of train, held_back"):
        make_questions(1, 1, "test")
    with pytest.raises(ValueError, match="not riddle"):
        make_questions(1, 1, kinds=["riddle"])


def test_the_two_sides_share_no_name() -> None:
    for sort in ("item", "town", "person"):
        train, held_back = set(names(sort, False)), set(names(sort, True))
        assert not train & held_back
        assert 0.05 < len(held_back) / len(train) < 0.25
        assert all(map(is_held_back, held_back))


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


@pytest.mark.parametrize("kind", KINDS)
def test_the_expert_calls_what_the_kind_says(kind: str) -> None:
    for index in range(6):
        question = question_of(kind, index)
        talk = solve(question)
        calls = [message["tool_calls"] for message in talk if message.get("tool_calls")]
        assert bool(calls) == (kind != "direct")
        assert any(len(row) > 1 for row in calls) or kind != "parallel"
        assert bool(question.follow_ups) == (kind == "follow_up")
        failed = [message for message in talk if message["role"] == "tool" and message["content"].startswith("Error")]
        assert bool(failed) == (kind in ("missing", "singular"))
        assert (question.answer is None) == (kind == "missing")


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


def test_conversations_fit_into_a_thousand_tokens() -> None:
    lengths = [len(RENDERER.render(solve(question), tools=question.tools).ids) for question in make_questions(4, 240)]
    assert max(lengths) < 1200
    assert sorted(lengths)[len(lengths) * 95 // 100] < 1000


def test_a_wrong_or_unfinished_conversation_earns_nothing() -> None:
    for question in make_questions(6, 60, "held_back"):
        talk = solve(question)
        assert reward(question, []) == 0.0
        assert reward(question, talk[:-1]) == 0.0
        said = talk[-1]["content"]
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": said + " Or 1234567."}]) == 0.0
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": None}]) == 0.0
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": ""}]) == 0.0


def test_the_user_follows_up_once_for_each_question() -> None:
    question = question_of("follow_up")
    talk = solve(question)
    first = next(
        at for at, message in enumerate(talk) if message["role"] == "assistant" and not message.get("tool_calls")
    )
    assert follow_up(question, talk[: first + 1]) == question.follow_ups[0]
    assert follow_up(question, talk) is None
    assert reward(question, talk[: first + 1]) == 0.0
