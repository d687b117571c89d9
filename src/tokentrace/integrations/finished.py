"""What trainers take of a rollout that has ended, whoever ran it: an agent of ours, or one behind the gateway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..rollout.ends import FAILED_ENDS
from ..rollout.patience import Patience
from ..rollout.record import Rollout, Task
from ..samples.sample import Sample
from ..samples.trajectories import trajectory_samples


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A rollout that has ended: its rows, and what rewards and logs want to know."""

    samples: Sequence[Sample]
    """One for each branch that has sampled tokens; none where nothing was sampled."""
    messages: Sequence[Mapping[str, Any]]
    """The whole conversation, prompt included."""
    prompt: int
    """How many of the messages were given."""
    reward: float | None
    """None where nobody gave one, and for rollouts that failed."""
    metrics: Mapping[str, Any]
    """``end`` says why it ended; for rollouts of an `Agent` all of `Rollout.metrics`."""
    notes: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        """Whether it says nothing of the model: it failed (`FAILED_ENDS`), or nothing was sampled."""
        return not self.samples or self.metrics.get("end") in FAILED_ENDS


class Runs(Protocol):
    """What runs rollouts: an `Agent`, a `GatewayAgent`, or anything else with such a method."""

    async def run(
        self, task: Task, *, seed: int | None = None, patience: Patience | None = None
    ) -> Rollout | Finished: ...


async def finish(agent: Runs, task: Task, *, seed: int | None, patience: Patience | None) -> Finished:
    """Run a task to its end."""
    ended = await agent.run(task, seed=seed, patience=patience)
    if isinstance(ended, Finished):
        return ended
    metrics = ended.metrics()
    rows = trajectory_samples(ended.trajectory) if ended.trajectory.num_sampled else []
    return Finished(rows, ended.messages, len(task.messages), metrics["reward"], metrics, ended.notes)
