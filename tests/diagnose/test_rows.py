"""Checked rows and datasets: correct rows check clean, and each difference has a place and a cause."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conversations import CONVERSATIONS, PARIS, SIMPLE, SUNNY, assistant, system, user
from tests.data.generate import conversations, write_conversations, write_lines
from tests.oracle import GenerationMask, hf_generation_mask, hf_tokenizer
from tests.support import PYTHON_FORMATS, examples, load_family, per_family, templates_of_trl
from tokentrace import InputError
from tokentrace.data.job import tokenize_files
from tokentrace.data.sources import Row
from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.report import EXAMPLES
from tokentrace.diagnose.row_files import CheckReport, check_dataset
from tokentrace.diagnose.rows import CheckedRow, Outcome, RowChecker
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Overlong, Sample
from tokentrace.samples.supervised import SampleSettings, build_supervised_sample

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
MESSAGES = [
    user("Is <|end|> a token, and what is 1+1?"),
    assistant("Two, I say.", reasoning="Let me think it over."),
    user("And the weather in Paris?"),
    assistant("Let me look.", PARIS, reasoning="A tool knows."),
    SUNNY,
    assistant("It is sunny in Paris."),
]
CONVERSATION: dict[str, Any] = {"messages": MESSAGES, "tools": SIMPLE}


def make_settings(family: str = "pocket", **options: Any) -> TokenizeSettings:
    """Settings that pass messages to the template unchanged, and ignore what it loses."""
    values = {"messages": "as_given", "lost": "ignore", **options}
    return TokenizeSettings(tokenizer=str(POCKET) if family == "pocket" else load_family(family), **values)


@per_family
def checker(family: str = "pocket", **options: Any) -> RowChecker:
    return RowChecker(make_settings(family, **options))


def samples_of(conversation: dict[str, Any], family: str = "pocket", **options: Any) -> tuple[Sample, ...]:
    tokenized = checker(family, **options).tokenizer.tokenize(Row(1, None, conversation))
    assert tokenized.bad is None, tokenized.bad
    return tokenized.samples


def sample_of(conversation: dict[str, Any] = CONVERSATION, family: str = "pocket", **options: Any) -> Sample:
    return samples_of(conversation, family, **options)[0]


def row_of(ids: Any, mask: Any = None, conversation: dict[str, Any] = CONVERSATION, **columns: Any) -> dict[str, Any]:
    mask_column = {} if mask is None else {"loss_mask": [int(value) for value in mask]}
    return {**conversation, "input_ids": [int(index) for index in ids], **mask_column, **columns}


def checked(row: dict[str, Any], family: str = "pocket", **options: Any) -> CheckedRow:
    return checker(family, **options).check(Row(1, None, json.loads(json.dumps(row))))


def place(result: CheckedRow) -> int | None:
    """The first token that differs."""
    return min((one.position for one in result.findings if one.position is not None), default=None)


def edited(change: Callable[[dict[str, Any]], Any]) -> Any:
    """The ids of the conversation after an edit."""
    conversation = copy.deepcopy(CONVERSATION)
    change(conversation)
    return sample_of(conversation).ids


IDS, MASK = sample_of().ids, sample_of().mask
RENDERER = checker("pocket").renderer
# -- rows that check clean


def test_tokenized_rows_of_every_family_check_clean(any_family: str) -> None:
    checks = RowChecker(make_settings(any_family, chat_template=PYTHON_FORMATS.get(any_family)))
    seen = 0
    for name in ("user_assistant", "system_user_assistant", "multi_turn", "long_code", "call_answered"):
        conversation = {"messages": CONVERSATIONS[name].messages, "tools": CONVERSATIONS[name].tools}
        tokenized = checks.tokenizer.tokenize(Row(1, None, conversation))
        if tokenized.bad is not None:
            continue
        seen += 1
        [sample] = tokenized.samples
        result = checks.check(Row(1, None, row_of(sample.ids, sample.mask, conversation)))
        assert result.outcome is Outcome.SAME, (name, result)
    assert seen >= 3


@pytest.mark.parametrize("past", ["template", "expand"])
@pytest.mark.parametrize("family", ["qwen2.5", "qwen3", "llama-3.1", "glm-4.5"])
def test_tokenized_rows_check_clean_with_every_setting_of_past(family: str, past: str) -> None:
    chosen = SampleSettings(past=past)
    for conversation in conversations(4, seed=5, most=12):
        for sample in samples_of(conversation, family, samples=chosen):
            result = checked(row_of(sample.ids, sample.mask, conversation), family, samples=chosen)
            assert result.outcome is Outcome.SAME, result
            assert result.counts["tokens"] == result.counts["expected_tokens"] == len(sample)


@pytest.mark.parametrize("overlong", ["right", "left", "turns"])
@pytest.mark.parametrize("past", [None, "expand"])
def test_a_tokenized_file_checks_clean_with_its_source_alone(tmp_path: Path, overlong: str, past: str | None) -> None:
    write_conversations(tmp_path / "chats.jsonl", 15, seed=2)
    settings = make_settings(samples=SampleSettings(past=past), max_length=700, overlong=Overlong(overlong))
    tokenize_files([str(tmp_path / "chats.jsonl")], tmp_path / "rows.parquet", settings, workers=1)
    report = check_dataset(
        [str(tmp_path / "rows.parquet")], tokenizer=str(POCKET), sources=[str(tmp_path / "chats.jsonl")]
    )
    assert report.clean, report.to_json()
    assert not report.notes
    assert report.total == report.counts["masks"] == report.counts["compared"]
    for name in ("tokens", "trained"):
        assert report.counts[name] == report.counts[f"expected_{name}"]
    assert report.settings["settings"]["max_length"] == 700


@pytest.mark.parametrize("left", [0, 3])
@pytest.mark.parametrize("right", [0, 5])
@pytest.mark.parametrize("attended", [True, False])
def test_padding_is_taken_off_on_both_sides(left: int, right: int, attended: bool) -> None:
    pad = RENDERER.tokenizer.token_id("<|pad|>")
    ids = [pad] * left + IDS.tolist() + [pad] * right
    mask = [0] * left + MASK.tolist() + [0] * right
    columns = {"attention_mask": [0] * left + [1] * len(IDS) + [0] * right} if attended else {}
    result = checked(row_of(ids, mask, **columns))
    assert (result.outcome, result.counts["padding"]) == (Outcome.SAME, left + right)
    flipped = list(mask)
    flipped[left + 40] ^= True
    assert place(checked(row_of(ids, flipped, **columns))) == left + 40


def test_samples_of_an_expanded_conversation_are_matched_by_number_or_similarity() -> None:
    chosen = SampleSettings(past="expand")
    conversation = {"messages": [user("1?"), assistant("a", reasoning="x"), user("2?"), assistant("b", reasoning="y")]}
    first, second = samples_of(conversation, "qwen3", samples=chosen)

    def check(one: Sample, **more: Any) -> CheckedRow:
        return checked(row_of(one.ids, one.mask, conversation, **more), "qwen3", samples=chosen)

    location: dict[str, Any] = {"source": "x", "row": 1}
    for number, sample in enumerate((first, second)):
        assert check(sample).outcome is check(sample, **location, sample=number).outcome is Outcome.SAME
    assert check(first, **location, sample=1).outcome is not Outcome.SAME
    unknown = check(first, **location, sample=7)
    assert (unknown.outcome, "sample 7" in unknown.reason) == (Outcome.SAME, True)


# -- differences are found at their places


@settings(max_examples=examples(150), deadline=None)
@given(at=st.integers(0, len(IDS) - 1), wrong_id=st.integers(0, 4095), masked=st.booleans())
def test_one_wrong_id_is_always_found_at_its_place(at: int, wrong_id: int, masked: bool) -> None:
    if wrong_id == IDS[at]:
        wrong_id = (wrong_id + 1) % 4096
    ids = IDS.copy()
    ids[at] = wrong_id
    result = checked(row_of(ids, MASK if masked else None))
    assert result.outcome not in (Outcome.SAME, Outcome.UNCHECKED)
    assert place(result) is not None
    assert result.causes


@settings(max_examples=examples(150), deadline=None)
@given(at=st.integers(0, len(IDS) - 1), labelled=st.booleans())
def test_one_flipped_bit_of_the_mask_is_always_found_at_its_place(at: int, labelled: bool) -> None:
    mask = MASK.copy()
    mask[at] ^= True
    row = row_of(IDS, labels=np.where(mask, IDS, -100).tolist()) if labelled else row_of(IDS, mask)
    result = checked(row)
    assert (result.outcome, place(result)) == (Outcome.MASK, at)
    [finding] = result.mask
    assert (finding.tokens, finding.cause is Cause.MASK_ADDED) == (1, bool(mask[at]))


# -- rows without a conversation


def test_without_a_conversation_only_ids_beyond_the_vocabulary_are_bad() -> None:
    without_mask = checked(row_of(IDS))
    assert (without_mask.outcome, without_mask.counts["masks"]) == (Outcome.SAME, 0)
    assert checked(row_of(IDS, MASK, {})).outcome is Outcome.UNCHECKED
    result = checked(row_of([*IDS[:7], 4096, *IDS[8:]], MASK, {}))
    assert (result.outcome, "token 7 is 4096" in result.reason) == (Outcome.BAD, True)


# -- invalid rows


@pytest.mark.parametrize(
    ("row", "reason"),
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
        (row_of(IDS, attention_mask=[1, 0, *[1] * (len(IDS) - 2)]), "a gap"),
        (row_of(IDS, [2] * len(IDS)), "entry 0 is 2"),
        (row_of(IDS, labels=[*[-100] * (len(IDS) - 1), 5]), "is not the id there"),
        (row_of(IDS, labels=[*IDS[1:].tolist(), -100]), "the next token's id"),
        (row_of(IDS, MASK, labels=[-100] * len(IDS)), "contradicts the mask"),
        (row_of(IDS, conversation={"messages": [{"role": "nobody"}]}), "gives no row"),
        (row_of(IDS, conversation={"messages": [user("Hi")]}), "no assistant turn"),
    ],
)
def test_an_invalid_row_is_bad_and_has_a_reason(row: Any, reason: str) -> None:
    result = checker("pocket").check(Row(3, None, row))
    assert result.outcome is Outcome.BAD
    assert reason in result.reason


# -- causes


def arguments(text: str) -> Any:
    """The ids of the conversation with other arguments of the call."""
    return edited(lambda row: row["messages"][3]["tool_calls"][0]["function"].update(arguments=text))


def respelled(*pieces: str) -> list[int]:
    """The ids of the conversation, with a text encoded piece by piece."""
    encode = RENDERER.tokenizer.encode_plain
    whole = encode("".join(pieces)).tolist()
    at = next(at for at in range(len(IDS)) if IDS[at : at + len(whole)].tolist() == whole)
    reencoded = [index for piece in pieces for index in encode(piece).tolist()]
    return [*IDS[:at], *reencoded, *IDS[at + len(whole) :]]


PROMPT = RENDERER.render(MESSAGES, tools=SIMPLE, add_generation_prompt=True).ids
SPACED = arguments('{"city":"Paris","unit":"celsius"}')
TURN = int(np.flatnonzero(MASK)[0])
STOP = int(np.flatnonzero(MASK & (RENDERER.tokenizer.token_id("<|end|>") == IDS))[0])
THINK = int(np.flatnonzero(RENDERER.tokenizer.token_id("<think>") == IDS)[0])
CAUSES: dict[str, tuple[Any, Cause, str]] = {
    "BOS doubled": ([IDS[0], *IDS], Cause.BOS_DOUBLED, "found `<|bos|>`"),
    "BOS missing": (IDS[1:], Cause.BOS_MISSING, "expected `<|bos|>`"),
    "generation prompt": (PROMPT, Cause.GENERATION_PROMPT, "after the end: expected nothing"),
    "end missing": (IDS[:-1], Cause.END_MISSING, "message 5 (assistant), stop"),
    "end missing inside": (np.delete(IDS, STOP), Cause.END_MISSING, "message 1 (assistant), stop"),
    "end doubled": ([*IDS, IDS[-1]], Cause.END_ADDED, "after the end"),
    "newline added": ([*IDS, *RENDERER.tokenizer.encode("\n")], Cause.LAST_WHITESPACE, "after the end"),
    "cut in a turn": (IDS[:-5], Cause.CUT, f"(5 of {len(IDS)} tokens), found nothing"),
    "cut before a turn": (IDS[: TURN - 1], Cause.CUT, "message 1 (assistant), generation prompt: expected"),
    "cut at the beginning": (IDS[200:], Cause.CUT, f"(200 of {len(IDS)} tokens), found nothing"),
    "tools": (edited(lambda row: row.pop("tools")), Cause.TOOLS_MISSING, ""),
    "other tools": (edited(lambda row: row["tools"].pop()), Cause.CHANGED_TOOLS, ""),
    "space of reasoning": (np.delete(IDS, THINK + 1), Cause.WHITESPACE, "message 1 (assistant), reasoning"),
    "reasoning": (edited(lambda row: row["messages"][1].pop("reasoning_content")), Cause.STRIPPED_REASONING,
                  "message 1 (assistant)"),
    "system": (edited(lambda row: row["messages"].insert(0, system("You are a pirate."))), Cause.CHANGED_SYSTEM, ""),
    "control": (sample_of(control_tokens="hf_compat").ids, Cause.TEXT_AS_CONTROL, "message 0 (user), content"),
    "letters": (respelled(*"It is sunny in Paris."), Cause.BPE_REMERGE, "message 5 (assistant), content"),
    "pieces": (respelled("It is su", "nny in Pa", "ris."), Cause.BPE_REMERGE, "message 5 (assistant), content"),
    "JSON": (SPACED, Cause.JSON_FORMAT, "message 3 (assistant)"),
    "white space": (edited(lambda row: row["messages"][2].update(content=" And the weather in Paris?")),
                    Cause.WHITESPACE, "message 2 (user), content"),
    "call": (arguments('{"city": "Rome", "unit": "celsius"}'), Cause.REWRITTEN_CALL, "message 3 (assistant)"),
    "no token": ([*IDS[:9], 99_999, *IDS[10:]], Cause.NO_TOKEN, "found id 99999"),
    "stray": (np.insert(IDS, 9, RENDERER.tokenizer.token_id("<think>")), Cause.CONTROL_TOKEN, "found `<think>`"),
    "more": ([*IDS, *RENDERER.tokenizer.encode("more text")], Cause.AFTER_END, "after the end"),
    "text": (edited(lambda row: row["messages"][2].update(content="And the weather in Rome?")), Cause.OTHER_TEXT,
             "message 2 (user), content: expected ` Paris`, found ` Rome`"),
}  # fmt: skip


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_named_with_its_place(name: str) -> None:
    ids, cause, words = CAUSES[name]
    result = checked(row_of(ids))
    assert (result.outcome, result.causes) == (Outcome.CUT if cause is Cause.CUT else Outcome.IDS, [cause]), result
    assert words in str(result.findings[0])


def test_several_causes_in_one_row_are_all_named_and_a_cut_may_have_another_mask() -> None:
    result = checked(row_of([IDS[0], *SPACED, IDS[-1]]))
    assert result.causes == [Cause.BOS_DOUBLED, Cause.JSON_FORMAT, Cause.END_ADDED]
    result = checked(row_of(IDS[:-5], ~MASK[:-5]))
    assert (result.outcome, result.causes) == (Outcome.BOTH, [Cause.CUT])


GREETING = {"messages": [user("Hi"), assistant("Hello, how are you today?")]}
THOUGHT = {"messages": [user("1?"), assistant("a", reasoning="first"), user("2?"), assistant("b", reasoning="then")]}


def test_the_default_system_prompt_of_a_template_is_missing() -> None:
    whole = sample_of(GREETING, "qwen2.5")
    first = int(np.flatnonzero(whole.messages == 0)[0])
    for ids, more in ((whole.ids[first:], []), ([*whole.ids[first:], whole.ids[-2]], [Cause.END_ADDED])):
        assert checked(row_of(ids, None, GREETING), "qwen2.5").causes == [Cause.SYSTEM_MISSING, *more]


def test_text_that_the_template_does_not_write_is_added() -> None:
    bare, plain = sample_of(GREETING, "qwen3"), sample_of(THOUGHT, "qwen3")
    prompt = load_family("qwen3").encode("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")
    added = checked(row_of([*prompt, *bare.ids], [*[0] * len(prompt), *bare.mask], GREETING), "qwen3")
    assert (added.outcome, added.causes) == (Outcome.IDS, [Cause.SYSTEM_ADDED])
    preserve = {"samples": SampleSettings(past="preserve")}
    preserved = sample_of(THOUGHT, "qwen3", **preserve)
    assert checked(row_of(preserved.ids, None, THOUGHT), "qwen3").causes == [Cause.REASONING_ADDED]
    assert checked(row_of(plain.ids, None, THOUGHT), "qwen3", **preserve).causes == [Cause.STRIPPED_REASONING]


def test_a_tag_in_the_place_of_another_token_is_not_reasoning() -> None:
    """Both sides hold the same text after it."""
    conversation = {"messages": [user("What is 2 + 2?"), assistant("It is 4.")]}
    ids = sample_of(conversation).ids.copy()
    ids[1] = RENDERER.tokenizer.token_id("<think>")
    result = checked(row_of(ids, None, conversation))
    assert result.causes == [Cause.CONTROL_TOKEN]
    assert "expected `<|turn|>`, found `<think>`" in result.findings[0].words


# -- masks


@pytest.mark.parametrize(("shift", "mask"), [(1, [False, *MASK[:-1]]), (-1, [*MASK[1:], False])])
def test_a_mask_shifted_by_one_is_named(shift: int, mask: list[bool]) -> None:
    result = checked(row_of(IDS, mask))
    assert (result.outcome, result.causes) == (Outcome.MASK, [Cause.MASK_SHIFTED])
    assert ("right" if shift > 0 else "left") in result.findings[0].words


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
    sample = build_supervised_sample(RENDERER, MESSAGES, tools=SIMPLE, **supervision)
    result = checked(row_of(IDS, sample.mask))
    [finding] = result.mask
    assert (finding.where, finding.field, finding.cause is Cause.MASK_ADDED) == (role, part, trained)
    assert f"of {messages} {role} turn" in finding.words
    assert finding.tokens == int((sample.mask != MASK).sum())
    assert result.counts["trained"] == sample.trained


def test_trained_padding_and_added_tokens_are_mask_differences() -> None:
    pad = RENDERER.tokenizer.token_id("<|pad|>")
    padded = checked(row_of([*IDS, pad, pad], [*MASK, 1, 0], attention_mask=[1] * len(IDS) + [0, 0]))
    assert (padded.outcome, [finding.field for finding in padded.mask]) == (Outcome.MASK, ["padding"])
    assert place(padded) == len(IDS)
    added = checked(row_of([*IDS, IDS[-1]], [*MASK, 1]))
    assert (added.outcome, [finding.field for finding in added.mask]) == (Outcome.BOTH, ["added tokens"])


# -- datasets


def units(tallies: Any) -> dict[Any, int]:
    return {key: tally.units for key, tally in tallies.items()}


def test_a_report_counts_outcomes_causes_masks_and_keeps_a_few_examples(tmp_path: Path) -> None:
    untrained = MASK.copy()
    untrained[np.flatnonzero(MASK)[-1]] = False
    same, doubled, stop = row_of(IDS, MASK), row_of([IDS[0], *IDS], [0, *MASK]), row_of(IDS, untrained)
    alone = {name: same[name] for name in same if name != "messages"}  # not compared, so its tokens do not count
    path = str(write_lines(tmp_path / "rows.jsonl", [*[same] * 8, *[doubled] * 7, *[stop] * 2, {"a": 1}, alone]))
    progress: list[tuple[int, int]] = []
    report = check_dataset([path], make_settings(), progress=lambda done, total: progress.append((done, total)))
    expected = {Outcome.SAME: 8, Outcome.IDS: 7, Outcome.MASK: 2, Outcome.BAD: 1, Outcome.UNCHECKED: 1}
    assert units(report.outcomes) == expected
    assert units(report.causes) == {Cause.BOS_DOUBLED: 7}
    assert units(report.mask) == {("assistant", "stop", Cause.MASK_MISSING): 2}
    assert [len(tally.examples) for tally in report.outcomes.values()] == [0, EXAMPLES, 2, 1, 0]
    assert len(report.causes[Cause.BOS_DOUBLED].examples) == EXAMPLES
    assert report.outcomes[Outcome.BAD].examples[0].where.endswith("row 18")
    assert report.counts["tokens"] == report.counts["expected_tokens"] + 7
    assert report.counts["trained"] == report.counts["expected_trained"] - 2
    assert progress[-1] == (Path(path).stat().st_size,) * 2
    assert report.verdict == "10 of 19 rows do not match the template; 1 have no conversation"
    json.dumps(report.to_json())
    limited = check_dataset([path], make_settings(), limit=8)
    assert (limited.total, limited.clean, limited.stopped) == (8, True, True)


def test_rows_are_read_from_parquet_and_from_json_with_a_tokenizer(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pairs = [(one["messages"], sample_of(one)) for one in conversations(6, seed=1, most=6)]
    rows = [{"messages": chat, "input_ids": one.token_ids, "labels": one.labels.tolist()} for chat, one in pairs]
    texts = [{**row, "messages": json.dumps(row["messages"])} for row in rows]  # one shape for all arguments
    pq.write_table(pa.Table.from_pylist(texts), tmp_path / "rows.parquet")
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    for name in ("rows.parquet", "rows.json"):
        assert check_dataset([str(tmp_path / name)], make_settings()).clean
        with pytest.raises(InputError, match="tokenizer="):
            check_dataset([str(tmp_path / name)])


def test_sources_are_found_by_name_or_base_name_in_any_order(tmp_path: Path) -> None:
    chats = list(conversations(600, seed=3, most=4))
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    source, twin = (str(write_lines(tmp_path / name / "chats.jsonl", chats)) for name in ("a", "b"))
    rows = []
    for at in (599, 0, 300, 1, 598):
        sample = sample_of(chats[at])
        rows.append(row_of(sample.ids, sample.mask, {}, source="elsewhere/chats.jsonl", row=at + 1, sample=0))
    rows.append(row_of(IDS, MASK, {}, source="chats.jsonl", row=601, sample=0))
    rows.append(row_of(IDS, MASK, {}, source="others.jsonl", row=1, sample=0))
    path = str(write_lines(tmp_path / "rows.jsonl", rows))
    report = check_dataset([path], make_settings(), sources=[source])
    assert units(report.outcomes) == {Outcome.SAME: 5, Outcome.UNCHECKED: 2}
    both = check_dataset([path], make_settings(), sources=[source, twin])
    reasons = " ".join([*report.reasons, *both.reasons])
    for words in ("no row 601", "'others.jsonl' was not found", "several sources"):
        assert words in reasons


# -- datasets of other tools


NAMES = ("user_assistant", "multi_turn", "system_user_assistant", "calls_parallel_answered", "call_answered")
CHATS = [CONVERSATIONS[name] for name in NAMES]


def report_of(folder: Path, rows: list[Any], family: str) -> CheckReport:
    return check_dataset([str(write_lines(folder / "rows.jsonl", rows))], make_settings(family))


@pytest.mark.parametrize("family", ["qwen2.5", "qwen3"])
def test_rows_of_apply_chat_template_check_clean(family: str, tmp_path: Path) -> None:
    rows = []
    for chat in CHATS:
        encoded = hf_tokenizer(family).apply_chat_template(
            chat.messages, tools=chat.tools, tokenize=True, return_dict=True
        )
        row = {name: list(encoded[name]) for name in ("input_ids", "attention_mask")}
        rows.append({"messages": chat.messages, **row, **({"tools": chat.tools} if chat.tools else {})})
    report = report_of(tmp_path, rows, family)
    assert report.clean, report.to_json()
    assert (report.counts["masks"], report.counts["compared"]) == (0, len(CHATS))


def test_trls_training_template_trains_the_newline_and_adds_reasoning(tmp_path: Path) -> None:
    """It tags the newline after the stop token, and writes an empty block of reasoning into past turns too."""
    rows = []
    for chat in CHATS[:2]:
        encoded = hf_generation_mask(hf_tokenizer("qwen3"), templates_of_trl()["qwen3_training"], chat.messages)
        assert isinstance(encoded, GenerationMask)
        rows.append({"messages": chat.messages, "input_ids": encoded.ids, "assistant_masks": encoded.mask})
    report = report_of(tmp_path, rows, "qwen3")
    assert units(report.outcomes) == {Outcome.MASK: 1, Outcome.BOTH: 1}
    assert units(report.causes) == {Cause.REASONING_ADDED: 1}
    newline, added = (("assistant", "scaffold"), ("template", "added tokens"))
    assert set(report.mask) == {(*newline, Cause.MASK_ADDED), (*added, Cause.MASK_ADDED)}
    assert report.mask[*newline, Cause.MASK_ADDED].tokens == 3
