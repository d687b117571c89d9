"""New weights for an engine: what is sampled afterwards is theirs, and nothing that the old ones computed is read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.support import Fake, Reply, json_reply
from tokentrace import create_renderer
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.protocol import Capabilities, Completion, Delta, EngineError, SamplingParams, joined
from tokentrace.engines.routing import Router
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import VLLMEngine
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import PocketModel, load_pocket, read_safetensors
from tokentrace.trajectory.turns import VersionSpan

RENDERER = create_renderer(POCKET)
PROMPT = RENDERER.render([{"role": "user", "content": "What is 6 * 7?"}], add_generation_prompt=True).ids
LONG = SamplingParams(12, seed=5)


@cache
def other_weights() -> dict[str, Any]:
    """Pocket's weights, each changed by some hundredths."""
    rng = np.random.default_rng(1)
    weights = read_safetensors(POCKET / "model.safetensors")
    return {name: (one * rng.normal(1, 0.05, one.shape)).astype(np.float32) for name, one in weights.items()}


@cache
def other_model() -> PocketModel:
    return PocketModel(json.loads((POCKET / "config.json").read_text(encoding="utf-8")), other_weights())


class Tensor:
    """What a tensor of torch has that is used: it is on a device, and its numbers have to be fetched."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def detach(self) -> Tensor:
        return self

    def cpu(self) -> Tensor:
        return self

    def float(self) -> Tensor:
        return self

    def numpy(self) -> Any:
        return self._array


def save(folder: Path, weights: dict[str, Any], shards: int = 2) -> Path:
    """A folder of safetensors, in several files as large models are saved."""
    folder.mkdir(exist_ok=True)
    for shard in range(shards):
        head, body = {}, b""
        for name in sorted(weights)[shard::shards]:
            raw = np.ascontiguousarray(weights[name], "<f4").tobytes()
            offsets = [len(body), len(body) + len(raw)]
            head[name] = {"dtype": "F32", "shape": list(weights[name].shape), "data_offsets": offsets}
            body += raw
        text = json.dumps(head).encode()
        (folder / f"model-{shard}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + body)
    return folder


def with_engine(work: Callable[[EmbeddedEngine], Awaitable[Any]], **options: Any) -> Any:
    async def go() -> Any:
        engine = EmbeddedEngine(**options)
        try:
            return await work(engine)
        finally:
            await engine.close()

    return asyncio.run(go())


def scored(model: PocketModel, prompt: Any, ids: Any) -> Any:
    return model.score(np.concatenate((prompt, ids)))[len(prompt) - 1 :]


def source(kind: str, folder: Path) -> Any:
    weights = other_weights()
    match kind:
        case "folder":
            return save(folder / "saved", weights)
        case "path":
            return str(save(folder / "saved", weights))
        case "arrays":
            return weights
        case "tensors":
            return {name: Tensor(one) for name, one in weights.items()}
        case "with its head":
            return weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    return other_model()


@pytest.mark.parametrize("kind", ["folder", "path", "arrays", "tensors", "with its head", "model"])
def test_what_is_sampled_afterwards_is_of_the_new_weights(kind: str, tmp_path: Path) -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion]:
        before = await engine.generate(PROMPT, LONG)
        await engine.update_weights(source(kind, tmp_path), version=2)
        assert engine.version == 2
        return before, await engine.generate(PROMPT, LONG)

    before, after = with_engine(work, version=1)
    np.testing.assert_allclose(before.logprobs, scored(load_pocket(), PROMPT, before.ids), atol=1e-4)
    np.testing.assert_allclose(after.logprobs, scored(other_model(), PROMPT, after.ids), atol=1e-4)
    assert np.abs(after.logprobs - scored(load_pocket(), PROMPT, after.ids)).max() > 0.05
    assert (before.versions, after.versions) == ((VersionSpan(1, 0, 12),), (VersionSpan(2, 0, 12),))


@pytest.mark.parametrize("what", ["update", "reset"])
def test_a_prefix_that_the_old_weights_computed_is_not_read_again(what: str) -> None:
    async def work(engine: EmbeddedEngine) -> tuple[Completion, Completion, Any]:
        first = await engine.generate(PROMPT, LONG, session="one")
        if what == "update":
            await engine.update_weights(other_weights(), version=2)
        else:
            await engine.reset_prefix_cache()
        longer = np.concatenate((PROMPT, first.ids, PROMPT[1:]))
        return first, await engine.generate(longer, LONG, session="one"), longer

    first, second, longer = with_engine(work)
    model = other_model() if what == "update" else load_pocket()
    assert second.cached_tokens == 0
    wanted = scored(model, longer, second.ids)
    np.testing.assert_allclose(second.logprobs, wanted, atol=1e-4)
    if what == "update":  # what would have been told, had the old cache been kept
        stale = load_pocket().new_cache()
        known = np.concatenate((PROMPT, first.ids))
        load_pocket().extend([stale], [known])
        rest = np.concatenate((longer[len(known) :], second.ids))
        wrong = model.score(rest, stale)[-len(second.ids) :]
        assert np.abs(wrong - wanted).max() > 0.005


def test_a_request_under_way_has_its_prefix_computed_anew_and_says_which_weights_sampled_what() -> None:
    async def work(engine: EmbeddedEngine) -> Completion:
        pieces: list[Delta] = []
        async for piece in engine.stream(PROMPT, LONG):
            pieces.append(piece)
            if len(pieces) == 5:
                await engine.pause()
                await engine.update_weights(other_weights(), version="new")
                await engine.resume()
        return joined(pieces)

    done = with_engine(work, version="old")
    old, new = done.versions
    assert (old.version, new.version, old.stop, new.stop) == ("old", "new", new.start, 12)
    assert 5 <= old.stop < 12
    np.testing.assert_allclose(
        done.logprobs[: old.stop], scored(load_pocket(), PROMPT, done.ids)[: old.stop], atol=1e-4
    )
    np.testing.assert_allclose(
        done.logprobs[old.stop :], scored(other_model(), PROMPT, done.ids)[old.stop :], atol=1e-4
    )


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "change",
    [
        lambda given: {name: one for name, one in given.items() if name != NORM},
        lambda given: given | {"model.lora.weight": given[NORM]},
        lambda given: given | {NORM: given[NORM][:-1]},
        lambda given: given | {NORM: given[NORM] * np.nan},
        lambda given: given | {"lm_head.weight": given["model.embed_tokens.weight"] * 2},
        lambda given: "/no/such/folder",
        lambda given: 7,
    ],
)
def test_weights_that_do_not_fit_are_refused_and_the_old_ones_stay(change: Any) -> None:
    async def work(engine: EmbeddedEngine) -> Completion:
        with pytest.raises(EngineError):
            await engine.update_weights(change(other_weights()), version=2)
        return await engine.generate(PROMPT, LONG)

    done = with_engine(work, version=1)
    np.testing.assert_allclose(done.logprobs, scored(load_pocket(), PROMPT, done.ids), atol=1e-4)
    assert done.versions == (VersionSpan(1, 0, 12),)


# -- servers

RELOAD = "/collective_rpc"
RESET = "/reset_prefix_cache?reset_running_requests=true&reset_external=true"
PAUSE = "/pause?mode=keep&clear_cache=false"


def vllm(paused: bool = False, **answers: Any) -> tuple[Fake, VLLMEngine]:
    """A server as vLLM 0.32 was seen to answer: see `tests/live/test_vllm.py`."""
    fake = Fake(**{"/is_paused": {"is_paused": paused}, "/weight_info": {"weight_version": "default"}})
    fake.on(PAUSE, {"status": "paused"}).on("/resume", {"status": "resumed"})
    fake.on(RELOAD, {"results": [None]}).on(RESET, {"success": True})
    fake.on("/update_weight_version", {"success": True, "new_version": "7"})
    for path, answer in answers.items():
        fake.on(path, answer)
    found = Capabilities(engine="vllm", pauses=True, weights=True)
    return fake, VLLMEngine(fake.connection(retries=0), found)


def asked(fake: Fake) -> list[tuple[str, Any]]:
    return [(path, body) for _, path, body in fake.requests]


@pytest.mark.parametrize("paused", [False, True])
def test_vllm_reloads_resets_and_is_told_the_version_while_it_is_paused(paused: bool) -> None:
    fake, engine = vllm(paused)
    asyncio.run(engine.update_weights(Path("/weights/7"), version=7))
    update = [
        (RELOAD, {"method": "reload_weights", "kwargs": {"weights_path": "/weights/7"}}),
        (RESET, None),
        ("/update_weight_version", {"new_version": "7"}),
    ]
    around = update if paused else [(PAUSE, None), *update, ("/resume", None)]
    assert asked(fake) == [("/is_paused", None), *around]
    assert engine.version == "7"


@pytest.mark.parametrize(
    "answers",
    [
        {RELOAD: json_reply({"error": "no such folder"}, 400)},
        {RESET: {"success": False}},
    ],
)
def test_a_vllm_that_did_not_take_them_is_left_paused_and_keeps_its_version(answers: Any) -> None:
    fake, engine = vllm(**answers)
    engine.version = "6"
    with pytest.raises(EngineError):
        asyncio.run(engine.update_weights("/weights/7", version=7))
    assert "/resume" not in [path for path, _ in asked(fake)]
    assert engine.version == "6"


def test_sglang_loads_flushes_and_names_the_version_at_once() -> None:
    fake = Fake(**{"/update_weights_from_disk": {"success": True, "message": "", "num_paused_requests": 0}})
    fake.on("/update_weight_version", {"success": True}).on("/flush_cache", Reply([b"Cache flushed.\n"]))
    engine = SGLangEngine(fake.connection(), Capabilities(engine="sglang", weights=True))
    asyncio.run(engine.update_weights("/weights/7", version=7))
    assert engine.version == "7"
    asyncio.run(engine.set_version("8"))
    asyncio.run(engine.reset_prefix_cache())
    assert asked(fake) == [
        ("/update_weights_from_disk", {"model_path": "/weights/7", "weight_version": "7", "flush_cache": True}),
        ("/update_weight_version", {"new_version": "8", "abort_all_requests": False}),
        ("/flush_cache", None),
    ]
    assert engine.version == "8"


# -- several


def test_a_router_has_a_version_once_all_have_it_and_names_those_that_do_not() -> None:
    class Broken(ScriptedEngine):
        async def update_weights(self, weights: Any, *, version: str | int) -> None:
            raise EngineError("the disk is full")

    async def run() -> None:
        fine, broken = (made(lambda p, s: [1], version=1) for made in (ScriptedEngine, Broken))
        router = Router([fine, broken], names=["http://one", "http://two"])
        assert router.capabilities.weights
        assert router.version == 1
        with pytest.raises(EngineError):
            await router.update_weights("/weights/2", version=2)
        assert (fine.version, broken.version, router.version) == (2, 1, 1)
        broken.__class__ = ScriptedEngine
        await router.update_weights("/weights/2", version=2)
        assert (fine.version, broken.version, router.version) == (2, 2, 2)
        await router.set_version(3)
        assert (fine.version, broken.version, router.version) == (3, 3, 3)
        await router.reset_prefix_cache()
        assert (await router.generate([1], SamplingParams(1))).versions == (VersionSpan(3, 0, 1),)

    asyncio.run(run())
