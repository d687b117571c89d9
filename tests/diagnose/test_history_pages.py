"""Histories in words and on pages."""

from __future__ import annotations

import json
from typing import Any

from tests.conversations import assistant, user
from tests.diagnose.compared import LAST_ONLY, compare, made_up
from tests.pages import EVIL, assert_only_its_own_code_runs, both_sides, html_page, read_page
from tokentrace.diagnose import HistoryReport, compare_histories
from tokentrace.diagnose.history_differences import PAIRS, View
from tokentrace.diagnose.history_document import plain_view, text_view
from tokentrace.diagnose.history_findings import Finding, Verb

# -- in words and on pages


def test_findings_speak_plainly() -> None:
    both, training = (View.PRODUCTION, View.TRAINING), (View.TRAINING,)
    common: dict[str, Any] = {"tokens": 3, "scaffold": 0, "steps": (0,), "once": "", "texts": None}
    rest = {"agrees": (View.ROLLOUT,)}
    said = [
        Finding(both, Verb.ADDS, "content", (1,), in_turn=False, **common, **rest),
        Finding(
            training,
            Verb.DROPS,
            "tool calls",
            tuple(range(1, 20, 2)),
            in_turn=False,
            **common,
            agrees=(View.PRODUCTION, View.ROLLOUT),
        ),
        Finding(training, Verb.ADDS, "content", (1, 3), in_turn=True, **common, **rest),
        Finding(training, Verb.CHANGES, "scaffold", (-1,), in_turn=False, **common, **rest),
    ]
    assert [str(found) for found in said] == [
        "Production and training add the content of message 1: 3 tokens; rollout does not.",
        "Training drops the tool calls of 10 messages (1 to 19): 3 tokens; production and rollout keep it.",
        "Training adds the content of messages 1 and 3 to the turn itself, where the model samples no such thing: "
        "3 tokens.",
        "Training writes the scaffold otherwise: 3 tokens.",
    ]


def test_rows_are_flat() -> None:
    report = compare("qwen3", "reasoning_every_turn")
    rows = report.rows()
    json.dumps(rows)
    assert {row["side"] for row in rows} == {"production", "rollout"}
    thought = [row for row in rows if row["field"] == "reasoning_content"]
    assert {row["text"].strip() for row in thought} == {"The user greets me.\n\nI should answer politely."}
    assert {(row["from_message"], row["role"], row["tokens"]) for row in thought} == {(1, "assistant", 11)}
    assert {(row["step"], row["in"]) for row in thought} == {(0, "turn"), (1, "prompt")}
    assert repr(report) == "HistoryReport(2 steps, 2 differ, 0 breaks)"


def test_the_text_tells_each_difference_once() -> None:
    report = compare("qwen3", "agentic")
    text = str(report)
    assert text.startswith("• Production and training drop")
    assert "production → rollout" in text
    assert text.count("I│ need│ the│ weather│.\\n") == 2  # missing in training from the first step, in production later
    assert "as at the step before" in text
    one = plain_view(report, step=3)
    assert one.startswith("\nstep 3, message 8: − production and training   + rollout\n")
    assert text_view(report).plain.replace(" ", "") == text.replace(" ", "")


def test_the_text_of_a_step_without_a_difference_counts_its_tokens() -> None:
    equal = compare("qwen2.5", "multi_turn")
    held = len(equal.row) - 1  # but for the newline after the last stop
    assert plain_view(equal, step=1) == f"step 1, message 3: all hold the same {held} tokens"


def hostile() -> HistoryReport:
    messages = [
        user(EVIL),
        assistant(EVIL, reasoning=EVIL * 40),
        {"role": "system", "content": EVIL},
        user(EVIL),
        assistant(EVIL, reasoning=EVIL),
        user("more"),
    ]
    return compare_histories(made_up(LAST_ONLY), messages)


def test_a_page_runs_and_applies_nothing_but_its_own_by_hash() -> None:
    assert_only_its_own_code_runs(html_page(hostile(), EVIL))


def test_no_content_acts_on_the_reader() -> None:
    assert not set(str(hostile())) & {"\x1b", "\x00", "\u202e"}


def test_the_page_shows_every_differing_token() -> None:
    report = compare("qwen3", "agentic")
    document = read_page(html_page(report))
    pairs = ((View.PRODUCTION, View.ROLLOUT), (View.ROLLOUT, View.TRAINING))
    shown = [
        (step, *pair) for step in report.steps for pair in pairs if (found := step.compare(*pair)) and not found.equal
    ]
    assert len(shown) == len(document["contrasts"]) > 2
    for at, (step, *pair) in enumerate(shown):
        left, right = (step.shown(view) for view in pair)
        assert left is not None
        assert right is not None
        assert both_sides(document, at) == (left.ids.tolist(), right.ids.tolist())


def test_a_step_has_its_pairs_in_order() -> None:
    report = compare("qwen3", "agentic")
    for step in report.steps:
        assert [(found.left, found.right) for found in step.comparisons] == list(PAIRS)
        assert step.compare("rollout", "production") is step.compare(View.PRODUCTION, View.ROLLOUT)
