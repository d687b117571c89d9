"""Checked rows: what is right checks clean, and whatever is wrong is found, placed and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, SIMPLE, assistant, system, user
from tests.data.generate import conversations, write_conversations
from tests.diagnose.checked import (
    CONVERSATION,
    IDS,
    MASK,
    MESSAGES,
    _bos,
    alone,
    changed,
    checked,
    checker,
    make_settings,
    row_of,
    sample_of,
    samples_of,
)
from tests.support import PYTHON_FORMATS, examples, load_family
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import Row
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.row_files import check_dataset
from tokentrace.diagnose.rows import Outcome, RowChecker
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Overlong
from tokentrace.samples.supervised import SampleSettings, build_supervised_sample

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
# -- what is right checks clean


def test_own_rows_of_every_family_check_clean(any_family: str) -> None:
    checks = RowChecker(make_settings(any_family, chat_template=PYTHON_FORMATS.get(any_family)))
    seen = 0
    for name in ("user_assistant", "system_user_assistant", "multi_turn", "long_code", "call_answered"):
        given = {"messages": CONVERSATIONS[name].messages, "tools": CONVERSATIONS[name].tools}
        made = checks.tokenizer.tokenize(Row(1, None, given), "rows")
        if made.bad is not None:
            continue
        seen += 1
        [sample] = made.samples
        found = checks.check(Row(1, None, row_of(sample.ids, sample.mask, given)))
        assert found.outcome is Outcome.SAME, (name, found)
    assert seen >= 3


@pytest.mark.parametrize("past", ["template", "expand"])
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1", "glm-4.5"])
def test_own_rows_are_the_same_whatever_becomes_of_the_past(family: str, past: str) -> None:
    chosen = SampleSettings(past=past)
    for conversation in conversations(4, seed=5, most=12):
        for sample in samples_of(conversation, family, samples=chosen):
            found = checked(row_of(sample.ids, sample.mask, conversation), family, samples=chosen)
            assert found.outcome is Outcome.SAME, found
            assert found.counts["tokens"] == found.counts["expected_tokens"] == len(sample)


@pytest.mark.parametrize("overlong", ["right", "left", "turns"])
@pytest.mark.parametrize("past", [None, "expand"])
def test_a_file_of_ours_checks_clean_with_nothing_but_its_source(
    tmp_path: Path, overlong: str, past: str | None
) -> None:
    write_conversations(tmp_path / "chats.jsonl", 15, seed=2)
    settings = make_settings(samples=SampleSettings(past=past), max_length=700, overlong=Overlong(overlong))
    tokenize_files([str(tmp_path / "chats.jsonl")], tmp_path / "rows.parquet", settings, workers=1)
    report = check_dataset(
        [str(tmp_path / "rows.parquet")], tokenizer=str(POCKET), sources=[str(tmp_path / "chats.jsonl")]
    )
    assert report.clean, report.to_json()
    assert not report.notes
    assert report.rows == report.counts["masks"] == report.counts["compared"]
    for name in ("tokens", "trained"):
        assert report.counts[name] == report.counts[f"expected_{name}"]
    assert report.settings["settings"]["max_length"] == 700


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 5])
@pytest.mark.parametrize("attended", [True, False])
def test_padding_is_taken_off_on_both_sides(left: int, right: int, attended: bool) -> None:
    pad = checker().tokenizer.renderer.tokenizer.token_id("<|pad|>")
    ids = [pad] * left + IDS.tolist() + [pad] * right
    mask = [0] * left + MASK.tolist() + [0] * right
    more = {"attention_mask": [0] * left + [1] * len(IDS) + [0] * right} if attended else {}
    found = checked(row_of(ids, mask, **more))
    assert (found.outcome, found.counts["padding"]) == (Outcome.SAME, left + right)
    flipped = list(mask)
    flipped[left + 40] ^= True
    assert checked(row_of(ids, flipped, **more)).position == left + 40


def test_samples_of_an_expanded_conversation_are_matched_by_number_or_by_likeness() -> None:
    chosen = SampleSettings(past="expand")
    conversation = {"messages": [user("1?"), assistant("a", reasoning="x"), user("2?"), assistant("b", reasoning="y")]}
    samples = samples_of(conversation, "qwen3", samples=chosen)
    assert len(samples) == 2
    for number, sample in enumerate(samples):
        for more in ({}, {"source": "x", "row": 1, "sample": number}):
            row = row_of(sample.ids, sample.mask, conversation, **more)
            assert checked(row, "qwen3", samples=chosen).outcome is Outcome.SAME
    other = checked(row_of(samples[0].ids, None, conversation, source="x", row=1, sample=1), "qwen3", samples=chosen)
    assert other.outcome is not Outcome.SAME
    many = checked(row_of(samples[0].ids, None, conversation, source="x", row=1, sample=7), "qwen3", samples=chosen)
    assert many.outcome is Outcome.SAME
    assert "sample 7" in many.reason


# -- what is wrong is found, where it is


@settings(max_examples=examples(150), deadline=None)
@given(at=st.integers(0, len(IDS) - 1), other=st.integers(0, 4095), masked=st.booleans())
def test_one_other_id_is_always_found_at_its_place(at: int, other: int, masked: bool) -> None:
    if other == IDS[at]:
        other = (other + 1) % 4096
    ids = IDS.copy()
    ids[at] = other
    found = checked(row_of(ids, MASK if masked else None))
    assert found.outcome not in (Outcome.SAME, Outcome.UNCHECKED)
    assert found.position is not None
    assert found.causes


@settings(max_examples=examples(150), deadline=None)
@given(at=st.integers(0, len(IDS) - 1), labelled=st.booleans())
def test_one_flipped_bit_of_the_mask_is_always_found_at_its_place(at: int, labelled: bool) -> None:
    mask = MASK.copy()
    mask[at] ^= True
    row = row_of(IDS, labels=np.where(mask, IDS, -100).tolist()) if labelled else row_of(IDS, mask)
    found = checked(row)
    assert (found.outcome, found.position) == (Outcome.MASK, at)
    [wrong] = found.mask
    assert (wrong.tokens, wrong.cause is Cause.MASK_ADDED) == (1, bool(mask[at]))


def test_what_differs_is_placed_in_message_and_field() -> None:
    other = changed(lambda row: row["messages"][2].update(content="And the weather in Rome?"))
    found = checked(row_of(sample_of(other).ids))
    [place], [contrast] = found.findings, found.contrasts
    [hunk] = contrast.hunks
    assert (place.cause, place.message, place.field) == (Cause.UNKNOWN, 2, "content")
    assert "".join((contrast.one.texts or [])[hunk.start : hunk.stop]).strip() == "Paris"
    assert "".join((contrast.other.texts or [])[hunk.other_start : hunk.other_stop]).strip() == "Rome"
    assert "message 2 (user), content" in str(place)


# -- rows without a conversation


def test_without_a_conversation_only_ids_outside_of_the_vocabulary_are_wrong() -> None:
    without_mask = checked(row_of(IDS))
    assert (without_mask.outcome, without_mask.counts["masks"]) == (Outcome.SAME, 0)
    assert checked(alone(IDS, MASK)).outcome is Outcome.UNCHECKED
    found = checked(alone([*IDS[:7], 4096, *IDS[8:]], MASK))
    assert (found.outcome, "token 7 is 4096" in found.reason) == (Outcome.BAD, True)


# -- rows that are bad in themselves


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1, 2], "mapping of columns"),
        ({"messages": MESSAGES}, "holds no ids"),
        (row_of([]), "holds no ids"),
        ({**CONVERSATION, "input_ids": ["a"]}, ""),
        ({**CONVERSATION, "input_ids": [2**40]}, ""),
        (row_of(IDS, MASK[:-1]), "loss_mask: "),
        (row_of(IDS, labels=[-100]), "labels: 1 labels"),
        (row_of(IDS, attention_mask=[1]), "attention_mask: has 1 entries"),
        (row_of(IDS, attention_mask=[0] * len(IDS)), "only zeros"),
        (row_of(IDS, attention_mask=[1, 0, *[1] * (len(IDS) - 2)]), "a hole"),
        (row_of(IDS, [2] * len(IDS)), "entry 0 is 2"),
        (row_of(IDS, labels=[*[-100] * (len(IDS) - 1), 5]), "is not the id there"),
        (row_of(IDS, labels=[*IDS[1:].tolist(), -100]), "those of the next token"),
        (row_of(IDS, MASK, labels=[-100] * len(IDS)), "contradicts the mask"),
        (row_of(IDS, conversation={"messages": [{"role": "nobody"}]}), "gives no row"),
        (row_of(IDS, conversation={"messages": [user("Hi")]}), "no assistant turn"),
    ],
)
def test_a_row_with_a_problem_of_its_own_is_bad_and_says_why(row: Any, said: str) -> None:
    found = checker().check(Row(3, None, row))
    assert found.outcome is Outcome.BAD
    assert said in found.reason


# -- causes


def _args(text: str) -> Callable[[dict[str, Any]], Any]:
    def change(row: dict[str, Any]) -> None:
        row["messages"][3]["tool_calls"][0]["function"]["arguments"] = text

    return change


RENDERER = checker().tokenizer.renderer
PROMPT = RENDERER.render(MESSAGES, tools=SIMPLE, add_generation_prompt=True).ids


def other(change: Callable[[dict[str, Any]], Any]) -> Any:
    """The ids of a conversation that was changed."""
    return sample_of(changed(change)).ids


CAUSES: dict[str, tuple[Any, Cause]] = {
    "BOS doubled": ([_bos(), *IDS], Cause.BOS_DOUBLED),
    "BOS missing": (IDS[1:], Cause.BOS_MISSING),
    "generation prompt": (PROMPT, Cause.GENERATION_PROMPT),
    "end missing": (IDS[:-1], Cause.END_MISSING),
    "end doubled": ([*IDS, IDS[-1]], Cause.END_ADDED),
    "newline added": ([*IDS, *RENDERER.tokenizer.encode("\n")], Cause.LAST_WHITESPACE),
    "cut at the end": (IDS[:-5], Cause.CUT),
    "cut at the beginning": (IDS[200:], Cause.CUT),
    "tools": (other(lambda row: row.pop("tools")), Cause.TOOLS_MISSING),
    "other tools": (other(lambda row: row["tools"].pop()), Cause.CHANGED_TOOLS),
    "reasoning": (other(lambda row: row["messages"][1].pop("reasoning_content")), Cause.STRIPPED_REASONING),
    "system": (other(lambda row: row["messages"].insert(0, system("You are a pirate."))), Cause.CHANGED_SYSTEM),
    "control": (sample_of(control_tokens="hf_compat").ids, Cause.TEXT_AS_CONTROL),
    "JSON": (other(_args('{"city":"Paris","unit":"celsius"}')), Cause.JSON_FORMAT),
    "white space": (other(lambda row: row["messages"][2].update(content=" And the weather in Paris?")),
                    Cause.WHITESPACE),
    "call": (other(_args('{"city": "Rome", "unit": "celsius"}')), Cause.REWRITTEN_CALL),
    "no token": ([*IDS[:9], 99_999, *IDS[10:]], Cause.NO_TOKEN),
    "text": (other(lambda row: row["messages"][5].update(content="It rains in Paris.")), Cause.UNKNOWN),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named(name: str) -> None:
    ids, cause = CAUSES[name]
    found = checked(row_of(ids))
    assert (found.outcome, found.causes) == (Outcome.CUT if cause is Cause.CUT else Outcome.IDS, [cause]), found


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


def test_a_cut_says_how_much_is_gone_and_where() -> None:
    prompt = int(np.flatnonzero(MASK)[0]) - 1
    words = checked(row_of(IDS[:prompt])).findings[0].words
    assert words.startswith("message 1 (assistant), generation prompt: expected")
    assert f"({len(IDS) - prompt} of {len(IDS)} tokens), found nothing" in words
    worse = checked(row_of(IDS[:-5], ~MASK[:-5]))
    assert (worse.outcome, worse.causes) == (Outcome.BOTH, [Cause.CUT])


GREETED = {"messages": [user("Hi"), assistant("Hello, how are you today?")]}
THOUGHT = {"messages": [user("1?"), assistant("a", reasoning="first"), user("2?"), assistant("b", reasoning="then")]}


def test_the_default_system_prompt_of_a_template_is_missing() -> None:
    whole = sample_of(GREETED, "qwen2.5")
    first = int(np.flatnonzero(whole.messages == 0)[0])
    for ids, more in ((whole.ids[first:], []), ([*whole.ids[first:], whole.ids[-2]], [Cause.END_ADDED])):
        assert checked(row_of(ids, None, GREETED), "qwen2.5").causes == [Cause.SYSTEM_MISSING, *more]


def test_what_a_template_would_not_write_is_added() -> None:
    bare, plain = sample_of(GREETED, "qwen3"), sample_of(THOUGHT, "qwen3")
    prompt = load_family("qwen3").encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    added = checked(row_of([*prompt, *bare.ids], [*[0] * len(prompt), *bare.mask], GREETED), "qwen3")
    assert (added.outcome, added.causes) == (Outcome.IDS, [Cause.SYSTEM_ADDED])
    preserve = {"samples": SampleSettings(past="preserve")}
    kept = sample_of(THOUGHT, "qwen3", **preserve)
    assert checked(row_of(kept.ids, None, THOUGHT), "qwen3").causes == [Cause.REASONING_ADDED]
    assert checked(row_of(plain.ids, None, THOUGHT), "qwen3", **preserve).causes == [Cause.STRIPPED_REASONING]


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
    assert found.counts["trained"] == other.trained


def test_trained_padding_and_added_tokens_are_mask_differences() -> None:
    pad = RENDERER.tokenizer.token_id("<|pad|>")
    padded = checked(row_of([*IDS, pad, pad], [*MASK, 1, 0], attention_mask=[1] * len(IDS) + [0, 0]))
    assert (padded.outcome, [wrong.field for wrong in padded.mask]) == (Outcome.MASK, ["padding"])
    assert padded.position == len(IDS)
    added = checked(row_of([*IDS, IDS[-1]], [*MASK, 1]))
    assert (added.outcome, [wrong.field for wrong in added.mask]) == (Outcome.BOTH, ["added tokens"])
