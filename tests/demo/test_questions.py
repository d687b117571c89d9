"""The demo's questions: how they are picked, what their tools answer, and rewards."""

import dataclasses
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tokentrace.demo.calculator import LONGEST, CalculatorError, calculate
from tokentrace.demo.questions import Question, all_questions, pick_questions, reward, run_tool


def question_of(kind: str) -> Question:
    return pick_questions(1, kinds=[kind])[0]


def test_the_requested_number_is_picked_and_each_has_its_own_id() -> None:
    total = len(all_questions())
    assert pick_questions(total) == list(all_questions())
    assert len({question.id for question in pick_questions(2 * total + 3, seed=5)}) == 2 * total + 3
    assert pick_questions(8, seed=1) == list(all_questions()[8:16])
    for kind in {question.kind for question in all_questions()}:
        assert {question.kind for question in pick_questions(12, kinds=[kind])} == {kind}


def test_the_reward_reads_numbers_as_people_write_them() -> None:
    question = dataclasses.replace(question_of("arithmetic"), answer=-1234, mentions="")
    for text, value in (("It is -1,234.", 1.0), ("-1234", 1.0), ("1234", 0.0), ("5 - 1239 = -1234", 1.0)):
        assert reward(question, [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]) == value


@given(st.one_of(st.text(max_size=150), st.text("0123456789+-*/() ", max_size=150)))
@settings(max_examples=300, deadline=None)
def test_the_calculator_is_exact_or_refuses(expression: str) -> None:
    try:
        value = calculate(expression)
    except CalculatorError:
        return
    numbers = re.sub("([0-9]+)", r"Fraction('\1')", re.sub(r"\s+", " ", expression).strip())
    assert value == eval(numbers, {"Fraction": Fraction})


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
def test_calculator_errors_name_the_problem(expression: str, problem: str) -> None:
    question = question_of("follow_up")
    assert problem in run_tool(question, "calculator", {"expression": expression})


LEAF = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = LEAF | st.lists(LEAF, max_size=3) | st.dictionaries(st.sampled_from(["expression", "item", "x"]), LEAF)


@given(st.sampled_from(["calculator", "lookup", "check_answer", "nothing", ""]), JSON | st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_tools_take_any_garbage(name: str, arguments: Any) -> None:
    for kind in ("lookup", "checked"):
        assert isinstance(run_tool(question_of(kind), name, arguments), str)


def test_tool_errors_name_the_wrong_argument() -> None:
    question = next(row for row in all_questions() if any(one.name == "lookup" for one in row.functions) and row.table)
    name, value = next(iter(question.table.items()))
    assert str(value) in run_tool(question, "lookup", {"item": f" {name.upper()} "})
    assert run_tool(question, "lookup", {"item": "nothing"}) == "Error: no entry for 'nothing'"
    assert run_tool(question, "lookup", {"key": name}) == "Error: lookup needs 'item', a string"
    assert "no tool 'look'" in run_tool(question, "look", {})
