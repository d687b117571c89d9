"""Interactions: simulated users, who answer what the model says until they have heard enough."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Reply:
    """What a simulated user says next; `done` ends the rollout, and then nothing is said."""

    content: str = ""
    done: bool = False
    reward: float = 0.0
    metrics: Mapping[str, Any] = field(default_factory=dict)


class BaseInteraction:
    """A simulated user: `start_interaction` once for each trajectory, `generate_response` after each answer of the
    model, at the end `calculate_score` and `finalize_interaction`. One object serves all trajectories.
    """

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        self.config = dict(config or {})

    @property
    def name(self) -> str:
        return str(self.config.get("name", type(self).__name__))

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Begin a trajectory. `kwargs` are what its task has for the interaction."""

    async def generate_response(self, instance_id: str, messages: Sequence[Mapping[str, Any]], **kwargs: Any) -> Any:
        """What the user says to the last message: a `Reply`, a string, None to end, or a quadruple of whether to end,
        text, reward and metrics."""
        raise NotImplementedError

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the whole trajectory, or None."""
        return None

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """End a trajectory."""


def as_reply(answer: Any) -> Reply:
    """What `generate_response` returned, as a reply."""
    if isinstance(answer, Reply):
        return answer
    if answer is None:
        return Reply(done=True)
    if isinstance(answer, tuple) and len(answer) == 4:
        done, content, reward, metrics = answer
        return Reply(str(content or ""), bool(done), float(reward or 0.0), dict(metrics or {}))
    return Reply(str(answer))
