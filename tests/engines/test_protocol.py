"""What an engine is: one of your own needs little, all are imported from one place, and what they show is short."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from tests.engines.support import Fake, same
from tokentrace import create_renderer
from tokentrace.engines import (
    Capabilities,
    Delta,
    EmbeddedEngine,
    Engine,
    EngineAnswerError,
    EngineError,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    Router,
    SamplingParams,
    ScriptedEngine,
    VLLMEngine,
    collected,
)
from tokentrace.engines.protocol import joined
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, Budget, Task


class Echo(Engine):
    """Says the prompt again, an id at a time."""

    def __init__(self) -> None:
        super().__init__(Capabilities("echo", model="parrot"))

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        *first, last = np.asarray(request.prompt_ids, np.int32)
        for one in first:
            yield Delta(np.array([one]), np.array([-1.0], np.float32))
        yield Delta(np.array([last]), np.array([-1.0], np.float32), FinishReason.LENGTH)


def test_an_engine_of_your_own_is_a_stream() -> None:
    engine = Echo()
    done = asyncio.run(engine.generate([1, 2, 3], SamplingParams(3)))
    assert (done.ids.tolist(), done.finish_reason) == ([1, 2, 3], FinishReason.LENGTH)
    assert same(done, asyncio.run(collected(engine.stream([1, 2, 3], SamplingParams(3)))))
    assert same(done, asyncio.run(Router([engine]).generate([1, 2, 3], SamplingParams(3), session="s")))
    for act in (engine.abort("a"), engine.pause(), engine.resume()):
        with pytest.raises(EngineError, match="echo cannot"):
            asyncio.run(act)
    asyncio.run(engine.close())


def piece(ids: list[int], last: bool = False, **channels: list[object]) -> Delta:
    reason = FinishReason.LENGTH if last else None
    return Delta(np.array(ids, np.int32), np.zeros(len(ids), np.float32), reason, channels=channels)


def test_channels_of_pieces_are_put_together_one_entry_an_id() -> None:
    whole = joined([piece([1], a=["x"]), piece([]), piece([2, 3], a=["y", "z"]), piece([], last=True)])
    assert whole.channels == {"a": ["x", "y", "z"]}
    whole = joined([piece([1], a=["x"]), piece([2], last=True, a=["y"], late=["p", "q"])])
    assert whole.channels == {"a": ["x", "y"], "late": ["p", "q"]}, "what only the last piece has is of the whole"
    assert joined([piece([1]), piece([2], last=True)]).channels == {}
    assert joined([piece([1], last=True, a=["x"])]).channels == {"a": ["x"]}
    assert joined([piece([], last=True)]).channels == {}


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ([piece([1, 2], last=True, a=["x"])], "a has 1 entries for 2 ids"),
        ([piece([1], a=["x"]), piece([2], last=True)], "a came with some pieces"),
        ([piece([1]), piece([2], a=["x"]), piece([3], last=True, a=["x"])], "a came with some pieces"),
        ([piece([1]), piece([2], last=True, late=["q"])], "late has 1 entries for 2 ids"),
        ([piece([1], a=["x", "y"]), piece([2], last=True, a=[])], None),
    ],
)
def test_channels_with_a_gap_are_refused(pieces: list[Delta], says: str | None) -> None:
    if says is None:  # lengths are of the whole: engines check their pieces
        assert joined(pieces).channels == {"a": ["x", "y"]}
        return
    with pytest.raises(EngineAnswerError, match=says):
        joined(pieces)


def test_more_top_logprobs_than_an_engine_tells_are_refused() -> None:
    engine = ScriptedEngine(lambda prompt, sampling: [1])
    with pytest.raises(EngineRefusal, match="top_logprobs is 21, and scripted tells the logprobs of 20 ids"):
        asyncio.run(engine.generate([1], SamplingParams(1, top_logprobs=21)))
    engine.capabilities = Capabilities("mute")
    with pytest.raises(EngineRefusal, match="mute tells the logprobs of no ids"):
        asyncio.run(engine.generate([1], SamplingParams(1, top_logprobs=1)))
    for odd in (-1, 1.5, True, "2"):
        with pytest.raises(EngineError, match="top_logprobs"):
            SamplingParams(1, top_logprobs=odd)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "odd",
    [
        "json",
        {},
        {"type": "xml"},
        {"type": ["json_object"]},
        {"type": "json_object", "schema": {}},
        {"type": "json_schema"},
        {"type": "json_schema", "schema": "x"},
        {"type": "json_schema", "schema": {}, "strict": True},
        {"type": "json_schema", "schema": {"a": object()}},
        {"type": "json_schema", "schema": {"a": float("nan")}},
    ],
)
def test_what_is_no_structure_is_refused(odd: Any) -> None:
    with pytest.raises(EngineError, match="structure"):
        SamplingParams(1, structure=odd)


def test_a_structure_is_copied_recorded_and_refused_by_engines_that_cannot() -> None:
    schema: dict[str, Any] = {"type": "object"}
    sampling = SamplingParams(1, structure={"type": "json_schema", "schema": schema})
    schema["type"] = "array"
    assert sampling.described()["structure"] == {"type": "json_schema", "schema": {"type": "object"}}
    assert "structure" not in SamplingParams(1).described()

    async def run(engine: Engine) -> None:
        with pytest.raises(EngineRefusal, match="cannot be held to JSON; ask for it in the prompt"):
            await engine.generate([1], sampling)
        with pytest.raises(EngineRefusal, match="cannot be held to JSON"):
            await collected(Router([engine]).stream([1], sampling))
        await engine.close()

    asyncio.run(run(ScriptedEngine(lambda prompt, sampling: [1])))

    async def embedded() -> None:
        await run(EmbeddedEngine())

    asyncio.run(embedded())


def test_what_was_not_asked_for_is_not_recorded() -> None:
    assert "top_logprobs" not in SamplingParams(1).described()
    assert SamplingParams(1, top_logprobs=3).described()["top_logprobs"] == 3


def test_all_engines_are_imported_from_one_place_without_optional_packages() -> None:
    code = (
        "import sys\nfor name in ('httpx2', 'yaml', 'pyarrow'): sys.modules[name] = None\n"
        "from tokentrace.engines import *\nfrom tokentrace.rollout import *\n"
        "print(VLLMEngine.__name__, EmbeddedEngine.__name__, Agent.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["VLLMEngine", "EmbeddedEngine", "Agent"]


def test_reprs_are_short() -> None:
    engine = EmbeddedEngine()
    assert repr(engine) == "EmbeddedEngine(pocket)"
    assert (
        repr(VLLMEngine(Fake().connection(), Capabilities("vllm", model="tiny"))) == "VLLMEngine(tiny at http://engine)"
    )
    assert repr(Router([Echo(), Echo()])) == "Router(endpoint 0 closed, endpoint 1 closed)"
    assert repr(Budget(turns=3)) == "Budget(turns=3)"
    task = Task([{"role": "user", "content": "?"}], name="one")
    assert repr(task) == "Task('one', 1 messages)"
    stop = create_renderer(POCKET).get_stop_token_ids()[0]
    agent = Agent(ScriptedEngine(lambda prompt, sampling: [stop]), create_renderer(POCKET), budget=Budget(turns=3))
    assert repr(agent) == "Agent(ScriptedEngine(), 0 tools, Budget(turns=3))"
    rollout = asyncio.run(agent.run(task))
    assert repr(rollout) == f"Rollout('one', answer, 1 turns, {len(rollout.trajectory)} tokens)"
