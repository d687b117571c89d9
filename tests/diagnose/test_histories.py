"""Production, rollout and training: each view holds its tokens, and every difference is listed."""

import json
from collections.abc import Sequence
from functools import cache
from itertools import pairwise, permutations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, assistant, user
from tests.diagnose.brute import source_of
from tests.oracle import hf_ids, hf_tokenizer
from tests.pages import EVIL, assert_only_its_own_code_runs, both_sides, html_page, read_page
from tests.support import FULL, make_renderer, over_bytes, rotating, some
from tokentrace import InputError, Renderer, TemplateError, TokentraceError, create_renderer
from tokentrace.diagnose import HistoryReport, compare_histories
from tokentrace.diagnose.histories import Step, View, ViewTokens, token_rows
from tokentrace.pocket import POCKET
from tokentrace.show.alignment import Hunk
from tokentrace.study.seams import RefusalReason

LAST_ONLY = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' and loop.last and "
    "m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Like QwQ: only the last message shows its reasoning."""
SYSTEM_FIRST = (
    "{% for m in messages if m.role == 'system' %}<|im_start|>system\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Moves every system message to the front: a late one changes the past."""


@cache
def renderer_of(family: str, **settings: Any) -> Renderer:
    """Pocket and two families with their own vocabularies; the others with one token per byte."""
    if family == "pocket":
        return create_renderer(POCKET)
    real = family in ("qwen3", "qwen3.5")
    return make_renderer(family, **settings) if real else over_bytes(source_of(family), **settings)


def compare(family: str, name: str, **settings: Any) -> HistoryReport:
    conversation = CONVERSATIONS[name]
    return compare_histories(renderer_of(family, **settings), conversation.messages, tools=conversation.tools)


def ids(step: Step, view: str) -> list[int]:
    return step.views[View(view)].ids.tolist()


def breaks(report: HistoryReport) -> dict[int, RefusalReason]:
    return {step.index: step.refusal.reason for step in report.steps if step.refusal is not None}


def rebuilt(left: list[int], right: list[int], hunks: Sequence[Hunk]) -> list[int]:
    """The ids of the right view, rebuilt from those of the left and the hunks."""
    result, at = list[int](), 0
    for one in hunks:
        result += [*left[at : one.start], *right[one.other_start : one.other_stop]]
        at = one.stop
    return result + left[at:]


def texts(report: HistoryReport, step: Step, *pair: str) -> list[tuple[str, ...]]:
    """The texts of two views at each hunk."""
    rows = [step.views[View(view)].ids for view in pair]
    decode = report.row.tokenizer.decode
    return [tuple(decode(side) for side in hunk.sides(*rows)) for hunk in step.compare(*pair) or []]


def oracle(family: str, messages: Sequence[Any], tools: Any, stop: str) -> list[tuple[list[int], list[int]]]:
    """(production, rollout) for each turn, from transformers alone, if runs of results and messages end with `stop`."""
    stop_id = hf_tokenizer(family).convert_tokens_to_ids(stop)
    result, previous = [], None
    stream: list[int] = []
    for at, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt, whole = hf_ids(family, messages[:at], tools, True), hf_ids(family, messages[: at + 1], tools)
        assert isinstance(prompt, list)
        assert isinstance(whole, list)
        assert whole[: len(prompt)] == prompt
        turn = whole[len(prompt) : whole.index(stop_id, len(prompt)) + 1]
        new = prompt
        if previous is not None:
            roles = [other["role"] for other in messages[previous + 1 : at]]
            runs = 1 + sum(not (one == other == "tool") for one, other in pairwise(roles))
            ends = [index for index, token in enumerate(prompt) if token == stop_id]
            new = prompt[ends[-runs - 1] + 1 :]
        stream, previous = [*stream, *new, *turn], at
        result.append((prompt + turn, stream))
    return result


@pytest.mark.parametrize("name", ["agentic", "reasoning_every_turn", "agentic_long_chain", "multi_turn"])
def test_views_of_qwen3_equal_those_of_transformers(name: str) -> None:
    conversation = CONVERSATIONS[name]
    report = compare("qwen3", name)
    expected = oracle("qwen3", conversation.messages, conversation.tools, "<|im_end|>")
    assert [(ids(step, "production"), ids(step, "rollout")) for step in report.steps] == expected
    assert report.row.token_ids == hf_ids("qwen3", conversation.messages, conversation.tools)
    assert not report.breaks


# -- properties: nothing is lost


def check_step(step: Step, report: HistoryReport, renderer: Renderer, messages: Sequence[Any], tools: Any) -> list[str]:
    at = len(messages) if step.message is None else step.message
    prompt = renderer.render_ids(messages[:at], tools=tools, add_generation_prompt=True)
    production, rollout = step.views[View.PRODUCTION], step.rollout
    training = ids(step, "training") if "training" in step.views else []
    problems = {
        "production is not the template's prompt": ids(step, "production")[: production.prompt] != prompt,
        "rollout is not its branch": ids(step, "rollout") != report.branches[step.branch][: len(rollout.ids)].tolist(),
        "the sampled turn differs": [*production.ids[production.prompt :]] != [*rollout.ids[rollout.prompt :]],
        "training is not its row": training != report.row.token_ids[: len(training)],
    }
    for one, other in permutations(step.views, 2):
        left, right, hunks = ids(step, one), ids(step, other), step.compare(one, other) or []
        problems[f"{other} does not follow from {one}"] = rebuilt(left, right, hunks) != right
        problems[f"{other} and {one}"] = bool(hunks) is (left == right)
    return [problem for problem, holds in problems.items() if holds]


@pytest.mark.parametrize("family", ["pocket", "qwen3", "qwen3.5", "gpt-oss", "glm-4.5", "deepseek-r1"])
def test_nothing_is_lost(family: str) -> None:
    renderer = renderer_of(family)
    failures, steps, refused = [], 0, 0
    for name, conversation in rotating(CONVERSATIONS.items(), family, 3):
        try:
            report = compare_histories(renderer, conversation.messages, tools=conversation.tools)
        except TokentraceError:
            refused += 1
            continue
        steps += len(report.steps)
        for step in report.steps:
            problems = check_step(step, report, renderer, conversation.messages, conversation.tools)
            failures += [(name, step.index, problem) for problem in problems]
        for earlier, later in pairwise(report.steps):
            if later.refusal is None and ids(later, "rollout")[: len(earlier.rollout.ids)] != ids(earlier, "rollout"):
                failures.append((name, later.index, "not an extension"))
        if bool(report.findings) is not any(any(step.differences.values()) for step in report.steps):
            failures.append((name, -1, "findings"))
        json.dumps(report.to_json())
    assert not failures, some(failures)
    assert steps > (100 if FULL else 25)
    assert refused < len(CONVERSATIONS) / (2 if FULL else 6)


SMALL = st.lists(st.integers(0, 4), max_size=30)


@given(SMALL, SMALL, st.data())
def test_any_two_columns_are_aligned_exactly(one: list[int], other: list[int], data: st.DataObject) -> None:
    views = []
    for side in (one, other):
        owners = data.draw(st.lists(st.integers(-1, 3), min_size=len(side), max_size=len(side)))
        views.append(ViewTokens(token_rows(side, owners), data.draw(st.integers(0, len(side)))))
    hunks = list(views[0].differing(views[1]))
    prompts = [view.prompt for view in views]
    at = there = 0
    for start, stop, other_start, other_stop in hunks:
        assert start - at == other_start - there >= 0
        assert stop > start or other_stop > other_start
        in_turn = start >= prompts[0] and other_start >= prompts[1]
        assert in_turn or (stop <= prompts[0] and other_stop <= prompts[1])
        at, there = stop, other_stop
    assert rebuilt(one, other, hunks) == other


# -- families


def test_production_drops_reasoning_that_the_rollout_keeps() -> None:
    report = compare("qwen3", "agentic")
    thoughts = ["<think>\nI need the weather.\n</think>\n\n", "<think>\nThe tool says sunny.\n</think>\n\n"]
    size = sum(len(hf_tokenizer("qwen3")(text, add_special_tokens=False)["input_ids"]) for text in thoughts)
    assert texts(report, report.steps[-1], "production", "rollout") == [("", thought) for thought in thoughts]
    first = report.findings[0]
    assert (first.views, first.verb, first.what) == ((View.PRODUCTION, View.TRAINING), "drops", "reasoning")
    assert (first.messages, first.tokens, first.steps) == ((2, 4), size, (2, 3))
    assert report.summary.startswith(f"Production and training drop the reasoning of messages 2 and 4: {size} tokens.")
    assert [step.index for step in report.differing("production", "rollout")] == [2, 3]


@pytest.mark.parametrize("flag", ["preserve_all_thinking", "use_patched"])
def test_a_flag_that_keeps_reasoning_makes_the_row_the_rollout(flag: str) -> None:
    report, plain = compare("qwen3", "agentic_open", **{flag: True}), compare("qwen3", "agentic_open")
    assert not report.differing("rollout", "training")
    assert [ids(step, "production") for step in report.steps] == [ids(step, "production") for step in plain.steps]
    assert report.summary.startswith("Production drops the reasoning")
    for name in ("agentic", "multi_turn", "calls_parallel_answered", "system_user_assistant"):
        report = compare("qwen2.5", name)  # which has no reasoning to drop
        assert (report.equal, report.findings) == (True, ())
        assert "hold the same tokens" in report.summary


def test_tokens_where_turns_begin_and_end() -> None:
    """Qwen3.5's rows join newlines into one token; GLM samples the next head; gpt-oss ends past turns otherwise."""
    changed = [one for one in compare("qwen3.5", "multi_turn").findings if one.verb == "changes"]
    assert [(one.texts, one.messages, one.in_turn) for one in changed] == [(("\n\n", "\n"), (3,), True)]
    report = compare("glm-4.5", "multi_turn")
    assert report.equal
    assert report.steps[0].rollout.ids[-1] == renderer_of("glm-4.5").tokenizer.token_id("<|user|>")
    report = compare("gpt-oss", "multi_turn")
    assert texts(report, report.steps[1], "production", "rollout") == [("<|end|>", "<|return|>")]
    assert "scaffold of message 1: '<|end|>' instead of '<|return|>', 1 token." in report.summary


def test_the_first_and_the_last_step() -> None:
    report = compare("qwen3", "reasoning_in_history")
    assert [step.message for step in report.steps] == [1, None]
    prompt = hf_ids("qwen3", CONVERSATIONS["reasoning_in_history"].messages, None, True)
    assert ids(report.steps[1], "production") == prompt
    assert "message 0" in compare("qwen3", "assistant_first").notes[0]
    alone = compare_histories(make_renderer("qwen3"), [assistant("Welcome.")])
    assert (alone.steps, alone.equal) == ((), True)
    assert str(alone)
    read_page(html_page(alone))


def test_the_rollout_breaks_where_no_bridge_exists() -> None:
    report = compare("qwen3", "agentic", history="inference")
    assert breaks(report) == {2: RefusalReason.REWRITES_PAST}
    assert not report.differing("production", "rollout")
    assert [step.branch for step in report.steps] == [0, 0, 1, 1]
    assert "The rollout breaks at message 6: rewrites_past" in report.summary
    messages = [user("a"), assistant("b"), {"role": "system", "content": "s"}, user("c"), assistant("d"), user("e")]
    report = compare_histories(over_bytes(SYSTEM_FIRST), messages)
    assert breaks(report) == {1: RefusalReason.MOVED}
    assert "adds" in {one.verb for one in report.findings}
    assert "break: moved" in str(report)


def test_a_refusal_is_an_error_that_says_where() -> None:
    refusing = "{% if add_generation_prompt and messages[-1].role == 'tool' %}{{ raise_exception('no') }}{% endif %}"
    messages = [user("a"), assistant("b"), {"role": "tool", "content": "c"}, assistant("d")]
    with pytest.raises(TemplateError) as caught:
        compare_histories(over_bytes(LAST_ONLY + refusing), messages)
    assert caught.value.__notes__ == ["while rendering the prompt for message 3"]
    with pytest.raises(InputError, match="empty"):
        compare_histories(over_bytes(LAST_ONLY), [])


def test_a_turn_that_the_template_does_not_write_is_missing() -> None:
    source = LAST_ONLY.replace("{% for m in messages %}", "{% for m in messages if m.content %}")
    report = compare_histories(over_bytes(source), [user("a"), assistant(""), user("b"), assistant("c")])
    assert report.steps[0].compare("production", "training") is None
    assert breaks(report) == {1: RefusalReason.NO_TURN_END}
    assert "The training row holds no turn for message 1." in report.summary
    assert "?" in str(report)


# -- printed and on pages


def test_the_page_shows_every_differing_token() -> None:
    report = compare("qwen3", "agentic")
    document = read_page(html_page(report))
    views = [(step, view) for step in report.steps for view in ("production", "training")]
    contrasts = [(step, view) for step, view in views if step.compare(view, "rollout")]
    assert len(contrasts) == len(document["contrasts"]) > 2
    for at, (step, view) in enumerate(contrasts):
        assert both_sides(document, at) == (ids(step, "rollout"), ids(step, view))
    messages = [user(EVIL), assistant(EVIL, reasoning=EVIL * 40), user(EVIL), assistant(EVIL, reasoning=EVIL)]
    report = compare_histories(over_bytes(LAST_ONLY), messages)
    assert not set(str(report)) & {"\x1b", "\x00", "\u202e"}
    assert_only_its_own_code_runs(html_page(report, EVIL))
