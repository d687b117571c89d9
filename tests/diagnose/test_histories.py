"""Production, rollout and training: what each holds is what it would hold, and what differs is all that differs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from tests.conversations import AGENT, CONVERSATIONS, HI, SIMPLE, assistant, user
from tests.diagnose.compared import LAST_ONLY, compare, ids, made_up, spelled
from tests.oracle import hf_ids, hf_tokenizer
from tests.pages import html_page, read_page
from tests.support import make_renderer
from tokentrace import TemplateError
from tokentrace.diagnose import compare_histories
from tokentrace.diagnose.history_differences import Comparison, Step, View
from tokentrace.diagnose.history_document import contrasts
from tokentrace.diagnose.history_findings import Verb
from tokentrace.errors import InputError
from tokentrace.study.seams import RefusalReason

SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Moves every system message to the front: one that comes late changes the past."""


def pair(step: Step, left: str, right: str) -> Comparison:
    found = step.compare(left, right)
    assert found is not None
    return found


# -- what each view holds, found out without the library


def oracle(family: str, messages: Sequence[Any], tools: Any, stop: str) -> list[tuple[list[int], list[int]]]:
    """(production, rollout) for each assistant's turn, from transformers alone.

    For templates in which every run of results, and every other message, ends with `stop` and nothing else does.
    """
    stop_id = hf_tokenizer(family).convert_tokens_to_ids(stop)
    out = []
    stream: list[int] = []
    previous = None
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = hf_ids(family, messages[:at], tools, True)
        whole = hf_ids(family, messages[: at + 1], tools)
        assert isinstance(prompt, list)
        assert isinstance(whole, list)
        assert whole[: len(prompt)] == prompt
        turn = whole[len(prompt) : whole.index(stop_id, len(prompt)) + 1]
        if previous is None:
            stream = list(prompt)
        else:
            new = [other["role"] for other in messages[previous + 1 : at]]
            runs = 1 + sum(not (one == other == "tool") for one, other in pairwise(new))
            ends = [index for index, token in enumerate(prompt) if token == stop_id]
            stream += prompt[ends[-runs - 1] + 1 :]
        stream += turn
        previous = at
        out.append((prompt + turn, list(stream)))
    return out


@pytest.mark.parametrize("name", ["agentic", "reasoning_every_turn", "agentic_long_chain", "multi_turn"])
def test_qwen3_holds_what_transformers_says(name: str) -> None:
    conversation = CONVERSATIONS[name]
    report = compare("qwen3", name)
    expected = oracle("qwen3", conversation.messages, conversation.tools, "<|im_end|>")
    assert [(ids(step.production), ids(step.rollout)) for step in report.steps] == expected
    row = hf_ids("qwen3", conversation.messages, conversation.tools)
    assert report.row.token_ids == row
    for step, (production, rollout) in zip(report.steps, expected, strict=True):
        found = pair(step, "production", "rollout")
        assert found.equal is (production == rollout)
        assert found.right_tokens - found.left_tokens == len(rollout) - len(production)
        training = ids(step.training)
        assert training == row[: len(training)]
    assert report.branches[0].tolist() == expected[-1][1]
    assert not report.breaks


def test_production_drops_reasoning_that_the_rollout_keeps() -> None:
    """Counted by hand with transformers: a dropped turn's reasoning is its tokens and the two tags around it."""
    report = compare("qwen3", "agentic")
    tokenizer = hf_tokenizer("qwen3")
    thoughts = {2: "I need the weather.", 4: "The tool says sunny."}
    text = {at: f"<think>\n{thought}\n</think>\n\n" for at, thought in thoughts.items()}
    sizes = {at: len(tokenizer(whole, add_special_tokens=False)["input_ids"]) for at, whole in text.items()}
    last = pair(report.steps[-1], "production", "rollout")
    assert (last.left_tokens, last.right_tokens) == (0, sum(sizes.values()))
    assert [found.right.text for found in last.differences] == list(text.values())
    assert [len(found.right) for found in last.differences] == list(sizes.values())
    assert last.first == last.differences[0].left.start == last.differences[0].right.start
    by_field = {(found.message, found.field): found for found in last.fields}
    assert by_field[2, "reasoning_content"].right == sizes[2] - 4
    assert by_field[2, "reasoning_content"].left_total == 0
    assert (
        f"reasoning_content of message 2: {sizes[2] - 4} tokens shown in rollout, absent in production" in last.lines()
    )
    assert "scaffold of message 2: 4 tokens shown in rollout, not in production" in last.lines()

    found = report.findings[0]
    assert (found.views, found.verb, found.what) == ((View.PRODUCTION, View.TRAINING), Verb.DROPS, "reasoning")
    assert (found.messages, found.tokens, found.steps) == ((2, 4), sum(sizes.values()), (2, 3))
    assert report.sentences()[0] == (
        f"Production and training drop the reasoning of messages 2 and 4 once a user message follows: "
        f"{sum(sizes.values())} tokens, scaffold included; rollout keeps it."
    )
    assert not report.equal
    assert [step.index for step in report.differing("production", "rollout")] == [2, 3]
    assert [step.index for step in report.differing("rollout", "training")] == [0, 1, 2, 3]


def test_the_row_leaves_out_what_the_model_samples() -> None:
    report = compare("qwen3", "reasoning_every_turn")
    found = pair(report.steps[0], "rollout", "training")
    assert [difference.in_turn for difference in found.differences] == [True]
    later = pair(report.steps[1], "rollout", "training")
    assert [difference.in_turn for difference in later.differences] == [False]
    assert any("out of the turn itself, though the model samples it: 15 tokens" in line for line in report.sentences())


@pytest.mark.parametrize("name", ["agentic", "multi_turn", "calls_parallel_answered", "system_user_assistant"])
def test_qwen25_agrees(name: str) -> None:
    report = compare("qwen2.5", name)
    assert report.equal
    assert not report.rows()
    assert "hold the same tokens" in report.summary
    for step in report.steps:
        assert ids(step.production) == ids(step.rollout) == ids(step.training)
        assert step.production.messages.tolist() == step.rollout.messages.tolist()
        assert not contrasts(step)


def test_a_flag_that_keeps_reasoning_makes_the_row_the_rollout() -> None:
    for flag in ("preserve_all_thinking", "use_patched"):
        report = compare("qwen3", "agentic_open", **{flag: True})
        plain = compare("qwen3", "agentic_open")
        assert not report.differing("rollout", "training")
        assert len(report.differing("production", "rollout")) == 3
        for step, other in zip(report.steps, plain.steps, strict=True):
            assert ids(step.production) == ids(other.production)
            assert ids(step.rollout) == ids(other.rollout)
        assert "rollout and training keep it" in report.summary
        assert report.settings[flag] is True
    between = compare("qwen3", "agentic_open", preserve_thinking_between_tool_calls=True)
    assert ids(between.steps[0].production) == ids(plain.steps[0].production)


def test_between_tool_calls_the_row_keeps_the_exchange_under_way() -> None:
    renderer = made_up(LAST_ONLY, preserve_thinking_between_tool_calls=True)
    messages = [
        user("one"),
        assistant("a", reasoning="A"),
        {"role": "tool", "content": "r"},
        assistant("b", reasoning="B"),
    ]
    report = compare_histories(renderer, messages)
    assert not report.differing("rollout", "training")
    assert report.summary == (
        "Production drops the reasoning of message 1 once a tool result follows: 3 tokens, scaffold included; "
        "rollout and training keep it."
    )


def test_qwen35_and_the_token_that_reaches_over_the_prompt() -> None:
    """The prompt ends in ``<think>\\n``, a turn without reasoning goes on with ``\\n</think>``; a row has one token."""
    report = compare("qwen3.5", "multi_turn")
    messages = CONVERSATIONS["multi_turn"].messages
    renderer = make_renderer("qwen3.5")
    for step in report.steps:
        assert step.message is not None
        text = renderer.render_text(messages[: step.message + 1]).text
        assert renderer.tokenizer.decode(ids(step.production)) == text.rstrip("\n")
    changed = [found for found in report.findings if found.verb is Verb.CHANGES]
    assert [(found.texts, found.messages, found.in_turn) for found in changed] == [(("\n\n", "\n"), (3,), True)]
    agentic = compare("qwen3.5", "agentic")
    dropped = agentic.findings[0]
    assert (dropped.what, dropped.messages) == ("reasoning", (2, 4))
    prompted = [
        line for line in pair(agentic.steps[-1], "production", "rollout").lines() if "generation_prompt" in line
    ]
    assert prompted[0] == "generation_prompt of message 2: 2 tokens shown in rollout, absent in production"


def test_glm_samples_the_head_of_the_next_turn() -> None:
    plain = compare("glm-4.5", "multi_turn")
    assert plain.equal
    head = spelled("glm-4.5").tokenizer.token_id("<|user|>")
    first = plain.steps[0]
    assert first.rollout.ids[-1] == head
    assert first.rollout.messages[-1] == 1
    report = compare("glm-4.5", "agentic")
    assert [found.what for found in report.findings] == ["reasoning"] * 3
    thoughts = "I need the weather." + "The tool says sunny."  # a byte is a token; the tags stay, empty
    assert pair(report.steps[-1], "production", "rollout").right_tokens == len(thoughts)
    assert not report.breaks


def test_gpt_oss_ends_past_turns_otherwise() -> None:
    report = compare("gpt-oss", "multi_turn")
    (difference,) = pair(report.steps[1], "production", "rollout").differences
    assert (difference.left.text, difference.right.text) == ("<|end|>", "<|return|>")
    assert difference.left.parts[0].message == 1
    assert difference.left.parts[0].field == "scaffold"
    assert report.sentences() == [
        "Production and training write the scaffold of message 1 otherwise once a user message follows: '<|end|>' "
        "where rollout has '<|return|>', 1 token.",
        "Training writes the scaffold of message 1 otherwise than it is sampled: '<|end|>' where the model samples "
        "'<|return|>', 1 token.",
    ]


def test_tools_are_shown_to_all() -> None:
    report = compare("qwen3", "calls_in_sequence")
    tools = report.row.select(field="tools")
    assert tools.any()
    for step in report.steps:
        assert any(name.startswith("tools.") for *_, name in step.rollout.parts(0, len(step.rollout)))
    with_none = compare_histories(make_renderer("qwen3"), CONVERSATIONS["calls_in_sequence"].messages)
    assert len(with_none.steps[0].rollout) < len(report.steps[0].rollout)


# -- steps


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "glm-4.5"])
def test_a_single_turn_agrees(family: str) -> None:
    report = compare(family, "reasoning_last")
    assert [step.message for step in report.steps] == [1]
    assert report.equal
    assert "the one step there is" in report.summary


def test_a_conversation_that_ends_with_a_question_asks_for_the_turn_to_come() -> None:
    report = compare("qwen3", "reasoning_in_history")
    assert [step.message for step in report.steps] == [1, None]
    last = report.steps[1]
    assert ids(last.production) == hf_ids("qwen3", CONVERSATIONS["reasoning_in_history"].messages, None, True)
    assert last.production.prompt == len(last.production)
    assert report.place(last) == "the turn to come"
    assert not pair(last, "production", "rollout").equal
    assert compare_histories(make_renderer("qwen3"), [HI]).equal


def test_a_turn_with_nothing_before_it_is_given() -> None:
    report = compare("qwen3", "assistant_first")
    assert [step.message for step in report.steps] == [None]
    assert report.notes == ("message 0: nothing comes before it; it counts as given, not as sampled",)
    alone = compare_histories(make_renderer("qwen3"), [assistant("Welcome.")])
    assert not alone.steps
    assert alone.equal
    assert alone.summary == "There is no turn to compare: the model is never asked for one."
    assert str(alone)
    read_page(html_page(alone))


def test_turns_in_a_row() -> None:
    report = compare("qwen2.5", "consecutive_assistants")
    assert [step.message for step in report.steps] == [1, 2, None]
    assert report.equal


def test_history_inference_breaks_where_production_would_rewrite() -> None:
    report = compare("qwen3", "agentic", past="inference")
    assert [step.index for step in report.breaks] == [2]
    refusal = report.steps[2].refusal
    assert refusal is not None
    assert refusal.reason is RefusalReason.REWRITES_PAST
    assert not report.differing("production", "rollout")
    assert [step.branch for step in report.steps] == [0, 0, 1, 1]
    assert len(report.branches) == 2
    assert "The rollout breaks at message 6: rewrites_past" in report.summary
    assert not report.equal


def test_a_template_that_moves_messages_breaks_the_rollout() -> None:
    messages = [user("a"), assistant("b"), {"role": "system", "content": "s"}, user("c"), assistant("d"), user("e")]
    report = compare_histories(made_up(SYSTEM_FIRST), messages)
    assert [(step.index, None if step.refusal is None else step.refusal.reason) for step in report.steps] == [
        (0, None),
        (1, RefusalReason.MOVED),
        (2, None),
    ]
    assert not report.differing("production", "rollout")
    first = pair(report.steps[0], "production", "training")
    assert {(part.message, part.field) for part in first.differences[0].right.parts} >= {(2, "content")}
    assert "adds" in {found.verb for found in report.findings}
    assert "break: moved" in str(report)


def test_the_bridge_is_told_the_conversation() -> None:
    source = LAST_ONLY.replace(
        "<|im_start|>assistant\n{% endif %}", "<|im_start|>{{ messages[0].content }}\n{% endif %}"
    )
    report = compare_histories(made_up(source), [user("assistant"), assistant("a"), user("b"), assistant("c")])
    assert not report.breaks
    assert report.equal


def test_a_template_that_refuses_is_an_error_that_says_where() -> None:
    source = LAST_ONLY.replace(
        "{{ m.content }}", "{{ raise_exception('no tools') if m.role == 'tool' else m.content }}"
    )
    messages = [user("a"), assistant("b"), {"role": "tool", "content": "c"}, assistant("d")]
    with pytest.raises(TemplateError, match="no tools"):
        compare_histories(made_up(source), messages)
    ends = (
        LAST_ONLY
        + "{% if add_generation_prompt and messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    )
    with pytest.raises(TemplateError) as caught:
        compare_histories(made_up(ends), messages)
    assert caught.value.__notes__ == ["while rendering the prompt that asks for message 3"]
    with pytest.raises(InputError, match="empty"):
        compare_histories(made_up(LAST_ONLY), [])


def test_a_turn_that_the_template_does_not_show_is_said_to_be_missing() -> None:
    source = LAST_ONLY.replace("{% for m in messages %}", "{% for m in messages if m.content %}")
    messages = [user("a"), assistant(""), user("b"), assistant("c")]
    report = compare_histories(made_up(source), messages)
    first, second = report.steps
    assert first.training is None
    assert first.compare("production", "training") is None
    assert second.refusal is not None
    assert second.refusal.reason is RefusalReason.NO_TURN_END
    assert not first.equal
    assert "The training row holds no turn for message 1." in report.summary
    assert "?" in str(report)
    read_page(html_page(report))
    json.dumps(report.to_json())


def test_a_turn_without_its_prompt_is_noted() -> None:
    report = compare("qwen3.5-nothink", "reasoning_last")
    assert "its turn does not begin with the prompt that asks for it" in report.notes[-1]


def test_the_callers_messages_and_renderer_stay_as_they_are() -> None:
    renderer = make_renderer("qwen3", preserve_all_thinking=True)
    messages = json.loads(json.dumps(AGENT))
    compare_histories(renderer, messages, tools=SIMPLE)
    assert messages == AGENT
    assert renderer.past == "preserve"
