"""Helpers for TRL tests: pocket as a trainer's model and as an engine, and hooks that record the loss's inputs."""

import functools
from pathlib import Path
from typing import Any

from tests.integrations.rollouts import calculator
from tests.lazy import lazy
from tokentrace import Agent, Budget, EmbeddedEngine, create_renderer
from tokentrace.pocket import POCKET

torch, trl, datasets = lazy("torch"), lazy("trl"), lazy("datasets")

PROMPTS = [[{"role": "user", "content": f"What is {a} * {b}?"}] for a, b in ((17, 23), (41, 12), (86, 37), (29, 58))]
QUIET = {
    "use_cpu": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "model_init_kwargs": {"dtype": "float32"},
    "save_strategy": "no",
    "report_to": [],
    "disable_tqdm": True,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
}


def pocket_agent(engine: EmbeddedEngine, **settings: Any) -> Agent:
    """An agent with a calculator; fewer tokens give a higher reward."""
    defaults: dict[str, Any] = {"tools": [calculator], "budget": Budget(turns=3, turn_tokens=64)}
    defaults["reward"] = lambda rollout: -rollout.trajectory.num_sampled / 100
    return Agent(engine, create_renderer(POCKET), **{**defaults, **settings})


@functools.cache
def hooked_grpo() -> Any:
    class HookedGRPO(trl.GRPOTrainer):
        """Records the inputs of the loss, and the model's logprobs of the completions at that time."""

        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            self.batches: list[dict[str, torch.Tensor]] = []

        def compute_loss(self, model: Any, inputs: Any, **settings: Any) -> Any:
            batch = {name: value.clone() for name, value in inputs.items() if isinstance(value, torch.Tensor)}
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with torch.no_grad():
                batch["logps"] = completion_logps(model, ids, attention, batch["completion_ids"].size(1))
            self.batches.append(batch)
            return super().compute_loss(model, inputs, **settings)

    return HookedGRPO


def completion_logps(model: Any, ids: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
    """The log-probability of each of the last ids, computed without TRL."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits[:, :-1].float()
    logps = torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])[..., 0]
    return logps[:, -count:]


def grpo(folder: Path, rollouts: Any, rewards: Any, *, prompts: Any = PROMPTS, **settings: Any) -> Any:
    config: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 2, "max_steps": 2, **QUIET}
    return hooked_grpo()(
        str(POCKET),
        reward_funcs=rewards,
        args=trl.GRPOConfig(output_dir=str(folder), **{**config, **settings}),
        train_dataset=datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts]),
        rollout_func=rollouts,
    )
