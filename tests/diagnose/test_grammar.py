"""What is shown of different grammars, as lines and as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from tests.support import make_renderer, per_family
from tokentrace.diagnose.grammar_sheet import Sheet, make_sheet
from tokentrace.diagnose.grammar_view import json_view, plain_view
from tokentrace.formats.dialects import DIALECTS
from tokentrace.formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value

FAMILIES = ["qwen3-coder", "glm-4.5", "kimi-k2.5", "deepseek-v3", "gpt-oss", "minimax-m3", "mistral-nemo"]


@per_family
def sheet_of(family: str) -> Sheet:
    return make_sheet(make_renderer(family))


def shown(family: str, width: int = 100) -> list[str]:
    """The lines that are printed for a family, white space squeezed."""
    return [" ".join(line.split()) for line in plain_view(sheet_of(family), width=width).splitlines()]


def read_back(found: dict[str, Any]) -> TurnGrammar:
    """The grammar that was written as JSON."""
    calls, channels = found.get("calls"), found.get("channels")
    if calls is not None:
        calls["style"], calls["strings"], calls["others"] = (
            Style(calls["style"]),
            Value(calls["strings"]),
            Value(calls["others"]),
        )
        calls["head"] = tuple((lead, field) for lead, field in calls.get("head", ()))
        calls["keys"] = tuple((field, tuple(path)) for field, path in calls.get("keys", ()))
    return TurnGrammar(
        found.get("head", ""),
        found.get("prompt", ""),
        Frame(**found["reasoning"]) if "reasoning" in found else None,
        found.get("after_empty", ""),
        Frame(**found.get("content", {})),
        CallGrammar(**calls) if calls is not None else None,
        Channels(**channels) if channels is not None else None,
        tuple(found.get("notes", ())),
    )


# -- what is said


@pytest.mark.parametrize("family", FAMILIES)
def test_json_round_trips_and_leaves_nothing_out_but_what_is_empty(family: str) -> None:
    sheet = sheet_of(family)
    found = json.loads(json.dumps(json_view(sheet)))
    assert all(found["grammar"].values())
    assert read_back(found["grammar"]) == sheet.grammar
    assert found["stop_token_ids"] == make_renderer(family).get_stop_token_ids()
    control = sheet.tokenizer.vocabulary.control
    for row in found["delimiters"]:
        assert row["text"].strip()
        assert row["control"] is all(part in control for part, _ in sheet.split(row["text"]) if part.strip())
        assert row["ids"] == [control[part].id for part, _ in sheet.split(row["text"]) if part in control]
        assert row["forgeable"] is (not row["ids"])


def test_control_tokens_are_told_from_text() -> None:
    rows = {row["field"]: row for row in json_view(sheet_of("qwen3-coder"))["delimiters"]}
    assert rows["calls.open"] | {"role": ""} == {
        "field": "calls.open", "role": "", "text": "<tool_call>\n", "control": True, "forgeable": False, "ids": [151657]
    }  # fmt: skip
    assert rows["calls.head[0]"]["text"] == "<function="
    assert (rows["calls.head[0]"]["control"], rows["calls.head[0]"]["forgeable"]) == (False, True)
    lines = shown("qwen3-coder")
    assert "<tool_call> opens a call control token 151657" in lines
    assert "<function= before the name text" in lines
    assert any(line.startswith("No text can spell a control token") for line in lines)


def test_a_delimiter_may_be_a_control_token_and_text() -> None:
    mixed = {row["field"]: row for row in json_view(sheet_of("deepseek-v3"))["delimiters"]}["calls.head[0]"]
    assert (mixed["control"], mixed["forgeable"], mixed["ids"]) == (False, False, [128814])


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "qwen3-coder",
            [
                "before calls ⏎⏎",
                "each call <tool_call>⏎<function=⟨name⟩>⏎",
                "each argument <parameter=⟨key⟩>⏎⟨value⟩⏎</parameter>⏎",
                "call ends </function>⏎</tool_call>",
            ],
        ),
        (
            "glm-4.5",
            [
                "prompt <|assistant|>",
                "begins ⏎",
                "stop <|user|> 151336 or <|observation|> 151338 or <|endoftext|> 151329",
                "</arg_key>⏎<arg_value> before a value control tokens 151357, 151358",
            ],
        ),
        (
            "kimi-k2.5",
            [
                "prompt <|im_assistant|>assistant<|im_middle|><think>",
                "reasoning ⟨reasoning⟩</think>",
            ],
        ),
        (
            "gpt-oss",
            [
                "reasoning <|channel|>analysis<|message|>⟨reasoning⟩<|end|>",
                "content <|start|>assistant<|channel|>final<|message|>⟨content⟩",
                "functions. before the name text",
                "stop <|return|> 200002 or <|call|> 200012",
            ],
        ),
        (
            "minimax-m3",
            [
                "each argument ]<]minimax[>[<⟨key⟩>⟨value⟩]<]minimax[>[</⟨key⟩>",
                ']<]minimax[>[<invoke name=" opens a call control token 200058 and text',
            ],
        ),
        (
            "mistral-nemo",
            [
                'each call {"name": "⟨name⟩", "arguments": ⟨arguments⟩, "id": "⟨id⟩"}',
                "between calls ,␣",
                "[TOOL_CALLS][ opens the calls control token 9 and text",
            ],
        ),
    ],
)
def test_different_grammars_are_shown_part_by_part(family: str, expected: list[str]) -> None:
    lines = shown(family)
    assert [line for line in expected if line not in lines] == []


@pytest.mark.parametrize(("family", "note"), [("deepseek-v3", "disagrees"), ("gemma-3", "shows no tool calls")])
def test_notes_come_first_and_say_what_to_do(family: str, note: str) -> None:
    sheet = sheet_of(family)
    top = plain_view(sheet, width=400).split("\n\n")[0].splitlines()[1:]
    assert [line.removeprefix("note  ") for line in top if line.startswith("note")] == list(sheet.grammar.notes)
    assert any(note in line for line in top)
    assert "--tool-parser" in top[-1]
    assert all(name in top[-1] for name in DIALECTS) is (family == "gemma-3")


def test_tags_that_say_what_is_a_string() -> None:
    sheet = sheet_of("qwen3-coder")
    grammar = sheet.grammar.replace(calls=DIALECTS["dsml"].calls, reasoning=Frame("", "", "\n", "</think>"))
    said = plain_view(dataclasses.replace(sheet, grammar=grammar), width=120)
    assert 'each string    <｜DSML｜parameter name="⟨key⟩" string="true">⟨value⟩</｜DSML｜parameter>⏎' in said


@pytest.mark.parametrize("name", list(DIALECTS))
@pytest.mark.parametrize("width", [10, 80, 160])
def test_every_dialect_can_be_shown_at_any_width(name: str, width: int) -> None:
    sheet, dialect = sheet_of("qwen3-coder"), DIALECTS[name]
    grammar = sheet.grammar.replace(calls=dialect.calls, channels=dialect.channels)
    found = dataclasses.replace(sheet, grammar=grammar, example=None)
    said = plain_view(found, width=width)
    assert f"dialect: {name}" in said
    assert "\n\n\n" not in said
    if width == 160:
        assert max(map(len, said.splitlines())) <= 160
    json.dumps(json_view(found))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("qwen3-coder", ("I look it up.", "Rome", "Oslo")),
        ("gpt-oss", ("Two places, two calls.", "Rome")),
        ("gemma-3", ("I look it up.",)),
        ("kimi-k2.5", ("functions.weather:0", "functions.weather:1")),
    ],
)
def test_examples_show_what_the_template_agrees_to_write(family: str, words: tuple[str, ...]) -> None:
    example = plain_view(sheet_of(family), width=400).partition("An example")[2]
    assert [word for word in words if word not in example] == []
