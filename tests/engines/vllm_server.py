"""What the tests of the vLLM engine share: a fake server, an engine on it, and answers with something changed."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from tests.engines.support import RECORDINGS, Fake, Model, Reply, recording
from tokentrace.engines.protocol import Capabilities
from tokentrace.engines.vllm import COMPLETIONS, GENERATE, VLLMEngine

TINY = Capabilities("vllm", model="tiny", max_length=4096, vocab_size=1024, streams=True, aborts=True, pauses=True)
FLAT = np.linspace(0.0, -2.0, 64)
SURE = np.linspace(0.0, -1e9, 64)


def engine(fake: Fake, **options: Any) -> VLLMEngine:
    return VLLMEngine(fake.connection(), TINY, **options)


def with_choice(**changes: Any) -> Any:
    answer = recording("vllm_generate")["response"]
    answer["choices"][0] |= changes
    return answer


def content(*rows: tuple[Any, Any]) -> Any:
    return {"content": [{"token_id": one, "logprob": value} for one, value in rows]}


def served(fake: Fake, *, mode: str = "processed", native: bool = True, logits: Any = FLAT, seed: int = 0) -> Fake:
    """As vLLM 0.32 is: with ``logprobs: 1`` it tells of the sampled token alone, with ``2`` also of the likeliest."""
    model = Model(mode, logits, seed)

    def told(body: Any, most: int) -> tuple[int, Any, list[int]]:
        params = body.get("sampling_params", body)
        drawn, logprobs, ranked = model.told(params["temperature"], params["top_k"])
        return drawn, logprobs, [drawn, *(one for one in ranked[: params["logprobs"]] if one != drawn)][:most]

    def generate(body: Any) -> Any:
        drawn, logprobs, shown = told(body, body["sampling_params"]["logprobs"])
        ranks = (-logprobs).argsort(kind="stable").argsort(kind="stable") + 1
        rows = [{"token_id": one, "logprob": logprobs[one], "rank": int(ranks[one])} for one in shown]
        answer = with_choice(token_ids=[drawn], weight_versions=[{"version": "default", "start": 0, "end": 1}])
        answer["choices"][0]["logprobs"] = {"content": [rows[0] | {"top_logprobs": rows}]}
        return answer

    def completions(body: Any) -> Any:
        drawn, logprobs, shown = told(body, 99)
        answer = recording("vllm_completions_ids")["response"]
        tops = [{f"token_id:{one}": logprobs[one] for one in shown}]
        logprobs = {"tokens": [f"token_id:{drawn}"], "token_logprobs": [logprobs[drawn]], "top_logprobs": tops}
        answer["choices"][0] |= {"token_ids": [drawn], "logprobs": logprobs}
        return answer

    disabled = (RECORDINGS / "vllm_generate_disabled_403.txt").read_bytes()
    fake.on("/version", {"version": "0.32.0"})
    fake.on("/v1/models", {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 4096}]})
    fake.on(GENERATE, generate if native else Reply([disabled.split(b"\n")[0]], 403))
    return fake.on(COMPLETIONS, completions)


def connect(fake: Fake, **options: Any) -> Capabilities:
    async def run() -> Capabilities:
        return (await VLLMEngine.connect(fake.connection(), **options)).capabilities

    return asyncio.run(run())
