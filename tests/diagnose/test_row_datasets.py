"""Checked datasets: our own files, and those that others make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conversations import PARIS, RAINY, ROME, SIMPLE, SUNNY, Conversation, assistant, call, system, user
from tests.data.generate import conversations, write_conversations
from tests.diagnose.checked import IDS, MASK, _bos, alone, make_settings, row_of, sample_of
from tests.oracle import GenerationMask, hf_generation_mask, hf_tokenizer
from tests.support import templates_of_trl
from tokentrace import InputError
from tokentrace.data.job import tokenize_files
from tokentrace.diagnose.finding import Cause
from tokentrace.diagnose.report import EXAMPLES
from tokentrace.diagnose.row_files import CheckReport, check_dataset
from tokentrace.diagnose.rows import Outcome
from tokentrace.pocket import POCKET

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
# -- datasets


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def outcomes(report: CheckReport) -> dict[Outcome, int]:
    return {outcome: tally.units for outcome, tally in report.outcomes.items()}


def test_a_report_counts_outcomes_causes_masks_and_keeps_a_few_examples(tmp_path: Path) -> None:
    untrained = MASK.copy()
    untrained[np.flatnonzero(MASK)[-1]] = False
    rows = (
        [row_of(IDS, MASK)] * 8 + [row_of([_bos(), *IDS], [0, *MASK])] * 7 + [row_of(IDS, untrained)] * 2 + [{"a": 1}]
    )
    path = write_lines(tmp_path / "rows.jsonl", rows)
    told: list[tuple[int, int]] = []
    report = check_dataset([path], make_settings(), progress=lambda done, total: told.append((done, total)))
    assert outcomes(report) == {Outcome.SAME: 8, Outcome.IDS: 7, Outcome.MASK: 2, Outcome.BAD: 1}
    assert [(cause, tally.units) for cause, tally in report.causes.items()] == [(Cause.BOS_DOUBLED, 7)]
    [(key, tally)] = report.mask.items()
    assert (key, tally.tokens, tally.units) == (("assistant", "stop", Cause.MASK_MISSING), 2, 2)
    assert {outcome: len(tally.examples) for outcome, tally in report.outcomes.items()} == {
        Outcome.SAME: 0,
        Outcome.IDS: EXAMPLES,
        Outcome.MASK: 2,
        Outcome.BAD: 1,
    }
    assert report.outcomes[Outcome.BAD].examples[0].where.endswith("row 18")
    assert report.counts["tokens"] == report.counts["expected_tokens"] + 7
    assert report.counts["trained"] == report.counts["expected_trained"] - 2
    assert told[-1][0] == told[-1][1] == Path(path).stat().st_size
    assert report.verdict == "10 of 18 rows are not what the template gives"
    json.dumps(report.to_json())
    limited = check_dataset([path], make_settings(), limit=8)
    assert (limited.rows, limited.clean, limited.stopped) == (8, True, True)


def test_rows_are_read_from_parquet_and_from_json(tmp_path: Path) -> None:
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
    assert outcomes(report) == {Outcome.SAME: 5, Outcome.UNCHECKED: 2}
    assert any("no row 601" in reason for reason in report.reasons)
    assert any("'others.jsonl' was not found" in reason for reason in report.reasons)
    (tmp_path / "b").mkdir()
    twin = write_lines(tmp_path / "b" / "chats.jsonl", chats)
    both = check_dataset([path], make_settings(), sources=[source, twin])
    assert any("several sources" in reason for reason in both.reasons)


def test_a_file_made_with_another_template_or_other_settings_says_so(tmp_path: Path) -> None:
    write_conversations(tmp_path / "chats.jsonl", 3, seed=4)
    template = (POCKET / "chat_template.jinja").read_text(encoding="utf-8") + "{#- as good as the same -#}"
    made_with = make_settings(chat_template=template)
    tokenize_files([str(tmp_path / "chats.jsonl")], tmp_path / "rows.parquet", made_with, workers=1)
    given: dict[str, Any] = {"tokenizer": str(POCKET), "sources": [str(tmp_path / "chats.jsonl")]}
    report = check_dataset([str(tmp_path / "rows.parquet")], **given)
    assert report.clean
    assert [finding for finding in report.notes if "another template" in finding]
    same = check_dataset([str(tmp_path / "rows.parquet")], changes={"chat_template": template}, **given)
    assert not same.notes
    with (tmp_path / "chats.jsonl").open("a") as file:
        file.write("\n")
    assert any("has changed since" in found for found in check_dataset([str(tmp_path / "rows.parquet")], **given).notes)
    with pytest.raises(InputError, match="tokenizer="):
        check_dataset([str(tmp_path / "rows.parquet")])


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
    assert (report.counts["masks"], report.counts["compared"]) == (0, len(TALKS))


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
    assert outcomes(report) == {Outcome.MASK: 1, Outcome.BOTH: 1}
    assert [(cause, tally.units) for cause, tally in report.causes.items()] == [(Cause.REASONING_ADDED, 1)]
    assert set(report.mask) == {
        ("assistant", "scaffold", Cause.MASK_ADDED),
        ("template", "added tokens", Cause.MASK_ADDED),
    }
    assert report.mask["assistant", "scaffold", Cause.MASK_ADDED].tokens == 3


def test_messages_that_were_encoded_one_by_one_are_caught(tmp_path: Path) -> None:
    """The script that everybody writes once: each message encoded on its own, and all put together."""
    tokenizer = hf_tokenizer("qwen2.5")
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
    report = check_dataset([write_lines(tmp_path / "rows.jsonl", rows)], make_settings("qwen2.5"))
    assert not {Cause.BPE_REMERGE, Cause.WHITESPACE}.isdisjoint(report.causes)
    assert report.differing == len(rows)
