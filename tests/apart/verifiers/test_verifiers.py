"""verifiers with a tokentrace renderer: its trace equals our gateway's record of the same rollout."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, SamplingConfig, SystemMessage, Tool, ToolMessage, UserMessage

from tests.gateway.server import TOOLS, Served, gateway_server
from tests.guides import run_guide
from tokentrace import create_renderer
from tokentrace.demo.calculator import calculate
from tokentrace.pocket import POCKET

TOOL = Tool(name="compute", description="Computes a formula.", parameters=TOOLS[0]["function"]["parameters"])
QUESTIONS = ("What is 17 * 23 + 4?", "What is 6 * 7?")


def config(url: str, **fields: Any) -> TrainClientConfig:
    return TrainClientConfig(
        base_url=f"{url}/sessions/one/v1",
        api_key_var="NO_SUCH_KEY",
        renderer={"name": "custom", "import_path": "tokentrace.integrations.renderers:TokentraceRenderer", **fields},
        renderer_model_name=str(POCKET),
    )


def new_trace() -> Any:
    return Trace.model_construct(nodes=[], calls=[], tools=[], mm_token_type_id_map={})


async def roll_out(url: str, trace: Any, questions: Any = QUESTIONS, **fields: Any) -> list[Any]:
    """Ask several questions with tools, as verifiers' interception server drives its client."""
    client = TrainClient(config(url, **fields))
    messages: list[Any] = [SystemMessage(content="Use the tool.")]
    responses = []
    try:
        for question in questions:
            messages.append(UserMessage(content=question))
            for _ in range(6):
                turn = prepare_turn(trace, messages, [TOOL])
                sampling = SamplingConfig(temperature=0.0, max_tokens=128)
                response = await client.get_response(ChatDialect(), {"model": "pocket"}, sampling, "s", turn)
                turn.commit(response)
                responses.append(response)
                messages.append(response.message)
                if not response.message.tool_calls:
                    break
                for call in response.message.tool_calls:
                    result = str(calculate(json.loads(call.arguments)["formula"]))
                    messages.append(ToolMessage(tool_call_id=call.id, content=result))
    finally:
        await client.close()
    return responses


@pytest.fixture
def served() -> Any:
    with gateway_server() as running:
        yield running


def test_trace_is_the_recorded_trajectory(served: Served) -> None:
    trace = new_trace()
    responses = asyncio.run(roll_out(served.url, trace))
    assert sum(bool(response.message.tool_calls) for response in responses) >= 2  # the model calls the tool
    assert [response.tokens.bridged for response in responses] == [False] + [True] * (len(responses) - 1)
    [branch] = trace.branches
    [row] = served.rows("one")
    assert branch.token_ids == row["input_ids"]
    assert [int(one) for one in branch.sampled_mask] == [int(one) for one in row["loss_mask"]]
    assert branch.logprobs == [0.0 if one is None else one for one in row["logprobs"]]
    assert sum(branch.sampled_mask) == sum(len(response.tokens.completion_ids) for response in responses)


def test_nodes_end_where_messages_end(served: Served) -> None:
    trace = new_trace()
    asyncio.run(roll_out(served.url, trace))
    decode = create_renderer(POCKET).tokenizer.decode
    for node in trace.nodes:
        text = decode(node.token_ids)
        assert text.endswith("<|end|>")
        assert text.count("<|turn|>") == 1
        body = decode([id for id, content in zip(node.token_ids, node.is_content, strict=True) if content])
        if isinstance(node.message, AssistantMessage):
            assert node.sampled
            assert body == decode([id for id, one in zip(node.token_ids, node.mask, strict=True) if one])
        else:
            assert body == node.message.content


def test_re_rendered_history_branches_at_the_message(served: Served) -> None:
    """If an agent rewrites a message, verifiers' tree and ours branch at the same token."""
    trace = new_trace()

    async def twice() -> None:
        await roll_out(served.url, trace, QUESTIONS[:1])
        await roll_out(served.url, trace, QUESTIONS[1:])

    asyncio.run(twice())
    assert len(trace.branches) == len(served.rows("one")) == 2
    rows = sorted(served.rows("one"), key=lambda row: row["input_ids"])
    for branch, row in zip(sorted(trace.branches, key=lambda one: one.token_ids), rows, strict=True):
        assert branch.token_ids == row["input_ids"]
        assert [int(one) for one in branch.sampled_mask] == [int(one) for one in row["loss_mask"]]


def test_guide(tmp_path: Path) -> None:
    run_guide("prime-rl", tmp_path)
