"""The grammar derived from every family's template, compared with grammars.json."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import pytest

from tests.assets import FAMILIES
from tests.conversations import tool
from tests.formats.small import small_renderer
from tests.support import make_renderer
from tokentrace.formats.dialects import dialect_of
from tokentrace.formats.grammar import TurnGrammar

LOOK_UP: Final = tool("look_up", "Looks up.", {"place": {"type": "string"}}, ["place"])
GRAMMARS: Final = json.loads((Path(__file__).parent / "grammars.json").read_text(encoding="utf-8"))


def plain(grammar: TurnGrammar) -> dict[str, Any]:
    """A grammar as JSON, without empty fields, with the name of its dialect."""

    def filled(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        return {key: filled(one) for key, one in value.items() if one not in ("", None, False, [])}

    fields = filled(json.loads(json.dumps(asdict(grammar))))
    dialect = dialect_of(grammar.calls, grammar.channels)
    return {"dialect": dialect, "opens_reasoning": grammar.opens_reasoning, **fields}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_writes_what_is_read_off_its_template_with_tools_and_without(family: str) -> None:
    for tools in (None, [LOOK_UP]):
        assert plain(small_renderer(family).grammar(tools)) == GRAMMARS[family]


@pytest.mark.parametrize("family", ["qwen3", "llama-3.1"])
def test_the_grammar_is_the_same_with_the_whole_vocabulary(family: str) -> None:
    assert plain(make_renderer(family).grammar()) == GRAMMARS[family]


@pytest.mark.parametrize(
    ("family", "variables", "appended", "opens"),
    [
        ("qwen3", {"enable_thinking": False}, "<think>\n\n</think>\n\n", False),
        ("qwen3.5", {"enable_thinking": False}, "<think>\n\n</think>\n\n", False),
        ("qwen3.5-nothink", {"enable_thinking": True}, "<think>\n", True),
        ("glm-4.7", {"enable_thinking": False}, "</think>", False),
        ("deepseek-v3.1", {"thinking": True}, "<think>", True),
        ("kimi-k2.5", {"thinking": False}, "<think></think>", False),
        ("minimax-m3", {"thinking_mode": "enabled"}, "<mm:think>", True),
        ("minimax-m3", {"thinking_mode": "disabled"}, "</mm:think>", False),
        ("nemotron-3-nano", {"enable_thinking": False}, "<think></think>", False),
    ],
)
def test_a_switch_changes_the_prompt_and_not_how_reasoning_is_written(
    family: str, variables: dict[str, Any], appended: str, opens: bool
) -> None:
    grammar = small_renderer(family, **variables).grammar()
    usual = small_renderer(family).grammar()
    assert (grammar.head, grammar.prompt) == (usual.head, usual.head + appended)
    assert grammar.opens_reasoning == opens
    assert (grammar.reasoning, grammar.calls) == (usual.reasoning, usual.calls)


def test_a_known_family_brings_the_dialect_that_its_template_contradicts() -> None:
    """One call is closed differently from two: the dialect closes it as the template closes two."""
    auto = small_renderer("deepseek-v3", "auto")
    assert (auto.family, auto.tool_parser) == ("deepseek_v3", "deepseek")
    assert plain(auto.grammar()) == GRAMMARS["deepseek-v3"]
    assert small_renderer("deepseek-v3", "default").tool_parser is None
