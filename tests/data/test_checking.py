"""The delta check: what is right checks clean, and whatever is wrong with a row is found, placed and named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import (
    CONVERSATIONS,
    PARIS,
    RAINY,
    ROME,
    SIMPLE,
    SUNNY,
    Conversation,
    assistant,
    call,
    system,
    user,
)
from tests.data.generate import conversations, write_conversations
from tests.oracle import GenerationMask, hf_generation_mask, hf_tokenizer
from tests.support import PYTHON_FORMATS, load_family, make_renderer, templates_of_trl
from tokentrace import InputError, SampleError, TokentraceError
from tokentrace.compare.causes import Cause
from tokentrace.data.check.columns import RowColumns, ready_row
from tokentrace.data.check.dataset import CheckedRow, Outcome, RowChecker, check_dataset
from tokentrace.data.check.report import EXAMPLES
from tokentrace.data.check.source_rows import SourceRows
from tokentrace.data.check.turn_marks import TurnMarks
from tokentrace.data.conversations import Columns
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import Row, find_sources
from tokentrace.data.tokenizing import RowTokenizer, TokenizeSettings
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Sample
from tokentrace.samples.supervised import Supervision, build_supervised_sample
from tokentrace.samples.truncation import Overlong

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.TurnStartWarning")

MESSAGES = [
    user("Is <|end|> a token, and what is 1+1?"),
    assistant("Two, I say.", reasoning="Let me think it over."),
    user("And the weather in Paris?"),
    assistant("Let me look.", PARIS, reasoning="A tool knows."),
    SUNNY,
    assistant("It is sunny in Paris."),
]
CONVERSATION: dict[str, Any] = {"messages": MESSAGES, "tools": SIMPLE}


@lru_cache(maxsize=4)
def checker(family: str | None = None, **options: Any) -> RowChecker:
    return RowChecker(make_settings(family, **options))


def make_settings(family: str | None = None, **options: Any) -> TokenizeSettings:
    """Rows are of the matrix, as it is: what templates do to it is known, and what they lose of it."""
    chosen = {"messages": "as_given", "lost": "ignore", **options}
    return TokenizeSettings(tokenizer=str(POCKET) if family is None else load_family(family), **chosen)


@lru_cache(maxsize=4)
def _tokenizer(family: str | None, options: tuple[tuple[str, Any], ...]) -> RowTokenizer:
    return RowTokenizer(make_settings(family, **dict(options)))


def samples_of(conversation: dict[str, Any], family: str | None = None, **options: Any) -> tuple[Sample, ...]:
    made = _tokenizer(family, tuple(options.items())).tokenize(Row(1, None, conversation), "rows")
    assert made.bad is None, made.bad
    return made.samples


def sample_of(conversation: dict[str, Any] = CONVERSATION, family: str | None = None, **options: Any) -> Sample:
    return samples_of(conversation, family, **options)[0]


def row_of(ids: Any, mask: Any = None, conversation: dict[str, Any] = CONVERSATION, **more: Any) -> dict[str, Any]:
    masked = {} if mask is None else {"loss_mask": [int(value) for value in mask]}
    return {**conversation, "input_ids": [int(index) for index in ids], **masked, **more}


def checked(row: dict[str, Any], family: str | None = None, **options: Any) -> CheckedRow:
    return checker(family, **options).check(Row(1, None, json.loads(json.dumps(row))))


def changed(change: Callable[[dict[str, Any]], Any], conversation: dict[str, Any] = CONVERSATION) -> dict[str, Any]:
    other = copy.deepcopy(conversation)
    change(other)
    return other


IDS, MASK = sample_of().ids, sample_of().mask


# -- what is right checks clean


def test_own_rows_of_every_family_check_clean_and_their_mask_can_be_read_from_the_ids(any_family: str) -> None:
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
        assert np.array_equal(checks.marks.mask(sample.ids), sample.mask), name
    assert seen >= 3


@pytest.mark.parametrize("past", ["template", "expand"])
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1", "glm-4.5"])
def test_own_rows_are_the_same_whatever_becomes_of_the_past(family: str, past: str) -> None:
    supervision = Supervision.of(past=past)
    for conversation in conversations(4, seed=5, most=12):
        for sample in samples_of(conversation, family, supervision=supervision):
            found = checked(row_of(sample.ids, sample.mask, conversation), family, supervision=supervision)
            assert found.outcome is Outcome.SAME, found
            assert (found.tokens, found.expected_tokens) == (len(sample), len(sample))


@pytest.mark.parametrize("overlong", ["right", "left", "turns"])
@pytest.mark.parametrize("past", [None, "expand"])
def test_a_file_of_ours_checks_clean_with_nothing_but_its_source(
    tmp_path: Path, overlong: str, past: str | None
) -> None:
    write_conversations(tmp_path / "chats.jsonl", 30, seed=2)
    settings = make_settings(
        supervision=Supervision.of(past=past), max_length=700, overlong=Overlong(overlong), labels=True
    )
    tokenize_files([str(tmp_path / "chats.jsonl")], tmp_path / "rows.parquet", settings, workers=1)
    report = check_dataset(
        [str(tmp_path / "rows.parquet")], tokenizer=str(POCKET), sources=[str(tmp_path / "chats.jsonl")]
    )
    assert report.clean, report.to_json()
    assert not report.findings
    assert report.rows == report.masks == report.compared
    assert report.tokens == report.expected_tokens
    assert report.trained == report.expected_trained
    assert report.settings["settings"]["max_length"] == 700


def test_labels_say_the_same_as_a_mask() -> None:
    labels = np.where(MASK, IDS, -100).tolist()
    assert checked(row_of(IDS, labels=labels)).outcome is Outcome.SAME
    assert checked(row_of(IDS, MASK, labels=labels)).outcome is Outcome.SAME
    lost = [*labels[:-1], -100]
    found = checked(row_of(IDS, labels=lost))
    assert (found.outcome, found.position) == (Outcome.MASK, len(IDS) - 1)


def test_without_a_mask_the_ids_alone_are_checked() -> None:
    found = checked(row_of(IDS))
    assert (found.outcome, found.trained) == (Outcome.SAME, None)


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 5])
@pytest.mark.parametrize("attended", [True, False])
def test_padding_is_taken_off_on_both_sides(left: int, right: int, attended: bool) -> None:
    pad = checker().tokenizer.renderer.tokenizer.token_id("<|pad|>")
    ids = [pad] * left + IDS.tolist() + [pad] * right
    mask = [0] * left + MASK.tolist() + [0] * right
    more = {"attention_mask": [0] * left + [1] * len(IDS) + [0] * right} if attended else {}
    found = checked(row_of(ids, mask, **more))
    assert (found.outcome, found.padding) == (Outcome.SAME, left + right)
    flipped = list(mask)
    flipped[left + 40] ^= True
    assert checked(row_of(ids, flipped, **more)).position == left + 40


def test_padding_that_the_expected_row_has_too_stays() -> None:
    """The last turn of this row ends with the token that rows are padded with."""
    checks = RowChecker(make_settings(), pad_token="<|end|>")
    row = row_of([*IDS, *[IDS[-1]] * 3], [*MASK, 0, 0, 0])
    found = checks.check(Row(1, None, row))
    assert (found.outcome, found.padding) == (Outcome.SAME, 3)
    with pytest.raises(InputError, match="no control token"):
        RowChecker(make_settings(), pad_token="<nothing>")


def test_samples_of_an_expanded_conversation_are_matched_by_number_or_by_likeness() -> None:
    supervision = Supervision.of(past="expand")
    conversation = {"messages": [user("1?"), assistant("a", reasoning="x"), user("2?"), assistant("b", reasoning="y")]}
    samples = samples_of(conversation, "qwen3", supervision=supervision)
    assert len(samples) == 2
    for number, sample in enumerate(samples):
        for more in ({}, {"source": "x", "row": 1, "sample": number}):
            row = row_of(sample.ids, sample.mask, conversation, **more)
            assert checked(row, "qwen3", supervision=supervision).outcome is Outcome.SAME
    other = checked(
        row_of(samples[0].ids, None, conversation, source="x", row=1, sample=1), "qwen3", supervision=supervision
    )
    assert other.outcome is not Outcome.SAME
    many = checked(
        row_of(samples[0].ids, None, conversation, source="x", row=1, sample=7), "qwen3", supervision=supervision
    )
    assert many.outcome is Outcome.SAME
    assert "sample 7" in (many.reason or "")


# -- what is wrong is found, where it is


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(IDS) - 1), other=st.integers(0, 4095), masked=st.booleans())
def test_one_other_id_is_always_found_at_its_place(at: int, other: int, masked: bool) -> None:
    if other == IDS[at]:
        other = (other + 1) % 4096
    ids = IDS.copy()
    ids[at] = other
    found = checked(row_of(ids, MASK if masked else None))
    assert found.outcome not in (Outcome.SAME, Outcome.UNCHECKED)
    assert found.deviations[0].expected_position == at
    assert found.causes


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, len(IDS) - 1), labelled=st.booleans())
def test_one_flipped_bit_of_the_mask_is_always_found_at_its_place(at: int, labelled: bool) -> None:
    mask = MASK.copy()
    mask[at] ^= True
    row = row_of(IDS, labels=np.where(mask, IDS, -100).tolist()) if labelled else row_of(IDS, mask)
    found = checked(row)
    assert (found.outcome, found.position) == (Outcome.MASK, at)
    [wrong] = found.mask
    assert (wrong.tokens, wrong.trained) == (1, bool(mask[at]))


def test_what_differs_is_placed_in_message_and_field() -> None:
    other = changed(lambda row: row["messages"][2].update(content="And the weather in Rome?"))
    found = checked(row_of(sample_of(other).ids))
    [place] = found.deviations
    assert (place.cause, place.message, place.role, place.field) == (Cause.UNKNOWN, 2, "user", "content")
    assert "".join(place.expected).strip() == "Paris"
    assert "".join(place.found).strip() == "Rome"
    assert "message 2 (user), content" in str(place)


# -- causes


def _bos(index: int = 0) -> int:
    return int(IDS[index])


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
    "call": (sample_of(changed(_args('{"city": "Rome", "unit": "celsius"}'))).ids, Cause.OTHER_CALL, Outcome.IDS),
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


def test_a_control_token_that_was_spelled_out_is_named() -> None:
    end = int(np.flatnonzero(RENDERER.tokenizer.token_id("<|end|>") == IDS)[1])
    spelled = RENDERER.tokenizer.encode_plain(["<|end|>"])[0]
    found = checked(row_of([*IDS[:end], *spelled, *IDS[end + 1 :]]))
    assert found.causes == [Cause.CONTROL_AS_TEXT]


def test_a_stop_token_dropped_inside_a_row_is_named() -> None:
    ends = np.flatnonzero(MASK & (RENDERER.tokenizer.token_id("<|end|>") == IDS))
    ids, mask = np.delete(IDS, ends[0]), np.delete(MASK, ends[0])
    found = checked(row_of(ids, mask))
    assert (found.outcome, found.causes, found.position) == (Outcome.IDS, [Cause.END_MISSING], int(ends[0]))
    assert (found.deviations[0].message, found.deviations[0].field) == (1, "stop")


def test_several_causes_in_one_row_are_all_named() -> None:
    spelled = sample_of(changed(_args('{"city":"Paris","unit":"celsius"}'))).ids
    found = checked(row_of([_bos(), *spelled, IDS[-1]]))
    assert found.causes == [Cause.BOS_DOUBLED, Cause.JSON_FORMAT, Cause.END_ADDED]


@pytest.mark.parametrize("letters", [False, True])
def test_text_that_was_encoded_otherwise_is_drift(letters: bool) -> None:
    tokenizer = RENDERER.tokenizer
    word = tokenizer.encode_plain(["It is sunny in Paris."])[0].tolist()
    at = next(at for at in range(len(IDS)) if IDS[at : at + len(word)].tolist() == word)
    pieces = list("It is sunny in Paris.") if letters else ["It is su", "nny in Pa", "ris."]
    again = [index for piece in tokenizer.encode_plain(pieces) for index in piece.tolist()]
    assert again != word
    found = checked(row_of([*IDS[:at], *again, *IDS[at + len(word) :]]))
    assert set(found.causes) == {Cause.BPE_REMERGE}
    assert (found.deviations[0].message, found.deviations[0].field) == (5, "content")


def test_a_cut_says_how_much_is_gone_and_what_it_leaves_half() -> None:
    prompt = int(np.flatnonzero(MASK)[0]) - 1
    detail = checked(row_of(IDS[:prompt])).deviations[0].detail
    assert f"the first {prompt} of {len(IDS)} tokens are there, {len(IDS) - prompt} are missing" in detail
    assert "message 1 (assistant), generation prompt and leaves half" in detail
    inside = next(at for at in range(len(IDS)) if sample_of().parts[at - 1] == sample_of().parts[at] == 3)  # type: ignore[index]
    assert "left unclosed" in checked(row_of(IDS[:inside])).deviations[0].detail
    border = int(np.flatnonzero(sample_of().messages == 2)[0])
    assert "between messages" in checked(row_of(IDS[:border])).deviations[0].detail
    worse = checked(row_of(IDS[:-5], ~MASK[:-5]))
    assert (worse.outcome, worse.causes) == (Outcome.BOTH, [Cause.CUT])


def test_the_default_system_prompt_of_a_template_missing_or_added() -> None:
    talk = {"messages": [user("Hi"), assistant("Hello, how are you today?")]}
    whole = sample_of(talk, "qwen2.5")
    first = int(np.flatnonzero(whole.messages == 0)[0])
    missing = checked(row_of(whole.ids[first:], whole.mask[first:], talk), "qwen2.5")
    assert (missing.outcome, missing.causes) == (Outcome.IDS, [Cause.SYSTEM_MISSING])
    late = checked(row_of([*whole.ids[first:], whole.ids[-2]], None, talk), "qwen2.5")
    assert late.causes == [Cause.SYSTEM_MISSING, Cause.END_ADDED]
    bare = sample_of(talk, "qwen3")
    prompt = load_family("qwen3").encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    added = checked(row_of([*prompt, *bare.ids], [*[0] * len(prompt), *bare.mask], talk), "qwen3")
    assert (added.outcome, added.causes) == (Outcome.IDS, [Cause.SYSTEM_ADDED])


def test_reasoning_kept_where_the_template_leaves_it_out() -> None:
    talk = {"messages": [user("1?"), assistant("a", reasoning="first"), user("2?"), assistant("b", reasoning="then")]}
    kept = sample_of(talk, "qwen3", supervision=Supervision.of(past="preserve"))
    found = checked(row_of(kept.ids, None, talk), "qwen3")
    assert found.causes == [Cause.REASONING_KEPT]
    plain = sample_of(talk, "qwen3")
    found = checked(row_of(plain.ids, None, talk), "qwen3", supervision=Supervision.of(past="preserve"))
    assert found.causes == [Cause.STRIPPED_REASONING]


# -- masks


@pytest.mark.parametrize(("moved", "mask"), [(1, [False, *MASK[:-1]]), (-1, [*MASK[1:], False])])
def test_a_mask_moved_by_one_is_named(moved: int, mask: list[bool]) -> None:
    found = checked(row_of(IDS, mask))
    assert (found.outcome, found.shifted, found.causes) == (Outcome.MASK, moved, [Cause.MASK_SHIFTED])


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
    assert (wrong.role, wrong.part, wrong.trained, wrong.messages) == (role, part, trained, messages)
    assert wrong.tokens == int((other.mask != MASK).sum())
    assert found.trained == other.trained


def test_a_trained_generation_prompt_is_named_as_such() -> None:
    mask = MASK.copy()
    first = int(np.flatnonzero(MASK)[0])
    mask[first - 3 : first] = True
    [wrong] = checked(row_of(IDS, mask)).mask
    assert str(wrong) == "generation prompt of 1 assistant turn trained (3 tokens)"


def test_trained_padding_and_added_tokens_are_mask_differences() -> None:
    pad = RENDERER.tokenizer.token_id("<|pad|>")
    padded = checked(row_of([*IDS, pad, pad], [*MASK, 1, 0], attention_mask=[1] * len(IDS) + [0, 0]))
    assert (padded.outcome, [wrong.part for wrong in padded.mask]) == (Outcome.MASK, ["padding"])
    added = checked(row_of([*IDS, IDS[-1]], [*MASK, 1]))
    assert (added.outcome, [wrong.part for wrong in added.mask]) == (Outcome.BOTH, ["added tokens"])


# -- rows without a conversation


def alone(ids: Any, mask: Any = None, **more: Any) -> dict[str, Any]:
    return row_of(ids, mask, {}, **more)


def test_without_a_conversation_the_mask_is_held_against_the_turns_that_ids_show() -> None:
    right = checked(alone(IDS, MASK))
    assert right.outcome is Outcome.UNCHECKED
    assert "turns that its ids show" in (right.reason or "")
    mask = MASK.copy()
    mask[np.flatnonzero(MASK)[-1]] = False
    wrong = checked(alone(IDS, mask))
    assert (wrong.outcome, wrong.position) == (Outcome.MASK, int(np.flatnonzero(MASK)[-1]))
    assert [str(one) for one in wrong.mask] == ["stop token of 1 assistant turn not trained (1 token)"]


def test_without_a_conversation_nothing_is_claimed_that_ids_do_not_show() -> None:
    assert checked(alone(IDS)).outcome is Outcome.UNCHECKED
    none = checked(alone(IDS[:20], MASK[:20]))
    assert (none.outcome, "no assistant's turn" in (none.reason or "")) == (Outcome.UNCHECKED, True)
    for supervision in (
        Supervision.of(turns="flagged"),
        Supervision.of(parts=["content"]),
        Supervision.of(roles=["user"]),
    ):
        found = checked(alone(IDS, ~MASK), supervision=supervision)
        assert (found.outcome, "cannot be read" in (found.reason or "")) == (Outcome.UNCHECKED, True)
    last = sample_of(supervision=Supervision.of(turns="last"))
    assert checked(alone(last.ids, last.mask), supervision=Supervision.of(turns="last")).outcome is Outcome.UNCHECKED
    assert checked(alone(last.ids, MASK), supervision=Supervision.of(turns="last")).outcome is Outcome.MASK


def test_without_a_conversation_an_id_outside_of_the_vocabulary_is_bad() -> None:
    found = checked(alone([*IDS[:7], 4096, *IDS[8:]], MASK))
    assert (found.outcome, "token 7 is 4096" in (found.reason or "")) == (Outcome.BAD, True)


LESS = {
    "glm-4.5": "a system message inside of a conversation ends a turn with a token that probes do not show",
    "mistral-nemo": "after the first of two results nothing tells that another result follows",
}
"""Families in which more than plain conversations are not read exactly, and why; docs/check.md says it in general."""


@pytest.mark.parametrize(("family", "name"), [("glm-4.5", "system_in_the_middle"), ("mistral-nemo", "calls_parallel")])
def test_what_cannot_be_read_from_ids_is_as_documented(family: str, name: str) -> None:
    assert family in LESS
    renderer = make_renderer(family)
    given = CONVERSATIONS[name]
    sample = build_supervised_sample(renderer, given.messages, tools=given.tools, past="template")
    assert not np.array_equal(TurnMarks(renderer).mask(sample.ids), sample.mask)


@pytest.mark.parametrize("family", ["qwen3", "gpt-oss", "llama-3.1", "deepseek-v3"])
def test_turns_with_reasoning_calls_and_results_are_read_from_ids(family: str) -> None:
    renderer = make_renderer(family, messages="as_given")  # DeepSeek V3's template does not end the turns of its calls
    marks = TurnMarks(renderer)
    names = (
        "reasoning_every_turn",
        "call_answered",
        "calls_in_sequence",
        "agentic_no_reasoning",
        "content_leading_newlines",
    )
    seen = 0
    for name in names:
        try:
            given = CONVERSATIONS[name]
            sample = build_supervised_sample(renderer, given.messages, tools=given.tools, past="template")
        except TokentraceError:
            continue
        seen += 1
        assert np.array_equal(marks.mask(sample.ids), sample.mask), name
    assert seen >= 3


# -- rows that are bad in themselves


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ([1, 2], "mapping of columns"),
        ({"messages": MESSAGES}, "holds no ids"),
        (row_of([]), "holds no ids"),
        ({**CONVERSATION, "input_ids": ["a"]}, "no number"),
        ({**CONVERSATION, "input_ids": [[1, 2]]}, "list of lists"),
        ({**CONVERSATION, "input_ids": [1.5]}, "no token id"),
        ({**CONVERSATION, "input_ids": [2**40]}, "as large as"),
        (row_of(IDS, MASK[:-1]), "loss_mask: has"),
        (row_of(IDS, labels=[-100]), "labels: has 1 entries"),
        (row_of(IDS, attention_mask=[1]), "attention_mask: has 1 entries"),
        (row_of(IDS, attention_mask=[0] * len(IDS)), "leaves out every token"),
        (row_of(IDS, attention_mask=[1, 0, *[1] * (len(IDS) - 2)]), "a hole at token 1"),
        (row_of(IDS, [2] * len(IDS)), "holds 2 at token 0"),
        (row_of(IDS, labels=[*[-100] * (len(IDS) - 1), 5]), "neither -100 nor the id"),
        (row_of(IDS, labels=[*IDS[1:].tolist(), -100]), "those of the next token"),
        (row_of(IDS, MASK, labels=[-100] * len(IDS)), "do not say the same"),
        (row_of(IDS, conversation={"messages": [{"role": "nobody"}]}), "gives no row"),
        (row_of(IDS, conversation={"messages": [user("Hi")]}), "no assistant turn"),
    ],
)
def test_a_row_with_a_problem_of_its_own_is_bad_and_says_why(row: Any, said: str) -> None:
    found = checker().check(Row(3, None, row))
    assert found.outcome is Outcome.BAD
    assert said in (found.reason or "")


def test_named_columns_are_taken_and_have_to_be_there() -> None:
    row = {"a": IDS.tolist(), "b": MASK.tolist(), "c": np.where(MASK, IDS, -100).tolist()}
    named = ready_row(row, RowColumns("a", "b"))
    assert np.array_equal(named.ids, IDS)
    assert named.mask is not None
    assert np.array_equal(named.mask, MASK)
    labelled = ready_row(row, RowColumns("a", "c"))
    assert labelled.mask is not None
    assert np.array_equal(labelled.mask, MASK)
    for columns in (RowColumns("x"), RowColumns("a", "x")):
        with pytest.raises(InputError, match="no such column"):
            ready_row(row, columns)


# -- datasets


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_a_report_counts_outcomes_causes_masks_and_keeps_a_few_examples(tmp_path: Path) -> None:
    untrained = MASK.copy()
    untrained[np.flatnonzero(MASK)[-1]] = False
    rows = (
        [row_of(IDS, MASK)] * 8 + [row_of([_bos(), *IDS], [0, *MASK])] * 7 + [row_of(IDS, untrained)] * 2 + [{"a": 1}]
    )
    path = write_lines(tmp_path / "rows.jsonl", rows)
    told: list[tuple[int, int]] = []
    report = check_dataset([path], make_settings(), progress=lambda done, total: told.append((done, total)))
    assert dict(report.outcomes) == {Outcome.SAME: 8, Outcome.IDS: 7, Outcome.MASK: 2, Outcome.BAD: 1}
    assert dict(report.causes) == {Cause.BOS_DOUBLED: 7}
    [(key, count)] = report.mask.items()
    assert (key, count.tokens, count.rows) == (("assistant", "stop", False), 2, 2)
    assert report.mask_words() == ["stop token of 2 assistant turns not trained (2 tokens)"]
    assert {outcome: len(kept) for outcome, kept in report.examples.items()} == {
        Outcome.SAME: EXAMPLES,
        Outcome.IDS: EXAMPLES,
        Outcome.MASK: 2,
        Outcome.BAD: 1,
    }
    assert report.examples[Outcome.BAD][0].row == 18
    assert report.tokens == report.expected_tokens + 7
    assert report.trained == report.expected_trained - 2
    assert told[-1][0] == told[-1][1] == Path(path).stat().st_size
    assert report.verdict == "10 of 18 rows are not what the template gives"
    json.dumps(report.to_json())
    limited = check_dataset([path], make_settings(), limit=8)
    assert (limited.rows, limited.clean, limited.stopped) == (8, True, True)


def test_rows_are_read_from_parquet_and_from_saved_datasets(tmp_path: Path) -> None:
    import datasets
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = []
    for conversation in conversations(6, seed=1, most=6):
        sample = sample_of(conversation)
        rows.append(
            {"messages": conversation["messages"], "input_ids": sample.token_ids, "labels": sample.labels.tolist()}
        )
    for row in rows:  # one shape for all arguments, as Parquet wants it
        row["messages"] = [dict(message) for message in row["messages"]]
    texts = [{**row, "messages": json.dumps(row["messages"])} for row in rows]
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "rows.parquet")
    assert check_dataset([str(tmp_path / "rows.parquet")], make_settings()).clean
    datasets.Dataset.from_list(texts).save_to_disk(str(tmp_path / "saved"))
    assert check_dataset([str(tmp_path / "saved")], make_settings()).clean
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    assert check_dataset([str(tmp_path / "rows.json")], make_settings()).clean


def test_sources_are_found_by_name_or_base_name_in_any_order(tmp_path: Path) -> None:
    chats = list(conversations(600, seed=3, most=4))
    (tmp_path / "a").mkdir()
    source = write_lines(tmp_path / "a" / "chats.jsonl", chats)
    order = [599, 0, 300, 1, 598]
    rows = []
    for at in order:
        sample = sample_of(chats[at])
        rows.append(alone(sample.ids, sample.mask, source="elsewhere/chats.jsonl", row=at + 1, sample=0))
    rows.append(alone(IDS, MASK, source="chats.jsonl", row=601, sample=0))
    rows.append(alone(IDS, MASK, source="others.jsonl", row=1, sample=0))
    path = write_lines(tmp_path / "rows.jsonl", rows)
    report = check_dataset([path], make_settings(), sources=[source])
    assert dict(report.outcomes) == {Outcome.SAME: 5, Outcome.UNCHECKED: 2}
    assert any("no row 601" in reason for reason in report.reasons)
    assert any("'others.jsonl' is not at hand" in reason for reason in report.reasons)
    (tmp_path / "b").mkdir()
    twin = write_lines(tmp_path / "b" / "chats.jsonl", chats)
    both = SourceRows(find_sources([source, twin], tmp_path / "spool"))
    assert isinstance(both.find(source), type(both.sources[0]))
    assert "several sources" in str(both.find("chats.jsonl"))


def test_a_file_made_with_another_template_or_other_settings_says_so(tmp_path: Path) -> None:
    write_conversations(tmp_path / "chats.jsonl", 3, seed=4)
    template = (POCKET / "chat_template.jinja").read_text(encoding="utf-8") + "{#- as good as the same -#}"
    made_with = make_settings(chat_template=template)
    tokenize_files([str(tmp_path / "chats.jsonl")], tmp_path / "rows.parquet", made_with, workers=1)
    given: dict[str, Any] = {"tokenizer": str(POCKET), "sources": [str(tmp_path / "chats.jsonl")]}
    report = check_dataset([str(tmp_path / "rows.parquet")], **given)
    assert report.clean
    assert [finding for finding in report.findings if "another template" in finding]
    same = check_dataset([str(tmp_path / "rows.parquet")], changes={"chat_template": template}, **given)
    assert not same.findings
    other = check_dataset([str(tmp_path / "rows.parquet")], changes={"turns": "last"}, **given)
    assert [finding for finding in other.findings if finding.endswith("made with other settings: turns")]
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write("\n")
    assert any(
        "has changed since" in found for found in check_dataset([str(tmp_path / "rows.parquet")], **given).findings
    )
    with pytest.raises(InputError, match="tokenizer="):
        check_dataset([str(tmp_path / "rows.parquet")])


def test_settings_are_read_back_from_their_description() -> None:
    everything = TokenizeSettings(
        tokenizer="x",
        renderer="default",
        template_kwargs={"enable_thinking": False},
        control_tokens="hf_compat",
        preserve_thinking_between_tool_calls=True,
        use_patched=True,
        supervision=Supervision.of(
            turns="last", parts=["content", "stop"], roles=["user"], past="expand", final_stop=True
        ),
        columns=Columns(messages="talk", tools="functions"),
        tools=tuple(SIMPLE),
        parse_arguments=True,
        max_length=100,
        overlong=Overlong.LEFT,
        row_bytes=1000,
        labels=True,
    )
    for settings_ in (everything, TokenizeSettings(tokenizer="x")):
        described = json.loads(json.dumps(settings_.described()))
        assert TokenizeSettings.read(described, "x") == settings_
    assert TokenizeSettings.read({"chat_template": "{{ 1 }}"}, "x").chat_template == "{{ 1 }}"
    for wrong in ({"colour": "red"}, {"columns": {"colour": "red"}}, {"max_length": -1}, {"parts": ["colour"]}):
        with pytest.raises(SampleError):
            TokenizeSettings.read(wrong, "x")


# -- datasets as others make them


TALKS = [
    Conversation([user("Hello there"), assistant("Hi! How can I help?")]),
    Conversation([system("Be brief."), user("2+2?"), assistant("4"), user("3+3?"), assistant("6")]),
    Conversation([user("Weather?"), assistant("", PARIS, ROME), SUNNY, RAINY, assistant("Sun and rain.")], SIMPLE),
    Conversation([user("Sum"), assistant("", call("add", {"a": 1, "b": 2})), assistant("3")], SIMPLE),
]


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_rows_of_apply_chat_template_check_clean(family: str, tmp_path: Path) -> None:
    tokenizer = hf_tokenizer(family)
    rows = []
    for talk in TALKS:
        made = tokenizer.apply_chat_template(talk.messages, tools=talk.tools, tokenize=True, return_dict=True)
        assert set(made) >= {"input_ids", "attention_mask"}
        row = {
            "messages": talk.messages,
            "input_ids": list(made["input_ids"]),
            "attention_mask": list(made["attention_mask"]),
        }
        rows.append({**row, "tools": talk.tools} if talk.tools else row)
    report = check_dataset([write_lines(tmp_path / "rows.jsonl", rows)], make_settings(family))
    assert report.clean, report.to_json()
    assert (report.masks, report.compared) == (0, len(TALKS))


def test_rows_of_trls_training_template_show_the_newline_that_it_trains_and_the_reasoning_that_it_keeps(
    tmp_path: Path,
) -> None:
    """It tags the newline after the stop token, and writes an empty block of reasoning into past turns too."""
    template = templates_of_trl()["qwen3_training"]
    rows = []
    for talk in TALKS[:2]:
        made = hf_generation_mask(hf_tokenizer("qwen3"), template, talk.messages)
        assert isinstance(made, GenerationMask)
        rows.append({"messages": talk.messages, "input_ids": made.ids, "assistant_masks": made.mask})
    report = check_dataset([write_lines(tmp_path / "rows.jsonl", rows)], make_settings("qwen3"))
    assert dict(report.outcomes) == {Outcome.MASK: 1, Outcome.BOTH: 1}
    assert dict(report.causes) == {Cause.REASONING_KEPT: 1}
    assert set(report.mask) == {("assistant", "scaffold", True), ("template", "added tokens", True)}
    assert report.mask["assistant", "scaffold", True].tokens == 3


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_of_transformers_checks_clean(side: str, tmp_path: Path) -> None:
    tokenizer = copy.deepcopy(hf_tokenizer("qwen2.5"))
    tokenizer.padding_side = side
    made = tokenizer.apply_chat_template(
        [talk.messages for talk in TALKS[:2]], tokenize=True, return_dict=True, padding=True
    )
    for columns in (("input_ids", "attention_mask"), ("input_ids",)):
        rows = [
            {"messages": talk.messages, **{name: list(made[name][at]) for name in columns}}
            for at, talk in enumerate(TALKS[:2])
        ]
        report = check_dataset([write_lines(tmp_path / "rows.jsonl", rows)], make_settings("qwen2.5"))
        assert report.clean
        assert report.padding > 0


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_messages_that_were_encoded_one_by_one_are_caught(family: str, tmp_path: Path) -> None:
    """The script that everybody writes once: each message encoded on its own, and all put together."""
    tokenizer = hf_tokenizer(family)
    rows = []
    for talk in TALKS[:2]:
        ids: list[int] = []
        mask: list[int] = []
        for message in talk.messages:
            head = tokenizer.encode(f"<|im_start|>{message['role']}\n", add_special_tokens=False)
            body = [index for word in message["content"].split(" ") for index in tokenizer.encode(word + " ")]
            body += tokenizer.encode("<|im_end|>", add_special_tokens=False)
            ids += [*head, *body]
            mask += [*[0] * len(head), *[int(message["role"] == "assistant")] * len(body)]
        rows.append({"messages": talk.messages, "input_ids": ids, "assistant_masks": mask})
    report = check_dataset([write_lines(tmp_path / "rows.jsonl", rows)], make_settings(family))
    assert report.outcomes[Outcome.SAME] == 0
    assert report.causes[Cause.BPE_REMERGE] + report.causes[Cause.WHITESPACE] > 0
    assert report.differing == len(rows)
