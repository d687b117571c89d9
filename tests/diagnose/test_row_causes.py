"""Checked rows: each cause is named, ids and masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.conversations import (
    SIMPLE,
    assistant,
    system,
    user,
)
from tests.diagnose.checked import (
    IDS,
    MASK,
    MESSAGES,
    _bos,
    changed,
    checked,
    checker,
    row_of,
    sample_of,
)
from tests.support import load_family
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.rows import Outcome
from tokentrace.samples.supervised import SampleSettings, build_supervised_sample

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
# -- causes


def _args(text: str) -> Callable[[dict[str, Any]], Any]:
    def change(row: dict[str, Any]) -> None:
        row["messages"][3]["tool_calls"][0]["function"]["arguments"] = text

    return change


RENDERER = checker().tokenizer.renderer
PROMPT = RENDERER.render(MESSAGES, tools=SIMPLE, add_generation_prompt=True).ids
CAUSES: dict[str, tuple[Any, Cause, Outcome]] = {
    "BOS doubled": ([_bos(), *IDS], Cause.BOS_DOUBLED, Outcome.IDS),
    "BOS missing": (IDS[1:], Cause.BOS_MISSING, Outcome.IDS),
    "generation prompt": (PROMPT, Cause.GENERATION_PROMPT, Outcome.IDS),
    "end missing": (IDS[:-1], Cause.END_MISSING, Outcome.IDS),
    "end doubled": ([*IDS, IDS[-1]], Cause.END_ADDED, Outcome.IDS),
    "newline added": ([*IDS, *RENDERER.tokenizer.encode("\n")], Cause.LAST_WHITESPACE, Outcome.IDS),
    "cut at the end": (IDS[:-5], Cause.CUT, Outcome.CUT),
    "cut at the beginning": (IDS[200:], Cause.CUT, Outcome.CUT),
    "tools": (sample_of(changed(lambda row: row.pop("tools"))).ids, Cause.TOOLS_MISSING, Outcome.IDS),
    "other tools": (sample_of(changed(lambda row: row["tools"].pop())).ids, Cause.CHANGED_TOOLS, Outcome.IDS),
    "reasoning": (
        sample_of(changed(lambda row: row["messages"][1].pop("reasoning_content"))).ids,
        Cause.STRIPPED_REASONING,
        Outcome.IDS,
    ),
    "system": (
        sample_of({"messages": [system("You are a pirate."), *MESSAGES], "tools": SIMPLE}).ids,
        Cause.CHANGED_SYSTEM,
        Outcome.IDS,
    ),
    "control": (sample_of(control_tokens="hf_compat").ids, Cause.TEXT_AS_CONTROL, Outcome.IDS),
    "JSON": (sample_of(changed(_args('{"city":"Paris","unit":"celsius"}'))).ids, Cause.JSON_FORMAT, Outcome.IDS),
    "white space": (
        sample_of(changed(lambda row: row["messages"][2].update(content=" And the weather in Paris?"))).ids,
        Cause.WHITESPACE,
        Outcome.IDS,
    ),
    "call": (sample_of(changed(_args('{"city": "Rome", "unit": "celsius"}'))).ids, Cause.REWRITTEN_CALL, Outcome.IDS),
    "no token": ([*IDS[:9], 99_999, *IDS[10:]], Cause.NO_TOKEN, Outcome.IDS),
    "text": (
        sample_of(changed(lambda row: row["messages"][5].update(content="It rains in Paris."))).ids,
        Cause.UNKNOWN,
        Outcome.IDS,
    ),
}


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named(name: str) -> None:
    ids, cause, outcome = CAUSES[name]
    found = checked(row_of(ids))
    assert (found.outcome, found.causes) == (outcome, [cause]), found


def test_a_stop_token_dropped_inside_a_row_is_named() -> None:
    ends = np.flatnonzero(MASK & (RENDERER.tokenizer.token_id("<|end|>") == IDS))
    ids, mask = np.delete(IDS, ends[0]), np.delete(MASK, ends[0])
    found = checked(row_of(ids, mask))
    assert (found.outcome, found.causes, found.position) == (Outcome.IDS, [Cause.END_MISSING], int(ends[0]))
    assert (found.findings[0].message, found.findings[0].field) == (1, "stop")


def test_several_causes_in_one_row_are_all_named() -> None:
    spelled = sample_of(changed(_args('{"city":"Paris","unit":"celsius"}'))).ids
    found = checked(row_of([_bos(), *spelled, IDS[-1]]))
    assert found.causes == [Cause.BOS_DOUBLED, Cause.JSON_FORMAT, Cause.END_ADDED]


@pytest.mark.parametrize("letters", [False, True])
def test_text_that_was_encoded_otherwise_is_drift(letters: bool) -> None:
    tokenizer = RENDERER.tokenizer
    word = tokenizer.encode_plain("It is sunny in Paris.").tolist()
    at = next(at for at in range(len(IDS)) if IDS[at : at + len(word)].tolist() == word)
    pieces = list("It is sunny in Paris.") if letters else ["It is su", "nny in Pa", "ris."]
    again = [index for piece in pieces for index in tokenizer.encode_plain(piece).tolist()]
    assert again != word
    found = checked(row_of([*IDS[:at], *again, *IDS[at + len(word) :]]))
    assert set(found.causes) == {Cause.BPE_REMERGE}
    assert (found.findings[0].message, found.findings[0].field) == (5, "content")


def test_a_cut_says_how_much_is_gone_and_what_it_leaves_half() -> None:
    prompt = int(np.flatnonzero(MASK)[0]) - 1
    detail = checked(row_of(IDS[:prompt])).findings[0].words
    assert f"the first {prompt} of {len(IDS)} tokens are there, {len(IDS) - prompt} are missing" in detail
    assert "message 1 (assistant), generation prompt" in detail
    border = int(np.flatnonzero(sample_of().messages == 2)[0])
    assert "between messages" in checked(row_of(IDS[:border])).findings[0].words
    worse = checked(row_of(IDS[:-5], ~MASK[:-5]))
    assert (worse.outcome, worse.causes) == (Outcome.BOTH, [Cause.CUT])


GREETED = {"messages": [user("Hi"), assistant("Hello, how are you today?")]}


def test_the_default_system_prompt_of_a_template_is_missing() -> None:
    talk = GREETED
    whole = sample_of(talk, "qwen2.5")
    first = int(np.flatnonzero(whole.messages == 0)[0])
    missing = checked(row_of(whole.ids[first:], whole.mask[first:], talk), "qwen2.5")
    assert (missing.outcome, missing.causes) == (Outcome.IDS, [Cause.SYSTEM_MISSING])
    late = checked(row_of([*whole.ids[first:], whole.ids[-2]], None, talk), "qwen2.5")
    assert late.causes == [Cause.SYSTEM_MISSING, Cause.END_ADDED]


def test_a_system_prompt_that_is_not_the_templates_is_added() -> None:
    talk = GREETED
    bare = sample_of(talk, "qwen3")
    prompt = load_family("qwen3").encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    added = checked(row_of([*prompt, *bare.ids], [*[0] * len(prompt), *bare.mask], talk), "qwen3")
    assert (added.outcome, added.causes) == (Outcome.IDS, [Cause.SYSTEM_ADDED])


def test_reasoning_kept_where_the_template_leaves_it_out() -> None:
    talk = {"messages": [user("1?"), assistant("a", reasoning="first"), user("2?"), assistant("b", reasoning="then")]}
    kept = sample_of(talk, "qwen3", samples=SampleSettings(past="preserve"))
    found = checked(row_of(kept.ids, None, talk), "qwen3")
    assert found.causes == [Cause.REASONING_ADDED]
    plain = sample_of(talk, "qwen3")
    found = checked(row_of(plain.ids, None, talk), "qwen3", samples=SampleSettings(past="preserve"))
    assert found.causes == [Cause.STRIPPED_REASONING]


def test_a_tag_in_the_place_of_another_token_is_not_reasoning() -> None:
    """Both sides say the same after it."""
    talk = {"messages": [user("What is 2 + 2?"), assistant("It is 4.")]}
    ids = sample_of(talk).ids.copy()
    ids[1] = RENDERER.tokenizer.token_id("<think>")
    found = checked(row_of(ids, None, talk))
    assert found.causes == [Cause.UNKNOWN]
    assert "expected `<|turn|>`, found `<think>`" in found.findings[0].words


# -- masks


@pytest.mark.parametrize(("moved", "mask"), [(1, [False, *MASK[:-1]]), (-1, [*MASK[1:], False])])
def test_a_mask_moved_by_one_is_named(moved: int, mask: list[bool]) -> None:
    found = checked(row_of(IDS, mask))
    assert (found.outcome, found.causes) == (Outcome.MASK, [Cause.MASK_SHIFTED])
    assert ("right" if moved > 0 else "left") in found.findings[0].words


@pytest.mark.parametrize(
    ("supervision", "role", "part", "trained", "messages"),
    [
        ({"roles": ["assistant", "user"]}, "user", "content", True, 2),
        ({"roles": ["assistant", "tool"]}, "tool", "content", True, 1),
        ({"parts": ["reasoning", "content", "tool_calls"]}, "assistant", "stop", False, 3),
        ({"parts": ["reasoning", "content", "stop"]}, "assistant", "tool calls", False, 1),
        ({"parts": ["content", "tool_calls", "stop"]}, "assistant", "reasoning", False, 2),
    ],
)
def test_mask_differences_are_counted_by_role_and_part(
    supervision: dict[str, Any], role: str, part: str, trained: bool, messages: int
) -> None:
    other = build_supervised_sample(RENDERER, MESSAGES, tools=SIMPLE, **supervision)
    found = checked(row_of(IDS, other.mask))
    [wrong] = found.mask
    assert (wrong.where, wrong.field, wrong.cause is Cause.MASK_ADDED) == (role, part, trained)
    assert f"of {messages} {role} turn" in wrong.words
    assert wrong.tokens == int((other.mask != MASK).sum())
    assert found.trained == other.trained


def test_trained_padding_and_added_tokens_are_mask_differences() -> None:
    pad = RENDERER.tokenizer.token_id("<|pad|>")
    padded = checked(row_of([*IDS, pad, pad], [*MASK, 1, 0], attention_mask=[1] * len(IDS) + [0, 0]))
    assert (padded.outcome, [wrong.field for wrong in padded.mask]) == (Outcome.MASK, ["padding"])
    assert padded.position == len(IDS)
    added = checked(row_of([*IDS, IDS[-1]], [*MASK, 1]))
    assert (added.outcome, [wrong.field for wrong in added.mask]) == (Outcome.BOTH, ["added tokens"])
