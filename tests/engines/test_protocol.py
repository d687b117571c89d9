"""The engine protocol: custom engines, sampling settings, and refusals before a request is sent."""

import subprocess
import sys
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.engines.support import same
from tests.loop import in_loop
from tokentrace.engines import SamplingParams, collected, protocol
from tokentrace.engines.answers import StopFinder, check_logprobs
from tokentrace.engines.errors import EngineAnswerError, EngineError, EngineRefusal, LogprobKindError
from tokentrace.engines.protocol import OPTIONAL, Capabilities, Delta, Engine, FinishReason, GenerateRequest
from tokentrace.engines.routing import Router
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.trajectory.turns import LogprobKind


class Echo(Engine):
    """Repeats the prompt, one id at a time."""

    def __init__(self) -> None:
        super().__init__(Capabilities("echo", model="parrot"))

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        *first, last = np.asarray(request.prompt_ids, np.int32)
        for one in first:
            yield Delta(np.array([one]), np.array([-1.0], np.float32))
        yield Delta(np.array([last]), np.array([-1.0], np.float32), FinishReason.LENGTH)


@in_loop
async def test_a_custom_engine_only_needs_a_stream() -> None:
    engine, sampling = Echo(), SamplingParams(3)
    done = await engine.generate([1, 2, 3], sampling)
    assert (done.ids.tolist(), done.finish_reason) == ([1, 2, 3], FinishReason.LENGTH)
    assert same(done, await collected(engine.stream([1, 2, 3], sampling)))
    assert same(done, await Router([engine]).generate([1, 2, 3], sampling, session="s"))
    for act in (engine.abort("a"), engine.pause(), engine.resume()):
        with pytest.raises(EngineError):
            await act
    await engine.close()


def piece(ids: list[int], last: bool = False, **channels: list[object]) -> Delta:
    reason = FinishReason.LENGTH if last else None
    return Delta(np.array(ids, np.int32), np.zeros(len(ids), np.float32), reason, channels=channels)


def test_channels_of_pieces_are_joined_one_entry_per_id() -> None:
    whole = protocol.joined([piece([1], a=["x"]), piece([]), piece([2, 3], a=["y", "z"]), piece([], last=True)])
    assert whole.channels == {"a": ["x", "y", "z"]}
    whole = protocol.joined([piece([1], a=["x"]), piece([2], last=True, a=["y"], late=["p", "q"])])
    assert whole.channels == {"a": ["x", "y"], "late": ["p", "q"]}, "what only the last piece has is of the whole"
    whole = protocol.joined([piece([1, 2], a=["x", "y"]), piece([], last=True, a=["x", "y"])])
    assert whole.channels == {"a": ["x", "y"]}, "the last piece may repeat the whole"
    with pytest.raises(EngineAnswerError, match="only some pieces of the completion have a"):
        protocol.joined([piece([1], a=["x"]), piece([2]), piece([3], last=True, a=["y", "z"])])
    assert protocol.joined([piece([1]), piece([2], last=True)]).channels == {}
    assert protocol.joined([piece([], last=True)]).channels == {}


def test_all_engines_are_imported_from_one_place_without_optional_packages() -> None:
    code = (
        "import sys\nfor name in ('httpx2', 'yaml', 'pyarrow'): sys.modules[name] = None\n"
        "from tokentrace.engines import *\nfrom tokentrace.rollout import *\n"
        "print(VLLMEngine.__name__, EmbeddedEngine.__name__, Agent.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.split() == ["VLLMEngine", "EmbeddedEngine", "Agent"]


# -- settings

SCHEMA = {"type": "json_schema", "schema": {}}
ODD: dict[str, list[Any]] = {
    "max_tokens": [0, 1.5, True, None],
    "temperature": [-1, 0.001, float("inf"), "1"],
    "top_k": [-1],
    "seed": [-1, 0.5],
    "stop_token_ids": [5, [-1], ["x"]],
    "min_p": [1.5, float("nan")],
    "presence_penalty": [-3],
    "frequency_penalty": ["1"],
    "repetition_penalty": [0, 2.5],
    "stop": [[""], [7], ["\ud800"]],
    "structure": [
        *("json", {}, {"type": "xml"}, {"type": ["json_object"]}, {"type": "json_object", "schema": {}}),
        *({"type": "json_schema"}, SCHEMA | {"schema": "x"}, SCHEMA | {"strict": True}),
        *(SCHEMA | {"schema": {"a": object()}}, SCHEMA | {"schema": {"a": float("nan")}}),
    ],
}


@pytest.mark.parametrize("name", ODD)
def test_odd_settings_are_refused_and_numbers_of_numpy_are_numbers(name: str) -> None:
    for value in ODD[name]:
        with pytest.raises(EngineError):
            SamplingParams(**{"max_tokens": 8, name: value})
    assert SamplingParams(np.int64(8), temperature=np.float32(0.5)).temperature == 0.5


def test_described_settings_are_those_that_were_set() -> None:
    plain = SamplingParams(8).described()
    assert not set(plain) & {*OPTIONAL, "structure", "top_logprobs"}
    sampling = SamplingParams(8, min_p=0.1, repetition_penalty=1.1, stop="\n\n")
    assert sampling.described() == plain | {"min_p": 0.1, "repetition_penalty": 1.1, "stop": ["\n\n"]}
    assert sampling.optional == ["min_p", "repetition_penalty", "stop"]
    assert sampling.penalties == {"repetition_penalty": 1.1}
    schema: dict[str, Any] = {"type": "object"}
    structured = SamplingParams(1, structure={"type": "json_schema", "schema": schema})
    schema["type"] = "array"
    assert structured.described()["structure"] == {"type": "json_schema", "schema": {"type": "object"}}


JSON = {"structure": {"type": "json_object"}}
UNABLE: list[tuple[Capabilities | None, list[dict[str, Any]]]] = [
    (None, [{"stop": ["x"]}, JSON, {"top_logprobs": 21}]),
    (Capabilities("mine", seeds=False), [{"min_p": 0.1}, {"presence_penalty": 1}, {"seed": 1}]),
    (Capabilities("mine", sampling=frozenset(OPTIONAL)), [JSON]),
]


@pytest.mark.parametrize(("capabilities", "settings"), UNABLE)
@in_loop
async def test_unsupported_settings_are_refused_locally(capabilities: Any, settings: Any) -> None:
    engine = ScriptedEngine(lambda prompt, sampling: [1])
    engine.capabilities = capabilities or engine.capabilities
    for options in settings:
        sampling = SamplingParams(8, allow_raw_logprobs=True, **options)
        for completion in (engine.generate([1], sampling), collected(Router([engine]).stream([1], sampling))):
            with pytest.raises(EngineRefusal) as refused:
                await completion
            assert refused.value.status is None
    assert engine.requests == []


@pytest.mark.parametrize("kind", ["raw", "unknown"])
def test_settings_are_refused_where_logprobs_are_not_of_the_sampled_distribution(kind: str) -> None:
    other = Capabilities(engine="vllm", logprobs=LogprobKind(kind), sampling=frozenset(OPTIONAL))
    changes = {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "temperature": 0.5}
    for name, value in changes.items():
        sampling = SamplingParams(8, **{name: value})
        with pytest.raises(LogprobKindError):
            check_logprobs(sampling, other)
        check_logprobs(SamplingParams(8, **{name: value}, allow_raw_logprobs=True), other)
        check_logprobs(SamplingParams(8, **{name: value} | {"temperature": 0}), other)
        for fine in (LogprobKind.PROCESSED, LogprobKind.SCALED):
            check_logprobs(sampling, Capabilities(engine="vllm", logprobs=fine))
    check_logprobs(SamplingParams(8, min_p=0.2), other)  # like top-p: removes tokens, changes no others


TEXTS = st.lists(st.text("aé😀", min_size=1, max_size=3), min_size=1, max_size=3)


@given(st.text("aé😀b", max_size=12), st.lists(st.integers(1, 3), max_size=40), TEXTS)
def test_the_id_that_completes_a_stop_text_does_not_depend_on_the_pieces(
    text: str, sizes: list[int], stops: list[str]
) -> None:
    raw, pieces = text.encode(), []
    for size in [*sizes, *[1] * len(raw)]:
        if raw:
            pieces.append(raw[:size])
            raw = raw[size:]
    finder = StopFinder(stops, lambda one: pieces[one])
    for at in range(len(pieces)):
        seen = b"".join(pieces[: at + 1])
        match = finder.feed(at)
        ends = {one: seen.index(one.encode()) + len(one.encode()) for one in stops if one.encode() in seen}
        if ends:
            assert match is not None
            assert ends[match] == min(ends.values())
            return
        assert match is None
