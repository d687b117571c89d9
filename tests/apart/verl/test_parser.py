"""Our parser as one of verl's: calls are read by their ids, as the template writes them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

import tokentrace.integrations.verl  # noqa: F401  # registers the parser
from tokentrace import create_renderer
from tokentrace.pocket import POCKET

SCHEMA = OpenAIFunctionToolSchema.model_validate(
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Evaluate.",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
)
CALL = {"name": "calculator", "arguments": {"expression": "6 * 7"}}


@pytest.fixture(scope="module")
def parser() -> ToolParser:
    return ToolParser.get_tool_parser("tokentrace", AutoTokenizer.from_pretrained(POCKET))


def completion(content: str, calls: list[dict[str, Any]]) -> list[int]:
    """What the model samples for a turn, by the template's own render."""
    rendered = create_renderer(POCKET).render(
        [
            {"role": "user", "content": "?"},
            {
                "role": "assistant",
                "content": content,
                "tool_calls": [{"type": "function", "function": c} for c in calls],
            },
        ]
    )
    return list(rendered.ids[rendered.mask])


def extracted(parser: ToolParser, ids: list[int]) -> tuple[str, list[Any]]:
    return asyncio.run(parser.extract_tool_calls([int(one) for one in ids], [SCHEMA]))


def test_calls_and_content_are_read(parser: ToolParser) -> None:
    content, calls = extracted(parser, completion("Let me see.", [CALL, CALL]))
    assert content == "Let me see."
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("calculator", {"expression": "6 * 7"})] * 2


def test_a_call_that_is_only_spelled_is_text(parser: ToolParser) -> None:
    renderer = create_renderer(POCKET)
    spelled = f"<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    ids = [*renderer.tokenizer.encode_plain(spelled), *renderer.get_stop_token_ids()[:1]]
    hermes = ToolParser.get_tool_parser("hermes", parser.tokenizer)
    assert len(asyncio.run(hermes.extract_tool_calls(ids, [SCHEMA]))[1]) == 1, "verl's own reads the decoded text"
    content, calls = extracted(parser, ids)
    assert calls == []
    assert content == spelled


def test_a_call_inside_reasoning_counts_only_for_the_lenient_parser(parser: ToolParser) -> None:
    renderer = create_renderer(POCKET)
    text = f"<think>\nHm <tool_call>\n{json.dumps(CALL)}\n</tool_call>"
    ids = [*renderer.tokenizer.encode(text), *renderer.get_stop_token_ids()[:1]]
    lenient = ToolParser.get_tool_parser("tokentrace_lenient", parser.tokenizer)
    assert [len(extracted(one, ids)[1]) for one in (parser, lenient)] == [0, 1]


def test_stop_tokens_are_those_of_the_template(parser: ToolParser) -> None:
    assert parser.stop_token_ids == create_renderer(POCKET).get_stop_token_ids()
