"""What `RolloutFunction` reads of a trainer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from tokentrace.integrations.trl import rollout_reward


@dataclasses.dataclass
class Config:
    """The settings of `GRPOConfig` that a rollout function looks at."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    repetition_penalty: float = 1.0
    generation_kwargs: dict[str, Any] | None = None


def trainer(step: int = 0, processes: int = 1, rewards: Any = (rollout_reward,), tools: Any = None, **args: Any) -> Any:
    """A trainer with this configuration, that trains one weight."""
    return SimpleNamespace(
        reward_funcs=rewards,
        reward_func_names=[reward.__name__ for reward in rewards],
        args=Config(**args),
        tools=tools,
        state=SimpleNamespace(global_step=step),
        processing_class=SimpleNamespace(pad_token_id=4064),
        accelerator=SimpleNamespace(num_processes=processes, process_index=0, unwrap_model=lambda model: model),
        model=SimpleNamespace(state_dict=lambda: {"weights": 0}),
    )
