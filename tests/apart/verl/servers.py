"""Stand-ins for verl's servers: pocket in this process, behind verl's `generate` interface."""

import textwrap
from pathlib import Path
from typing import Any, NamedTuple

import hydra
import numpy as np
import torch
from omegaconf import DictConfig
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.workers.rollout.replica import TokenOutput

from tokentrace.engines import EmbeddedEngine, FinishReason, SamplingParams
from tokentrace.pocket import POCKET
from tokentrace.rollout import Rollout


class PocketServers:
    """Has the `generate` of verl's ``LLMServerClient``: takes ids, returns a ``TokenOutput`` like its vLLM server."""

    def __init__(self, step: int = 3) -> None:
        self.engine = EmbeddedEngine(seed=7)
        self.requests: list[dict[str, Any]] = []
        self.step = step

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        self.requests.append({"request_id": request_id, "prompt_ids": prompt_ids, **sampling_params, **kwargs})
        settings = dict(sampling_params)
        assert settings.pop("logprobs") is True
        assert settings.pop("repetition_penalty") == 1.0
        settings["top_k"] = max(settings["top_k"], 0)
        settings["stop_token_ids"] = tuple(settings["stop_token_ids"])
        done = await self.engine.generate(prompt_ids, SamplingParams(**settings), session=request_id)
        steps = {"global_steps": self.step, "min_global_steps": self.step, "max_global_steps": self.step}
        return TokenOutput(
            token_ids=done.ids.tolist(),
            log_probs=[float(one) for one in done.logprobs],
            stop_reason="aborted" if done.finish_reason is FinishReason.ABORT else "completed",
            num_preempted=0,
            extra_fields={**steps, "num_cached_tokens": done.cached_tokens},
        )


def trainer_config(*overrides: str) -> DictConfig:
    """The configuration of verl's PPO trainer, with pocket as the model."""
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        return hydra.compose(
            "ppo_trainer",
            [
                f"actor_rollout_ref.model.path={POCKET}",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
                "data.max_prompt_length=512",
                "data.max_response_length=384",
                *overrides,
            ],
        )


def batch_of(questions: list[str], **columns: list[Any]) -> DataProto:
    """Rows in the format that verl's trainer passes to an agent loop worker."""
    rows = {
        "raw_prompt": [[{"role": "user", "content": question}] for question in questions],
        "uid": [f"uid-{at}" for at in range(len(questions))],
        "data_source": ["pocket"] * len(questions),
        "reward_model": [{"style": "rule", "ground_truth": str(at)} for at in range(len(questions))],
        "extra_info": [{"index": at} for at in range(len(questions))],
        "tools_kwargs": [{}] * len(questions),
        "interaction_kwargs": [{}] * len(questions),
        "index": list(range(len(questions))),
        **columns,
    }
    arrays = {}
    for name, values in rows.items():
        arrays[name] = np.empty(len(values), dtype=object)
        arrays[name][:] = values
    dummy = torch.zeros(len(questions), 1, dtype=torch.uint8)
    return DataProto.from_dict(tensors={"dummy_tensor": dummy}, non_tensors=arrays)


TOOL = '''
from tokentrace.demo.calculator import calculate


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return calculate(expression)


def reverse(text: str) -> str:
    """Write a text backwards."""
    return text[::-1]
'''
"""A user's tools, in a file beside their YAML."""


LISTED = """
tools:
  - function: ./calc.py:calculator
  - function: ./calc.py:reverse
"""


JUDGE = "reward: tests.apart.verl.servers:remember"


class Done(NamedTuple):
    """A batch from verl's worker, with its rollouts, servers and configuration."""

    batch: DataProto
    seen: dict[str, Rollout]
    """The rollouts by the row's uid."""
    servers: PocketServers
    config: DictConfig


async def rollouts(
    folder: Path, questions: list[str], *overrides: str, loop: str = JUDGE, servers: Any = None, **columns: list[Any]
) -> Done:
    """Run questions with verl's ``AgentLoopWorker`` and our loop from a YAML file; `loop` is added to its entry."""
    (folder / "calc.py").write_text(TOOL, encoding="utf-8")
    (folder / "tools.yaml").write_text(LISTED, encoding="utf-8")
    entry = f"""
- name: tokentrace
  _target_: tokentrace.integrations.verl.TokentraceAgentLoop
{textwrap.indent(loop if "tools_file" in loop else f"tools_file: {folder}/tools.yaml{chr(10)}{loop}", "  ")}
"""
    (folder / "agents.yaml").write_text(entry, encoding="utf-8")
    agent = "actor_rollout_ref.rollout.agent"
    config = trainer_config(
        f"{agent}.agent_loop_config_path={folder}/agents.yaml", f"{agent}.default_agent_loop=tokentrace", *overrides
    )
    servers = servers or PocketServers()
    SEEN.clear()
    try:
        batch = await AgentLoopWorker(config, servers).generate_sequences(batch_of(questions, **columns))
    finally:
        await servers.engine.close()
    return Done(batch, dict(SEEN), servers, config)


SEEN: dict[str, Rollout] = {}
"""The rollouts that `remember` has seen, by the row's uid."""


def remember(rollout: Rollout) -> float:
    """A reward function that also records the rollout."""
    SEEN[rollout.task.metadata["uid"]] = rollout
    return 1.0 / (1 + rollout.turns)
