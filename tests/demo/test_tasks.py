"""Pocket's questions: the same for the same seed, two sides that never meet, an expert who always gets it right."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokentrace import build_supervised_sample, create_renderer
from tokentrace.demo.calculator import LONGEST, CalculatorError, calculate
from tokentrace.demo.questions import KINDS
from tokentrace.demo.tasks import SPLITS, Question, follow_up, make_questions, reward, run_tool
from tokentrace.demo.words import is_held_back, names
from tokentrace.pocket import POCKET
from training.pocket.expert import solve

RENDERER = create_renderer(POCKET)


def asked(question: Question) -> str:
    return "\n".join([question.prompt[-1]["content"], *question.follow_ups])


def question_of(kind: str, index: int = 0, split: str = "held_back") -> Question:
    return make_questions(0, index + 1, split, kinds=[kind])[index]


# -- the questions


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


def test_the_prompt_does_not_show_the_table() -> None:
    for question in make_questions(5, 240, "held_back", kinds=["lookup", "parallel", "compare"]):
        assert question.table
        shown = RENDERER.render(question.prompt, tools=question.tools).text
        assert not [value for value in question.table.values() if str(value) in shown]


# -- the expert


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


# -- the reward


def test_a_wrong_or_unfinished_conversation_earns_nothing() -> None:
    for question in make_questions(6, 60, "held_back"):
        talk = solve(question)
        assert reward(question, []) == 0.0
        assert reward(question, talk[:-1]) == 0.0
        said = talk[-1]["content"]
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": said + " Or 1234567."}]) == 0.0
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": None}]) == 0.0
        assert reward(question, [*talk[:-1], {"role": "assistant", "content": ""}]) == 0.0


def test_the_reward_reads_numbers_as_people_write_them() -> None:
    question = dataclasses.replace(question_of("arithmetic"), answer=-1234, mentions="")
    for text, value in (("It is -1,234.", 1.0), ("-1234", 1.0), ("1234", 0.0), ("5 - 1239 = -1234", 1.0)):
        assert reward(question, [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]) == value


def test_the_user_follows_up_once_for_each_question() -> None:
    question = question_of("follow_up")
    talk = solve(question)
    first = next(
        at for at, message in enumerate(talk) if message["role"] == "assistant" and not message.get("tool_calls")
    )
    assert follow_up(question, talk[: first + 1]) == {"role": "user", "content": question.follow_ups[0]}
    assert follow_up(question, talk) is None
    assert reward(question, talk[: first + 1]) == 0.0


# -- the tools


@given(st.one_of(st.text(max_size=150), st.text("0123456789+-*/() ", max_size=150)))
@settings(max_examples=300, deadline=None)
def test_the_calculator_is_exact_or_refuses(expression: str) -> None:
    try:
        value = calculate(expression)
    except CalculatorError:
        return
    pythonic = re.sub(r"\b0+(?=[0-9])", "", re.sub(r"\s+", " ", expression)).strip()
    assert value == exact(ast.parse(pythonic, mode="eval").body)


def exact(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int(value)):
            return Fraction(value)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -exact(operand)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = exact(left), exact(right)
            match op:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.Div():
                    return a / b
    raise AssertionError(ast.dump(node))


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("", "empty"),
        ("1 / (2 - 2)", "division by zero"),
        ("2 ** 3", "unexpected"),
        ("(1 + 2", "not closed"),
        ("1 +", "ends too early"),
        ("__import__('os').system('true')", "unexpected"),
        ("(" * LONGEST, "ends too early"),
        ("1" * (LONGEST + 1), "longer than"),
        ("１ + ١", "unexpected"),
    ],
)
def test_the_calculator_says_why_it_refuses(expression: str, problem: str) -> None:
    assert problem in run_tool(question_of("arithmetic"), "calculator", {"expression": expression})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["expression", "item", "x"]), inner),
    max_leaves=6,
)


@given(st.sampled_from(["calculator", "lookup", "check_answer", "nothing", ""]), JSON | st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_tools_take_any_garbage(name: str, arguments: Any) -> None:
    for kind in ("lookup", "checked"):
        assert isinstance(run_tool(question_of(kind), name, arguments), str)


def test_a_tool_reads_arguments_as_values_or_as_json() -> None:
    question = next(row for row in make_questions(0, 60, "held_back", kinds=["lookup"]) if "lookup" in row.uses)
    name, value = next(iter(question.table.items()))
    found = run_tool(question, "lookup", {"item": f" {name.upper()} "})
    assert str(value) in found
    assert run_tool(question, "lookup", json.dumps({"item": name})) == found
    assert run_tool(question, "lookup", {"item": "nothing"}) == "Error: no entry for 'nothing'"
    assert run_tool(question, "lookup", {"key": name}) == "Error: lookup needs 'item', a string"
    assert run_tool(question, "lookup", "{") == "Error: the arguments are not JSON"
    assert "no tool 'look'" in run_tool(question, "look", {})
