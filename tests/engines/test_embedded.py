"""The embedded engine: completions match the model, for any batching and across weight updates."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.loop import in_loop
from tokentrace import create_renderer
from tokentrace.engines.embedded import EmbeddedEngine
from tokentrace.engines.errors import EngineError, EngineRefusal
from tokentrace.engines.protocol import Completion, Delta, FinishReason, SamplingParams, joined
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import PocketModel, load_pocket, read_safetensors
from tokentrace.trajectory.turns import LogprobKind, VersionSpan
from training.pocket.questions import make_questions

RENDERER = create_renderer(POCKET)
STOPS = tuple(RENDERER.get_stop_token_ids())
PROMPTS = [
    RENDERER.render(question.prompt, tools=question.tools or None, add_generation_prompt=True).ids
    for question in make_questions(3, 8, "held_back")
]
PROMPT = RENDERER.render([{"role": "user", "content": "What is 6 * 7?"}], add_generation_prompt=True).ids


@asynccontextmanager
async def embedded(**options: Any) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine(**options)
    try:
        yield engine
    finally:
        await engine.close()


def params(**settings: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 60, "seed": 7, "stop_token_ids": STOPS, **settings})


ENDLESS = params(max_tokens=400, stop_token_ids=())


def same(one: Completion, other: Completion) -> None:
    np.testing.assert_array_equal(one.ids, other.ids)
    np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert one.finish_reason is other.finish_reason


def scored(model: PocketModel, prompt: Any, ids: Any) -> Any:
    return model.score(np.concatenate((prompt, ids)))[len(prompt) - 1 :]


@in_loop
async def test_batched_requests_match_single_requests_and_scores() -> None:
    async with embedded() as engine:
        batch = await asyncio.gather(*(engine.generate(prompt, params(max_tokens=200)) for prompt in PROMPTS[:4]))
    async with embedded() as engine:
        for prompt, completion in zip(PROMPTS[:4], batch, strict=True):
            pieces = [delta async for delta in engine.stream(prompt, params(max_tokens=200))]
            same(completion, joined(pieces))
            assert [len(delta.ids) for delta in pieces] == [1] * len(completion.ids)
            assert [delta.finish_reason for delta in pieces[:-1]] == [None] * (len(pieces) - 1)
            np.testing.assert_allclose(completion.logprobs, scored(load_pocket(), prompt, completion.ids), atol=1e-4)
            assert completion.finish_reason is FinishReason.STOP
            assert int(completion.ids[-1]) in STOPS
            assert completion.versions[0][1:] == (0, len(completion.ids))


@in_loop
async def test_the_prefix_of_a_session_is_cached_and_changes_nothing() -> None:
    async with embedded() as engine:
        first = await engine.generate(PROMPTS[0], params(), session="a")
        longer = np.concatenate((PROMPTS[0], first.ids, PROMPTS[1][1:40]))
        second = await engine.generate(longer, params(), session="a")
        fresh = await engine.generate(longer, params())
        rewritten = np.concatenate((PROMPTS[0][:50], PROMPTS[1][20:]))
        third = await engine.generate(rewritten, params(), session="a")
        same(third, await engine.generate(rewritten, params()))
    assert (first.cached_tokens, fresh.cached_tokens, third.cached_tokens) == (0, 0, 50)
    assert second.cached_tokens == len(PROMPTS[0]) + len(first.ids) - 1, "the stop token was never read"
    same(second, fresh)


# -- sampling


def reference(logits: Any, prompt: list[int], sampled: list[int], sampling: SamplingParams) -> list[float]:
    """Probabilities after penalties, temperature, min-p, top-k and top-p, as vLLM documents them."""
    adjusted, counts = np.array(logits, np.float64), np.bincount([*sampled, len(logits) - 1], minlength=len(logits))
    counts[-1] -= 1
    for token in {*prompt, *sampled}:
        adjusted[token] *= sampling.repetition_penalty if adjusted[token] < 0 else 1 / sampling.repetition_penalty
    adjusted -= sampling.frequency_penalty * counts + sampling.presence_penalty * (counts > 0)
    adjusted /= sampling.temperature or 1.0
    weights = np.exp(adjusted - adjusted.max())
    weights[weights < sampling.min_p] = 0
    order = np.argsort(-weights, kind="stable")
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        cumulative = np.cumsum(weights[order]) / weights.sum()
        weights[order[int(np.searchsorted(cumulative, sampling.top_p)) + 1 :]] = 0
    return list(map(float, weights / weights.sum()))


SETTINGS: list[dict[str, Any]] = [
    {"min_p": 0.1},
    {"min_p": 0.3, "temperature": 2.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.0, "temperature": 0.5},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0, "frequency_penalty": 0.7, "min_p": 0.05, "temperature": 1.4},
]


@pytest.mark.parametrize(
    "settings", [*SETTINGS, {"temperature": 0}, {"temperature": 0.6, "top_k": 3}, {"temperature": 1.7, "top_p": 0.3}]
)
@in_loop
async def test_logprobs_and_the_likeliest_ids_are_of_the_sampled_distribution(settings: dict[str, Any]) -> None:
    sampling = params(max_tokens=16, top_logprobs=5, **settings)
    async with embedded() as engine:
        plain = await engine.generate(PROMPT, params(max_tokens=16, **settings))
        done = joined([delta async for delta in engine.stream(PROMPT, sampling)])
    same(done, plain)
    assert plain.channels == {}
    assert done.logprobs_kind is (LogprobKind.PROCESSED if sampling.temperature else LogprobKind.RAW)
    row, model = [*PROMPT.tolist(), *done.ids.tolist()], load_pocket()
    [logits] = model.extend([model.new_cache(len(row))], [row], every=True)
    for at, (token, logprob, best) in enumerate(
        zip(done.ids.tolist(), done.logprobs, done.channels["top_logprobs"], strict=True)
    ):
        place = len(PROMPT) + at
        expected = np.array(reference(logits[place - 1], PROMPT.tolist(), row[len(PROMPT) : place], sampling))
        assert float(logprob) == pytest.approx(np.log(expected[token]), abs=1e-4)
        likeliest = [one for one in np.argsort(-expected, kind="stable")[:5].tolist() if expected[one]]
        assert [one for one, _ in best] == likeliest
        assert token not in likeliest or dict(best)[token] == float(logprob)
        np.testing.assert_allclose([value for _, value in best], np.log(expected[likeliest]), atol=1e-4)


# -- how completions end


@in_loop
async def test_limits_stop_tokens_and_stop_texts_end_a_completion() -> None:
    """With a stop text, the last id is the one that completes it."""
    token_bytes = RENDERER.tokenizer.vocabulary.token_bytes
    async with embedded() as engine:
        short = await engine.generate(PROMPTS[0], params(max_tokens=3, stop_token_ids=()))
        stopped = await engine.generate(PROMPTS[0], params(stop_token_ids=(int(short.ids[1]),)))
        whole = await engine.generate(PROMPT, params(temperature=0))
        text = b"".join(map(token_bytes, whole.ids.tolist())).decode()
        stop = text[7:14]  # spans several tokens, and starts inside one
        assert text.count(stop) == 1
        sampling = params(temperature=0, stop=("never", stop))
        streamed = joined([delta async for delta in engine.stream(PROMPT, sampling)])
        cut = await engine.generate(PROMPT, sampling)
        never = await engine.generate(PROMPT, params(temperature=0, stop=["never"]))
    assert (len(short.ids), short.finish_reason) == (3, FinishReason.LENGTH)
    assert (int(stopped.ids[-1]), stopped.finish_reason) == (int(short.ids[1]), FinishReason.STOP)
    assert len(stopped.ids) <= 2
    count = len(cut.ids)
    assert 1 < count < len(whole.ids)
    assert cut.ids.tolist() == whole.ids[:count].tolist()
    assert (cut.finish_reason, cut.stopped_by) == (FinishReason.STOP, stop)
    before, through = (b"".join(map(token_bytes, ids)).decode() for ids in (cut.ids[:-1].tolist(), cut.ids.tolist()))
    assert stop in through
    assert stop not in before
    assert (streamed.stopped_by, streamed.ids.tolist()) == (stop, cut.ids.tolist())
    same(never, whole)
    assert never.stopped_by is None


@in_loop
async def test_an_aborted_request_returns_its_tokens_and_affects_no_other() -> None:
    async with embedded() as engine:
        victim = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS, request_id="victim"))
        other = asyncio.create_task(engine.generate(PROMPTS[1], params(), request_id="other"))
        async for _ in engine.stream(PROMPTS[2], params(max_tokens=5, stop_token_ids=())):
            pass
        await engine.abort("victim")
        await engine.abort("nobody")
        assert (await victim).finish_reason is FinishReason.ABORT
        assert 1 <= len((await victim).ids) < 400
        same(await other, await engine.generate(PROMPTS[1], params()))


@in_loop
async def test_a_paused_engine_samples_nothing_until_it_is_resumed() -> None:
    async with embedded() as engine:
        await engine.pause()
        task = asyncio.create_task(engine.generate(PROMPTS[0], params()))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not task.done()
        await asyncio.gather(engine.resume(), engine.pause(), engine.resume())
        assert (await task).finish_reason is FinishReason.STOP


@in_loop
async def test_impossible_requests_and_requests_to_a_closed_engine_are_refused() -> None:
    async with embedded() as engine:
        for prompt in ([], [4096], [-1], [1] * 4090):
            with pytest.raises(EngineRefusal):
                await engine.generate(prompt, params())
        waiting = asyncio.create_task(engine.generate(PROMPTS[0], ENDLESS))
        await asyncio.sleep(0)
        await engine.close()
        for request in (waiting, engine.generate(PROMPTS[0], params())):
            with pytest.raises(EngineError):
                await request


def test_an_engine_keeps_its_state_across_event_loops() -> None:
    engine = EmbeddedEngine()

    async def ask() -> Completion:
        return await asyncio.wait_for(engine.generate(PROMPTS[0], params(), session="a"), 60)

    async def pause_midway() -> None:
        await anext(engine.stream(PROMPTS[1], ENDLESS))
        await engine.pause()

    async def resume() -> Completion:
        await asyncio.wait_for(engine.resume(), 60)
        return await ask()

    first, second = asyncio.run(ask()), asyncio.run(ask())
    same(first, second)
    assert second.cached_tokens == len(PROMPTS[0]) - 1, "caches belong to no event loop"
    asyncio.run(pause_midway())
    same(first, asyncio.run(resume()))
    asyncio.run(asyncio.wait_for(engine.close(), 60))


# -- new weights

LONG = SamplingParams(12, seed=5)
NORM = "model.norm.weight"


@cache
def other_weights() -> dict[str, Any]:
    """Pocket's weights, each changed by a few percent."""
    rng = np.random.default_rng(1)
    weights = read_safetensors(POCKET / "model.safetensors")
    return {name: (one * rng.normal(1, 0.05, one.shape)).astype(np.float32) for name, one in weights.items()}


@cache
def other_model() -> PocketModel:
    return PocketModel(json.loads((POCKET / "config.json").read_text(encoding="utf-8")), other_weights())


class Tensor:
    """A minimal torch tensor, whose numbers must be fetched from a device."""

    def __init__(self, array: Any) -> None:
        self._array = array

    def detach(self) -> Tensor:
        return self

    cpu = float = detach

    def numpy(self) -> Any:
        return self._array


def save(folder: Path, weights: dict[str, Any], shards: int = 2) -> Path:
    """Save safetensors in several files, as for large models."""
    folder.mkdir()
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


SOURCES: dict[str, Callable[[Path], Any]] = {
    "folder": lambda path: save(path / "saved", other_weights()),
    "path": lambda path: str(save(path / "saved", other_weights())),
    "arrays": lambda _: other_weights(),
    "tensors": lambda _: {name: Tensor(one) for name, one in other_weights().items()},
    "with its head": lambda _: other_weights() | {"lm_head.weight": other_weights()["model.embed_tokens.weight"]},
}


@pytest.mark.parametrize("kind", SOURCES)
@in_loop
async def test_requests_after_an_update_are_sampled_with_the_new_weights(kind: str, tmp_path: Path) -> None:
    async with embedded(version=1) as engine:
        before = await engine.generate(PROMPT, LONG)
        await engine.update_weights(SOURCES[kind](tmp_path), version=2)
        assert engine.version == 2
        after = await engine.generate(PROMPT, LONG)
    np.testing.assert_allclose(before.logprobs, scored(load_pocket(), PROMPT, before.ids), atol=1e-4)
    np.testing.assert_allclose(after.logprobs, scored(other_model(), PROMPT, after.ids), atol=1e-4)
    assert np.abs(after.logprobs - scored(load_pocket(), PROMPT, after.ids)).max() > 0.05
    assert (before.versions, after.versions) == ((VersionSpan(1, 0, 12),), (VersionSpan(2, 0, 12),))


@pytest.mark.parametrize("update", [True, False])
@in_loop
async def test_a_prefix_computed_with_the_old_weights_is_not_reused(update: bool) -> None:
    async with embedded() as engine:
        first = await engine.generate(PROMPT, LONG, session="one")
        await (engine.update_weights(other_weights(), version=2) if update else engine.reset_prefix_cache())
        longer = np.concatenate((PROMPT, first.ids, PROMPT[1:]))
        second = await engine.generate(longer, LONG, session="one")
    assert second.cached_tokens == 0
    model = other_model() if update else load_pocket()
    np.testing.assert_allclose(second.logprobs, scored(model, longer, second.ids), atol=1e-4)


@in_loop
async def test_a_running_request_is_recomputed_and_has_the_version_of_each_token() -> None:
    pieces: list[Delta] = []
    async with embedded(version="old") as engine:
        async for piece in engine.stream(PROMPT, LONG):
            pieces.append(piece)
            if len(pieces) == 5:
                await engine.pause()
                await engine.update_weights(other_weights(), version="new")
                await engine.resume()
    done = joined(pieces)
    old, new = done.versions
    assert (old.version, new.version, old.stop, new.stop) == ("old", "new", new.start, 12)
    assert 5 <= old.stop < 12
    for part, model in ((slice(0, old.stop), load_pocket()), (slice(old.stop, 12), other_model())):
        np.testing.assert_allclose(done.logprobs[part], scored(model, PROMPT, done.ids)[part], atol=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        lambda weights: {name: one for name, one in weights.items() if name != NORM},
        lambda weights: weights | {"model.lora.weight": weights[NORM]},
        lambda weights: weights | {NORM: weights[NORM][:-1]},
        lambda weights: weights | {NORM: weights[NORM] * np.nan},
        lambda weights: weights | {"lm_head.weight": weights["model.embed_tokens.weight"] * 2},
        lambda weights: "/no/such/folder",
        lambda weights: 7,
    ],
)
@in_loop
async def test_weights_that_do_not_fit_are_refused_and_the_old_ones_remain(change: Any) -> None:
    async with embedded(version=1) as engine:
        with pytest.raises(EngineError):
            await engine.update_weights(change(other_weights()), version=2)
        done = await engine.generate(PROMPT, LONG)
    np.testing.assert_allclose(done.logprobs, scored(load_pocket(), PROMPT, done.ids), atol=1e-4)
    assert done.versions == (VersionSpan(1, 0, 12),)
