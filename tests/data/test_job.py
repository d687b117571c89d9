"""The job: one file of samples, whoever makes it and however often it is interrupted."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.data.generate import conversations
from tests.data.job import SETTINGS, write_lines
from tokentrace import build_supervised_sample, create_renderer
from tokentrace.data.job import tokenize_files
from tokentrace.data.tables import read_samples
from tokentrace.data.tokenizing import TokenizeSettings, tokenize_rows
from tokentrace.pocket import POCKET

# -- what the rows are


def test_rows_are_those_of_build_supervised_sample_in_the_order_of_the_input(tmp_path: Path) -> None:
    rows = list(conversations(60, seed=1))
    path = write_lines(tmp_path / "chats.jsonl", rows)
    done = tokenize_files([str(path)], tmp_path / "out.parquet", SETTINGS, workers=1)
    renderer = create_renderer(POCKET)
    made = [build_supervised_sample(renderer, row["messages"]) for row in rows]
    read = list(read_samples(done.output))
    assert len(read) == len(made)
    for one, two in zip(read, made, strict=True):
        for name in ("ids", "mask", "messages", "kinds", "parts"):
            np.testing.assert_array_equal(getattr(one, name), getattr(two, name))
    table = pq.read_table(done.output)
    assert table.column("row").to_pylist() == list(range(1, 61))
    assert set(table.column("source").to_pylist()) == {str(path)}
    assert table.column("num_messages").to_pylist() == [len(row["messages"]) for row in rows]
    assert table.schema.field("input_ids").type == pa.list_(pa.int32())


def test_rows_bring_their_own_tools_and_template_variables(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "description": "Find.", "parameters": {}}}
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    template = "{{ greeting }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    template += "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    settings = TokenizeSettings(str(POCKET), chat_template=template, template_kwargs={"greeting": "A"})
    rows = [{"messages": messages}, {"messages": messages, "chat_template_kwargs": {"greeting": "B"}}]
    one, two = tokenize_rows(settings, rows)
    decode = create_renderer(POCKET).tokenizer.decode
    assert decode(one.samples[0].ids).startswith("A<|turn|>")
    assert decode(two.samples[0].ids).startswith("B<|turn|>")
    (with_tools,) = tokenize_rows(SETTINGS, [{"messages": messages, "tools": [tool]}])
    (shared,) = tokenize_rows(TokenizeSettings(str(POCKET), tools=(tool,)), [{"messages": messages}])
    assert "look_up" in decode(with_tools.samples[0].ids)
    np.testing.assert_array_equal(with_tools.samples[0].ids, shared.samples[0].ids)


# -- malformed rows of every kind


GOOD = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}
MALFORMED: dict[str, tuple[Any, str, str]] = {
    "bad JSON": ('{"messages": [', "unreadable", "not valid JSON"),
    "no object": ("17", "InputError", "a row must be a mapping"),
    "null": ("null", "InputError", "a row must be a mapping"),
    "empty object": ({}, "InputError", "the row has no conversation"),
    "empty conversation": ({"messages": []}, "InputError", "messages: holds no message"),
    "unknown role": ({"messages": [{"role": "wizard", "content": "x"}]}, "InputError", "message 0, role: 'wizard'"),
    "no role": ({"messages": [{"content": "x"}]}, "InputError", "message 0, role: is missing"),
    "no content": ({"messages": [{"role": "user"}]}, "InputError", "message 0, content: is missing"),
    "content of the wrong type": ({"messages": [{"role": "user", "content": 5}]}, "InputError", "message 0, content"),
    "messages of the wrong type": ({"messages": "hello"}, "InputError", "messages"),
    "no assistant turn": ({"messages": GOOD["messages"][:1]}, "SampleError", "there is no assistant turn"),
    "surrogates": ('{"messages": [{"role": "user", "content": "\\ud800"}, {"role": "assistant", "content": "x"}]}',
                   "InputError", "half of a surrogate pair"),
    "bad tools": ({**GOOD, "tools": [{"type": "function"}]}, "InputError", "tools.0"),
    "tools that are no JSON": ({**GOOD, "tools": "{"}, "InputError", "tools"),
    "unknown speaker": ({"conversations": [{"from": "wizard", "value": "x"}]}, "InputError", "message 0, from"),
    "bad call": ({"messages": [GOOD["messages"][0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
                 "InputError", "message 1, tool_calls.0.function.name"),
    "template refusal": ({"messages": [{"role": "user", "content": "REFUSE"}, {"role": "assistant", "content": "x"}]},
                         "TemplateError", "no thanks"),
    "too deep": ("[" * 20_000 + "]" * 20_000, "unreadable", "cannot be read"),
    "10 MB": ({"messages": [{"role": "user", "content": "x" * 10_000_000}]}, "unreadable", "over the limit"),
}  # fmt: skip


def test_malformed_rows_of_every_kind_are_reported_and_lose_nothing_else(tmp_path: Path) -> None:
    shipped = (POCKET / "chat_template.jinja").read_text(encoding="utf-8")
    refusing = (
        "{% for m in messages %}{% if m.content == 'REFUSE' %}{{ raise_exception('no thanks') }}{% endif %}{% endfor %}"
    )
    settings = TokenizeSettings(str(POCKET), chat_template=refusing + shipped)
    rows: list[Any] = []
    for row, _, _ in MALFORMED.values():
        rows += [GOOD, row]
    rows.append(GOOD)
    done = tokenize_files([str(write_lines(tmp_path / "x.jsonl", rows))], tmp_path / "o.parquet", settings, workers=2)
    assert done.counts.samples == len(MALFORMED) + 1
    assert pq.read_table(done.output).column("row").to_pylist() == list(range(1, 2 * len(MALFORMED) + 2, 2))
    assert done.bad_rows is not None
    told = [json.loads(line) for line in done.bad_rows.read_text(encoding="utf-8").splitlines()]
    for (name, (_, kind, reason)), line, one in zip(MALFORMED.items(), range(2, 1000, 2), told, strict=False):
        assert one["kind"] == kind, (name, one)
        assert reason in one["reason"], (name, one)
        assert one["line"] == one["row"] == line, (name, one)
        assert one["source"] == str(tmp_path / "x.jsonl")
    assert len(told) == len(MALFORMED)
    assert done.counts.bad == Counter(kind for _, kind, _ in MALFORMED.values())
    assert next(one for one in told if one["kind"] == "InputError" and "wizard" in one["reason"])["message"] == 0


PLAIN_TEMPLATE = (
    "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
UNSEEN = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4", "reasoning_content": "Hm."}]


def test_a_row_of_which_text_reaches_no_token_is_bad_with_message_and_field(tmp_path: Path) -> None:
    seen = [UNSEEN[0], {"role": "assistant", "content": "4"}]
    path = write_lines(tmp_path / "x.jsonl", [{"messages": seen}, {"messages": UNSEEN}])
    settings = TokenizeSettings(str(POCKET), renderer="default", chat_template=PLAIN_TEMPLATE)
    done = tokenize_files([str(path)], tmp_path / "o.parquet", settings, workers=1)
    assert (done.counts.samples, done.counts.bad) == (1, {"LostTextError": 1})
    assert done.bad_rows is not None
    (bad,) = [json.loads(line) for line in done.bad_rows.read_text().splitlines()]
    assert (bad["row"], bad["kind"], bad["message"], bad["field"]) == (2, "LostTextError", 1, "reasoning_content")
    for lost, noted in (("warn", True), ("ignore", False)):
        kept = TokenizeSettings(str(POCKET), renderer="default", chat_template=PLAIN_TEMPLATE, lost=lost)
        (made,) = tokenize_rows(kept, [{"messages": UNSEEN}])
        assert made.bad is None
        told = [note for note in made.samples[0].notes if note.startswith("message 1, reasoning_content: ")]
        assert bool(told) == noted
