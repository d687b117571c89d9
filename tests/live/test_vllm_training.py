"""What trainers need of vLLM, tested on a real server: stop texts, new weights, groups. ``make test-vllm``."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engines.test_embedded import RENDERER, STOPS, save
from tests.live.live import Recorder, gap, prompts
from tests.live.test_vllm import CLOSE, PYTHON, both_paths, connected
from tests.live.vllm_server import vllm_server
from tests.loop import in_loop
from tokentrace.engines.protocol import FinishReason, SamplingParams, joined
from tokentrace.pocket import POCKET
from tokentrace.pocket.model import PocketModel, load_pocket, read_safetensors

TOKEN_BYTES = RENDERER.tokenizer.vocabulary.token_bytes


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    assert PYTHON
    scratch = tmp_path_factory.mktemp("vllm")
    with vllm_server(PYTHON, POCKET, scratch, "--logprobs-mode=processed_logprobs") as address:
        yield address


@both_paths
@in_loop
async def test_a_stop_text_keeps_all_ids_and_is_reported(url: str, closed: Any) -> None:
    prompt, greedy = prompts()[0], {"max_tokens": 60, "temperature": 0, "stop_token_ids": STOPS}
    async with connected(url, Recorder(closed)) as engine:
        whole = await engine.generate(prompt, SamplingParams(**greedy))
        stop = b"".join(map(TOKEN_BYTES, whole.ids.tolist())).decode()[5:12]
        sampling = SamplingParams(**greedy, stop=["never", stop, "</think>"])
        streamed = joined([piece async for piece in engine.stream(prompt, sampling)])
        cut = await engine.generate(prompt, sampling)
    assert cut.finish_reason is FinishReason.STOP
    assert cut.stopped_by is not None
    assert cut.ids.tolist() == streamed.ids.tolist() == whole.ids[: len(cut.ids)].tolist()
    assert streamed.stopped_by == cut.stopped_by
    texts = [b"".join(map(TOKEN_BYTES, ids.tolist())).decode() for ids in (cut.ids[:-1], cut.ids)]
    assert [cut.stopped_by in text for text in texts] == [False, True]


@in_loop
async def test_a_request_during_a_weight_update_has_logprobs_of_both(url: str, tmp_path: Path) -> None:
    """The embedding does not change: vLLM 0.32 on CPUs does not reload a head that is tied to it."""
    rng = np.random.default_rng(1)
    weights = {
        name: tensor if "embed" in name else (tensor * rng.normal(1, 0.05, tensor.shape)).astype(np.float32)
        for name, tensor in read_safetensors(POCKET / "model.safetensors").items()
    }
    folder = save(tmp_path / "new", weights, shards=1)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(POCKET / name, folder / name)
    config = json.loads((POCKET / "config.json").read_text(encoding="utf-8"))
    old, new = load_pocket(), PocketModel(config, weights)
    prompt, sampling = [4065, *rng.integers(10, 4000, 60).tolist()], SamplingParams(300, seed=3)  # no clear answer

    pieces = []
    async with connected(url) as engine:
        try:
            await engine.set_version("old")
            async for piece in engine.stream(prompt, sampling):
                pieces.append(piece)
                if len(pieces) == 4:
                    await engine.update_weights(folder, version=7)
                    assert (engine.version, await engine.is_paused()) == ("7", False)
            after = await engine.generate(prompt, SamplingParams(20, seed=4))
        finally:
            await engine.update_weights(POCKET, version="old")
    across = joined(pieces)
    first, second = across.versions
    assert (first.version, second.version, first.stop) == ("old", "7", second.start)
    scores = [model.score([*prompt, *across.ids.tolist()])[len(prompt) - 1 :] for model in (old, new)]
    print(f"largest differences: {gap(across.logprobs[: first.stop], scores[0][: first.stop]):.1e}, ", end="")
    print(f"{gap(across.logprobs[first.stop :], scores[1][first.stop :]):.1e}")
    assert gap(across.logprobs[: first.stop], scores[0][: first.stop]) < CLOSE
    assert gap(across.logprobs[first.stop :], scores[1][first.stop :]) < CLOSE
    assert gap(across.logprobs[first.stop :], scores[0][first.stop :]) > 10 * CLOSE
    assert gap(after.logprobs, new.score([*prompt, *after.ids.tolist()])[len(prompt) - 1 :]) < CLOSE
    assert [span.version for span in after.versions] == ["7"]


@in_loop
async def test_requests_of_a_group_share_the_cached_prompt(url: str) -> None:
    prompt = np.random.default_rng(5).integers(10, 4000, 300).tolist()
    async with connected(url) as engine:
        requests = (engine.generate(prompt, SamplingParams(2, seed=at), group="g") for at in range(8))
        cached = sorted(completion.cached_tokens or 0 for completion in await asyncio.gather(*requests))
    print(f"cached of 300: {cached}")
    assert cached == [0, *[288] * 7], "whole blocks of 32, for all but the first"
