"""The grammar of a template's turns, as a document and as JSON."""

from __future__ import annotations

import dataclasses
import json

import pytest

from tests.diagnose.brute import over_bytes, source_of
from tests.support import make_renderer, per_family
from tokentrace.diagnose.grammar import GrammarReport
from tokentrace.formats.dialects import DIALECTS
from tokentrace.show.terminal import plain_view

REAL = {"qwen3-coder", "glm-4.5", "deepseek-v3", "mistral-nemo"}
"""Families whose ids are compared; of others the template is enough."""


@per_family
def report_of(family: str) -> GrammarReport:
    return GrammarReport.of(make_renderer(family) if family in REAL else over_bytes(source_of(family)))


def printed(family: str) -> list[str]:
    """The printed lines, white space squeezed."""
    return [" ".join(line.split()) for line in plain_view(report_of(family)).splitlines()]


@pytest.mark.parametrize("family", ["qwen3-coder", "glm-4.5", "deepseek-v3", "gpt-oss", "minimax-m3"])
def test_json_has_the_grammar_without_empty_fields(family: str) -> None:
    report = report_of(family)
    data = json.loads(json.dumps(report.to_json()))
    assert all(data["grammar"].values())
    assert data["grammar"]["prompt"] == report.grammar.prompt
    assert data["stop_tokens"] == [report.tokenizer.decode([index]) for index in data["stop_token_ids"]] != []
    control = report.tokenizer.vocabulary.control
    for row in data["delimiters"]:
        names = [report.tokenizer.decode([index]) for index in row["ids"]]
        assert all(name in control and name in row["text"] for name in names)
        assert not row["control"] or "".join(names) == "".join(row["text"].split())


@pytest.mark.parametrize(
    ("family", "field", "ids", "control"),
    [
        ("qwen3-coder", "calls.open", [151657], True),
        ("qwen3-coder", "calls.head[0]", [], False),
        ("deepseek-v3", "calls.head[0]", [128814], False),
    ],
)
def test_delimiters_are_control_tokens_or_text(family: str, field: str, ids: list[int], control: bool) -> None:
    (one,) = [one for one in report_of(family).delimiters() if one.field == field]
    assert (list(one.ids), one.control) == (ids, control)


@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("qwen3-coder", ["before calls ⏎⏎", "<tool_call> calls.open control token 151657"]),
        ("glm-4.5", ["stop <|user|> 151336 or <|observation|> 151338 or <|endoftext|> 151329"]),
        ("kimi-k2.5", ["reasoning ⟨reasoning⟩</think>"]),
        ("gpt-oss", ["content <|start|>assistant<|channel|>final<|message|>⟨content⟩"]),
        ("mistral-nemo", ["[TOOL_CALLS][ calls.section_open control token 9 and text"]),
    ],
)
def test_the_turn_is_printed_part_by_part(family: str, lines: list[str]) -> None:
    assert [line for line in lines if line not in printed(family)] == []


def test_a_template_without_calls_says_what_to_pass() -> None:
    notes = [line for line in printed("gemma-3") if line.startswith("note:")]
    assert "shows no tool calls" in notes[0]
    assert all(name in notes[-1] for name in ("--tool-parser", *DIALECTS))


@pytest.mark.parametrize("name", list(DIALECTS))
def test_every_dialect_can_be_printed(name: str) -> None:
    report, dialect = report_of("qwen3-coder"), DIALECTS[name]
    grammar = report.grammar.replace(calls=dialect.calls, channels=dialect.channels)
    other = dataclasses.replace(report, grammar=grammar)
    assert f"dialect {name}" in plain_view(other)
    json.dumps(other.to_json())
