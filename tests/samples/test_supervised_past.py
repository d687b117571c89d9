"""Past turns: expanded and preserved rows, and the warning if a choice is needed."""

import itertools
import re
import warnings

import numpy as np
import pytest

from tests.conversations import CONVERSATIONS, Conversation
from tests.samples.family_rows import SHAPES, assistants, expanded, make_renderer, rows, sample_of, warnings_of
from tests.support import rendered, rotating, some
from tokentrace import (
    RenderedTokens,
    Renderer,
    Sample,
    TokentraceError,
    build_supervised_sample,
    build_supervised_samples,
    compare_histories,
)
from tokentrace.diagnose.histories import View
from tokentrace.samples import HistoryWarning, TurnStartWarning
from tokentrace.samples.supervised import SampleBuilder

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""Tests of this warning catch it themselves."""
# -- the past, turn by turn


OVER = "a token reaches over the end of the prompt, as it does in the template's own ids"
OTHER_PROMPT = "the template writes such a turn with other words than it prompts with, the last one too"
PROMPT_DIFFERS: dict[str, set[str]] = {
    **{key: {OVER} for key in ("qwen2.5", "qwen3-instruct-2507", "qwen3-vl", "qwen3-coder", "qwen3.5", "qwen3.6")},
    **{key: {OVER, OTHER_PROMPT} for key in ("qwq-32b", "qwen3-thinking-2507", "minimax-m2", "nemotron-3-nano")},
    **{key: {OTHER_PROMPT} for key in ("qwen3.5-nothink", "glm-4.7", "glm-4.7-flash", "glm-5")},
    **{key: {OTHER_PROMPT} for key in ("deepseek-v3", "deepseek-r1")},
}
"""Why expanded rows of these families do not always begin with the ids of the prompt. All others do."""


def test_expanded_turn_follows_its_prompt_or_has_a_warning(any_family: str) -> None:
    """The history has the exact text of the prompt: templates that rewrite it give more rows."""
    renderer = make_renderer(any_family)
    causes: dict[str, str] = {}
    checked = 0
    for name, samples in expanded(any_family).items():
        conversation = CONVERSATIONS[name]
        for row in samples:
            assert all(line in row.notes for line in warnings_of(row, TurnStartWarning))
            for at in row.trained_messages:
                positions = np.flatnonzero(row.mask & (row.messages == at))
                prompt = rendered(renderer, Conversation(conversation.messages[:at], conversation.tools), prompt=True)
                if not len(positions) or not isinstance(prompt, RenderedTokens):
                    continue
                history = prompt.text[: prompt.rendering.tail]
                assert row.rendered.text.startswith(history), (name, at)
                follows = np.array_equal(row.ids[: positions[0]], prompt.ids)
                assert follows == (at not in warned_messages(row, TurnStartWarning)), (name, at)
                checked += follows
                if not follows:
                    cause = OVER if row.rendered.text.startswith(prompt.text) else OTHER_PROMPT
                    causes.setdefault(cause, f"{name}, message {at}")
    assert set(causes) == PROMPT_DIFFERS.get(any_family, set()), causes
    assert checked > 2


def warned_messages(row: Sample, kind: type[Warning]) -> set[int]:
    return {int(at) for line in warnings_of(row, kind) for at in re.findall(r"\d+", line.partition(":")[0])}


NOTHING_WRITTEN = {("deepseek-v3", "content_none_alone"): "the template writes nothing for a message without content"}


def test_expanded_rows_train_every_turn_once_and_are_as_long_as_possible(any_family: str) -> None:
    for name, samples in expanded(any_family).items():
        replies = assistants(CONVERSATIONS[name])
        nothing = (any_family, name) in NOTHING_WRITTEN
        assert [at for row in samples for at in row.trained_messages] == ([] if nothing else replies), name
        assert samples, name
        for row, following in itertools.pairwise(samples):
            stop = int(np.flatnonzero(row.mask)[-1]) + 1
            assert not np.array_equal(row.ids[:stop], following.ids[:stop]), name


NEVER_REWRITTEN = {
    *("qwen2.5", "qwen3-instruct-2507", "qwen3-vl", "qwen3-coder", "minimax-m3", "deepseek-v3.2", "deepseek-v4"),
    *("kimi-k2", "llama-3.1", "llama-3.2", "gemma-3"),
}
"""Templates that write every message as they do when it is the last."""
SYSTEM_MOVED = {"system_in_the_middle", "system_at_the_end"}
"""Conversations with a late system message, which the template moves to the start."""
RARELY_REWRITTEN = {
    # content of past turns loses all text up to the closing tag, and leading line breaks
    "qwq-32b": {
        *("think_inline_in_history", "think_inline_empty", "think_inline_only_close", "think_inline_and_field"),
        "call_content_with_newlines",
    },
    "deepseek-v3": SYSTEM_MOVED,
    "deepseek-r1": SYSTEM_MOVED,
    "deepseek-v3.1": SYSTEM_MOVED,
}
"""Templates that rewrite a message only in these conversations, where no other turn follows it."""


def test_history_that_is_never_rewritten_gives_the_default_row(any_family: str) -> None:
    samples = expanded(any_family)
    single_row = any_family in NEVER_REWRITTEN or any_family in RARELY_REWRITTEN
    assert ({len(family_rows) for family_rows in samples.values()} == {1}) == single_row
    if single_row:
        assert {name for name in samples if not is_default(any_family, name)} == RARELY_REWRITTEN.get(any_family, set())


def is_default(family: str, name: str) -> bool:
    (expanded_row,), sample = expanded(family)[name], rows(family)[name][2]
    stop = int(np.flatnonzero(sample.mask)[-1]) + 1 if sample.trained else len(expanded_row)
    same = np.array_equal(expanded_row.ids[:stop], sample.ids[:stop])
    return same and np.array_equal(expanded_row.mask[:stop], sample.mask[:stop])


def test_history_is_the_prompts_where_a_turn_hides_reasoning() -> None:
    (row, _) = expanded("gpt-oss")["agentic"]
    assert "I need the weather." in row.rendered.text
    assert "I need the weather." not in rows("gpt-oss")["agentic"][1].text


def test_preserved_row_is_that_of_a_renderer_that_keeps_all_thinking(any_family: str) -> None:
    renderer, keeping = make_renderer(any_family), make_renderer(any_family, preserve_all_thinking=True)
    for name, (conversation, _, _) in rows(any_family).items():
        if name in SHAPES:
            tokens = rendered(keeping, conversation)
            sample = sample_of(renderer, conversation, past="preserve")
            assert np.array_equal(sample.ids, tokens.ids), name
            assert np.array_equal(sample.mask, tokens.mask), name


# -- the warning, compared with compare_histories


PARTS_OF_CONTENT = "content in parts, which the template leaves out; the remark is on turns that say something"
FIRST = "no prompt asks for a first message of the assistant's, so that there is nothing to compare with"
TAG_ALONE = "a closing tag with no opening one counts as reasoning in the content"
TOO_MANY: dict[str, set[str]] = {
    "content_one_text_part": {PARTS_OF_CONTENT},
    "content_text_parts": {PARTS_OF_CONTENT},
    "assistant_first": {FIRST},
    "think_inline_only_close": {TAG_ALONE},
}
"""Conversations with a needless warning, and why."""


def test_warns_about_every_turn_that_is_trained_differently_than_it_was_sampled(any_family: str) -> None:
    """The oracle compares every turn at inference with the same turn in the row of the whole conversation.

    A difference that the turn also has as the last one (a token that reaches over the end of the prompt, a thinking
    block that exists only in the prompt) cannot be fixed by any choice of `past`, and gives no warning.
    """
    renderer = make_renderer(any_family)
    builder = SampleBuilder(renderer)
    missed, needless = [], []
    for name in rotating((name for name in rows(any_family) if name in SHAPES), any_family, 6):
        conversation, _, _ = rows(any_family)[name]
        (sample,) = builder.build(conversation.messages, conversation.tools)
        warned = warned_messages(sample, HistoryWarning)
        changed = changed_turns(renderer, conversation)
        if changed - warned:
            missed.append(f"{name}: {sorted(changed - warned)}, told {warnings_of(sample, HistoryWarning)}")
        if warned - changed and name not in TOO_MANY:
            needless.append(f"{name}: {sorted(warned - changed)}, told {warnings_of(sample, HistoryWarning)}")
    assert not missed, some(missed)
    assert not needless, some(needless)


def changed_turns(renderer: Renderer, conversation: Conversation) -> set[int]:
    past = [at for at in assistants(conversation) if 0 < at < len(conversation.messages) - 1]
    whole = turn_differences(renderer, conversation) if past else {}
    out = set()
    for at in past:
        if not whole.get(at):
            continue
        alone = turn_differences(renderer, Conversation(conversation.messages[: at + 1], conversation.tools))
        if whole.get(at) != alone.get(at):
            out.add(at)
    return out


def turn_differences(renderer: Renderer, conversation: Conversation) -> dict[int, list[tuple[str, str]]]:
    """Per turn, the differences between production and training in the turn and in its generation prompt."""
    try:
        report = compare_histories(renderer, conversation.messages, tools=conversation.tools)
    except TokentraceError:
        return {}
    out: dict[int, list[tuple[str, str]]] = {}
    for step in report.steps:
        if step.message is None:
            continue
        hunks = step.compare("production", "training")
        out[step.message] = [("missing", "")] if hunks is None else []
        views = [step.views[view].rows for view in (View.PRODUCTION, View.TRAINING)] if hunks else []
        for hunk in hunks or ():
            sides = hunk.sides(*views)
            if any(step.message in side["messages"] for side in sides):
                # GLM's turns end with the head of the next one, if there is a next one
                texts = (renderer.tokenizer.decode(side["ids"].tolist()) for side in sides)
                cleaned = tuple(re.sub(r"<\|(user|observation)\|>$", "", text) for text in texts)
                if cleaned[0] != cleaned[1]:
                    out[step.message].append(cleaned)  # type: ignore[arg-type]
    return out


def test_warning_says_what_to_choose() -> None:
    renderer = make_renderer("qwen3")
    chat = CONVERSATIONS["reasoning_every_turn"]
    with pytest.warns(HistoryWarning, match=r"^message 1: trained without their reasoning") as caught:
        sample = build_supervised_sample(renderer, chat.messages)
    (warning,) = caught
    assert warning.filename == __file__
    assert all(f"'{past}'" in str(warning.message) for past in ("expand", "preserve", "template"))
    assert str(warning.message) in sample.notes
    with pytest.warns(HistoryWarning):
        assert len(build_supervised_samples(renderer, chat.messages)) == 1


@pytest.mark.parametrize("past", ["template", "preserve", "expand"])
def test_an_explicit_choice_gives_no_warning(past: str) -> None:
    for family in ("qwen3", "qwen3-thinking-2507"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", TurnStartWarning)
            for name in ("reasoning_every_turn", "agentic", "multi_turn", "think_inline_in_history"):
                chat = CONVERSATIONS[name]
                samples = build_supervised_samples(make_renderer(family), chat.messages, tools=chat.tools, past=past)
                assert samples


def test_reasoning_that_is_never_shown_is_noted() -> None:
    sample = build_supervised_sample(make_renderer("qwen2.5"), CONVERSATIONS["reasoning_last"].messages)
    assert [note for note in sample.notes if note.startswith("message 1: ") and "does not show the reasoning" in note]
