"""What an engine is: one of your own needs little, all are imported from one place, and what they show is short."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest

from tests.engines.support import same
from tokentrace.engines import (
    Capabilities,
    Delta,
    EmbeddedEngine,
    Engine,
    EngineError,
    EngineRefusal,
    FinishReason,
    GenerateRequest,
    Router,
    SamplingParams,
    ScriptedEngine,
    collected,
)
from tokentrace.engines.protocol import joined


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
        with pytest.raises(EngineError):
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
    with pytest.raises(EngineError):
        SamplingParams(1, structure=odd)


def test_a_structure_is_copied_recorded_and_refused_by_engines_that_cannot() -> None:
    schema: dict[str, Any] = {"type": "object"}
    sampling = SamplingParams(1, structure={"type": "json_schema", "schema": schema})
    schema["type"] = "array"
    assert sampling.described()["structure"] == {"type": "json_schema", "schema": {"type": "object"}}
    assert "structure" not in SamplingParams(1).described()

    async def run(engine: Engine) -> None:
        with pytest.raises(EngineRefusal):
            await engine.generate([1], sampling)
        with pytest.raises(EngineRefusal):
            await collected(Router([engine]).stream([1], sampling))
        await engine.close()

    asyncio.run(run(ScriptedEngine(lambda prompt, sampling: [1])))

    async def embedded() -> None:
        await run(EmbeddedEngine())

    asyncio.run(embedded())


def test_all_engines_are_imported_from_one_place_without_optional_packages() -> None:
    code = (
        "import sys\nfor name in ('httpx2', 'yaml', 'pyarrow'): sys.modules[name] = None\n"
        "from tokentrace.engines import *\nfrom tokentrace.rollout import *\n"
        "print(VLLMEngine.__name__, EmbeddedEngine.__name__, Agent.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["VLLMEngine", "EmbeddedEngine", "Agent"]
