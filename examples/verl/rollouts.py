"""verl's agent loop worker runs a tokentrace agent; its batch of tensors has exactly the sampled ids.

Needs verl (`pip install "verl==0.9.1"`), and neither a GPU nor a server: pocket stands in for verl's servers.
"""

import asyncio
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from tokentrace import create_renderer
from tokentrace.engines import EmbeddedEngine, SamplingParams
from tokentrace.pocket import POCKET

QUESTIONS = ["What is 17 * 23 + 4?", "What is 2 + 2?", "What is 91 - 8 * 3?"]
AGENTS = Path(__file__).with_name("agents.yaml")


class Pocket:
    """Stands in for verl's ``LLMServerClient``: ids in, ids and logprobs out."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **_: Any
    ) -> TokenOutput:
        """Sample with the requested length, temperature and stop tokens."""
        params = {name: sampling_params[name] for name in ("max_tokens", "temperature")}
        stops = tuple(sampling_params["stop_token_ids"])
        out = await self.engine.generate(prompt_ids, SamplingParams(**params, stop_token_ids=stops), session=request_id)
        return TokenOutput(token_ids=out.ids.tolist(), log_probs=out.logprobs.tolist(), stop_reason="completed")


async def main() -> None:
    """Run the questions, and print the trained part of each response."""
    agent = "actor_rollout_ref.rollout.agent"
    settings = [
        f"actor_rollout_ref.model.path={POCKET}",
        "actor_rollout_ref.rollout.name=vllm",
        f"{agent}.agent_loop_config_path={AGENTS}",
        f"{agent}.default_agent_loop=tokentrace",
    ]
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer", settings)
    engine = EmbeddedEngine(seed=1)
    prompts = np.empty(len(QUESTIONS), dtype=object)
    prompts[:] = [[{"role": "user", "content": question}] for question in QUESTIONS]
    rows = DataProto.from_dict({"dummy_tensor": torch.zeros(len(QUESTIONS), 1)}, non_tensors={"raw_prompt": prompts})
    batch = await AgentLoopWorker(config, Pocket(engine)).generate_sequences(rows)
    await engine.close()
    tokenizer = create_renderer(POCKET).tokenizer
    for ids, mask, logprobs in zip(
        batch.batch["responses"], batch.batch["response_mask"].bool(), batch.batch["rollout_log_probs"], strict=True
    ):
        print(f"{int(mask.sum())} sampled, mean logprob {float(logprobs[mask].mean()):.3f}:")
        print(repr(tokenizer.decode(ids[mask].tolist())))


if __name__ == "__main__":
    asyncio.run(main())
