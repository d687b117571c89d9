"""Our parser registered in verl: it reads calls from ids in the template's format. Also the guide and the example."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.schemas import OpenAIFunctionToolSchema

import tokentrace.integrations.verl  # noqa: F401  # registers the parser
from tests.guides import run_guide
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
    """The ids that a model samples for a turn, rendered by the template."""
    answer = {"content": content, "tool_calls": [{"type": "function", "function": one} for one in calls]}
    rendered = create_renderer(POCKET).render([{"role": "user", "content": "?"}, {"role": "assistant", **answer}])
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


# -- the guide and the example


def run(*arguments: str, **variables: str) -> str:
    options: Any = {"cwd": Path(__file__).parents[3], "env": {**os.environ, **variables}}
    done = subprocess.run([sys.executable, *arguments], **options, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_guide_runs(tmp_path: Path) -> None:
    names = run_guide("verl", tmp_path)
    rows = names["batch"].batch
    assert rows["response_mask"].sum(-1).min() > 0
    assert any(message["role"] == "tool" for message in names["batch"].non_tensor_batch["extras"][0]["messages"])


def test_the_example_runs() -> None:
    output = run("examples/verl/rollouts.py")
    assert output.count(" sampled, mean logprob -") == 3
    assert "<tool_call>" in output


def test_verl_finds_the_parser_by_its_setting() -> None:
    code = "from verl.experimental.agent_loop.tool_parser import ToolParser; print(sorted(ToolParser._registry))"
    assert "'tokentrace'" in run("-c", code, VERL_USE_EXTERNAL_MODULES="tokentrace.integrations.verl")
