"""``tokentrace grammar``: what it says of different grammars, in words and as JSON."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from tests.assets import family_dir
from tests.support import make_renderer, per_family, tokenizer_json_for
from tokentrace import create_renderer
from tokentrace.cli import main
from tokentrace.formats.dialects import DIALECTS
from tokentrace.formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from tokentrace.pocket import POCKET
from tokentrace.show.grammar import json_view, plain_view, text_view
from tokentrace.show.sheet import Sheet, make_sheet

FAMILIES = ["qwen3-coder", "glm-4.5", "kimi-k2.5", "deepseek-v3", "gpt-oss", "minimax-m3", "mistral-nemo"]


def run(*args: Any, **env: str) -> Result:
    return CliRunner().invoke(main, ["grammar", *(str(arg) for arg in args)], env=env or None)


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


# -- the command


def test_the_command_prints_a_family() -> None:
    result = run("-t", family_dir("qwen3"))
    assert (result.exit_code, result.stderr) == (0, "")
    assert "\x1b" not in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0] == "qwen3 family qwen3 dialect: hermes"
    for line in (
        "prompt <|im_start|>assistant⏎",
        "reasoning <think>⏎⟨reasoning⟩⏎</think>⏎⏎",
        "content ⟨content⟩",
        "between calls ⏎",
        '{"name": "⟨name⟩", "arguments": ⟨arguments⟩}⏎',
        "the model opens it, not the generation prompt",
        'name in a JSON object, under "name"',
        "id not written",
        'arguments in the same JSON object, under "arguments"',
        "<tool_call> opens a call control token 151657",
        "stop <|im_end|> 151645",
        '{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}⏎',
    ):
        assert line in lines
    assert not any(line.startswith("note") for line in lines)


def test_a_terminal_gets_colours_and_the_same_lines() -> None:
    sheet = sheet_of("qwen3-coder")
    coloured = text_view(sheet, width=100)
    assert {line.rstrip() for line in plain_view(sheet, width=100).splitlines()} - {
        line.rstrip() for line in coloured.plain.splitlines()
    } == {f"{'':19}⟨…⟩ is what the model fills in, ⏎ a newline"}
    assert any("on #3d5a80" in str(span.style) for span in coloured.spans)
    result = run("-t", POCKET, FORCE_COLOR="1", TERM="xterm-256color", COLUMNS="90")
    assert result.exit_code == 0


def test_the_pocket_model_is_the_default_and_says_so_on_stderr() -> None:
    result = run("--json")
    assert "pocket" in result.stderr
    found = json.loads(result.stdout)
    assert found["grammar"] == json.loads(json.dumps(json_view(make_sheet(create_renderer(POCKET)))))["grammar"]


def test_template_variables_and_templates_reach_the_grammar(tmp_path: Path) -> None:
    family = family_dir("qwen3")
    closed = json.loads(run("-t", family, "--kwargs", "enable_thinking=false", "--json").stdout)
    assert closed["closes_reasoning"] is True
    assert closed["grammar"]["prompt"].endswith("<think>\n\n</think>\n\n")
    template = tmp_path / "own.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}",
        encoding="utf-8",
    )
    result = run("-t", POCKET, "--chat-template", template)
    assert "of no known family" in result.stdout
    assert "note  the template shows no tool calls" in result.stdout


def test_a_dialect_can_be_named() -> None:
    result = run("-t", family_dir("qwen2.5"), "--tool-parser", "pythonic", "--reasoning-parser", "think")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert lines[0].endswith("dialect: pythonic")
    assert "each call ⟨name⟩(⟨key⟩=⟨value⟩, …)" in lines
    assert "reasoning <think>⟨reasoning⟩</think>" in lines
    assert "name the function that is called" in lines
    assert "<think> opens reasoning text" in lines  # qwen2.5 has no such token
    wrong = run("-t", POCKET, "--tool-parser", "klingon")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("error: there is no tool parser 'klingon'; known are ")


def test_errors_are_2(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(tokenizer_json_for("<|end|>"), encoding="utf-8")
    bare = run("-t", tmp_path)
    assert bare.exit_code == 2
    assert bare.stderr.startswith("error: ")
    assert "no chat template" in bare.stderr
    absent = run("-t", tmp_path / "absent")
    assert absent.exit_code == 2
    assert absent.stderr.startswith("error: ")
    assert absent.stdout == ""
    assert run("-t", POCKET, "--kwargs", "messages=[]").exit_code == 2


def test_help_has_examples() -> None:
    text = " ".join(run("--help").stdout.split())
    assert "what a model writes in its turn" in text.lower()
    assert "Examples:" in text


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
                "reasoning none that the template shows (--reasoning-parser adds it)",
                "before calls ⏎⏎",
                "each call <tool_call>⏎<function=⟨name⟩>⏎",
                "each argument <parameter=⟨key⟩>⏎⟨value⟩⏎</parameter>⏎",
                "call ends </function>⏎</tool_call>",
                "name after <function=, up to >⏎",
                "other values as JSON, but True, False and None as in Python",
            ],
        ),
        (
            "glm-4.5",
            [
                "prompt <|assistant|>",
                "begins ⏎",
                "stop <|user|> or <|observation|> or <|endoftext|>",
                "</arg_key>⏎<arg_value> before a value control tokens 151357, 151358",
            ],
        ),
        (
            "kimi-k2.5",
            [
                "prompt <|im_assistant|>assistant<|im_middle|><think>",
                "reasoning ⟨reasoning⟩</think>",
                "the generation prompt opens it: a completion begins inside",
                "name read out of the id, functions.NAME:INDEX",
                "id after <|tool_call_begin|>, up to <|tool_call_argument_begin|>",
            ],
        ),
        (
            "gpt-oss",
            [
                "reasoning <|channel|>analysis<|message|>⟨reasoning⟩<|end|>",
                "content <|start|>assistant<|channel|>final<|message|>⟨content⟩",
                "calls a message on the channel commentary, ended by <|call|>",
                "name the recipient in the header: to=functions.⟨name⟩",
                "functions. before the name text",
                "stop <|return|> 200002, <|call|> 200012",
            ],
        ),
        (
            "minimax-m3",
            [
                "each argument ]<]minimax[>[<⟨key⟩>⟨value⟩]<]minimax[>[</⟨key⟩>",
                "arguments elements named after the arguments, nested as the values are",
                "the elements of a list are called item",
                ']<]minimax[>[<invoke name=" opens a call control token 200058 and text',
            ],
        ),
        (
            "mistral-nemo",
            [
                'each call {"name": "⟨name⟩", "arguments": ⟨arguments⟩, "id": "⟨id⟩"}',
                "between calls ,␣",
                'id in a JSON object, under "id"',
                "[TOOL_CALLS][ opens the calls control token 9 and text",
            ],
        ),
    ],
)
def test_different_grammars_are_said_in_words(family: str, expected: list[str]) -> None:
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
    assert 'the tag says what it is: " string="true"> a string, " string="false"> any other value' in said
    assert 'each string    <｜DSML｜parameter name="⟨key⟩" string="true">⟨value⟩</｜DSML｜parameter>⏎' in said
    assert "from the beginning of the turn to ⏎</think>" in said


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
