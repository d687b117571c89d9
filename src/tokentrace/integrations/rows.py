"""What trainers take from a rollout: rows, or prompt and response."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import SampleError
from ..rollout.ends import FAILED_ENDS
from ..rollout.patience import Patience
from ..rollout.record import Rollout, Task
from ..samples.sample import IGNORE, Sample
from ..samples.trajectories import trajectory_samples
from ..tokens.ids import check_ids, check_integers
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import PENALTIES, LogprobKind


@dataclass(frozen=True, slots=True, eq=False)
class FinishedRollout:
    samples: Sequence[Sample]
    """A row for each branch with sampled tokens."""
    messages: Sequence[Mapping[str, Any]]
    prompt: int
    reward: float | None
    """None without a reward, and for failed rollouts."""
    metrics: Mapping[str, Any]
    """``end`` says why it ended."""
    notes: Sequence[str] = ()

    @property
    def failed(self) -> bool:
        return not self.samples or self.metrics.get("end") in FAILED_ENDS


class Runs(Protocol):
    """Runs rollouts: an `Agent`, a `GatewayAgent`, or your own class."""

    async def run(
        self, task: Task, *, seed: int | None = None, patience: Patience | None = None
    ) -> Rollout | FinishedRollout: ...


async def finish(
    agent: Runs, task: Task, *, seed: int | None, patience: Patience | None
) -> FinishedRollout:
    """Run a task to its end."""
    ended = await agent.run(task, seed=seed, patience=patience)
    if isinstance(ended, FinishedRollout):
        return ended
    metrics = ended.metrics()
    rows = trajectory_samples(ended.trajectory) if ended.trajectory.num_sampled else []
    return FinishedRollout(
        rows, ended.messages, len(task.messages), metrics["reward"], metrics, ended.notes
    )


class PromptResponse(NamedTuple):
    """A row in two parts. The response goes from the first sampled token to the last one with loss.

    `response_logprobs` are 0.0 where nothing was sampled; None if not requested.
    """

    prompt_ids: list[int]
    response_ids: list[int]
    response_mask: list[int]
    response_logprobs: list[float] | None


def prompt_response(sample: Sample, *, logprobs: bool = True) -> PromptResponse:
    """Raises SampleError if a row has no loss, or lacks `logprobs`."""
    sample = without_tail(sample)
    first = int(sample.completions[0].start if sample.completions else sample.mask.argmax())
    values = filled_logprobs(sample)[first:].tolist() if logprobs else None
    ids, mask = sample.token_ids, sample.mask[first:].astype(int).tolist()
    return PromptResponse(ids[:first], ids[first:], mask, values)


def without_tail(sample: Sample) -> Sample:
    """A row up to its last token with loss. Raises SampleError if none has."""
    trained = np.flatnonzero(sample.mask)
    if not len(trained):
        raise SampleError(f"{sample!r} has no token with loss, so there is no response")
    return sample.slice(0, int(trained[-1]) + 1)


def filled_logprobs(sample: Sample) -> npt.NDArray[np.float32]:
    """Return logprobs, 0.0 where nothing was sampled. Raises SampleError if one is missing."""
    if sample.logprobs is None:
        raise SampleError(f"{sample!r} has no logprobs, but this trainer needs them")
    missing = np.flatnonzero(sample.mask & ~np.isfinite(sample.logprobs))
    if len(missing):
        raise SampleError(f"{sample!r}: token {missing[0]} carries loss and has no logprob")
    return np.nan_to_num(sample.logprobs, nan=0.0)


def warn_of_other_distribution(sample: Sample, trainer: str) -> None:
    """Warn if the trainer has another distribution."""
    changed = {
        f"{name} {value:g}"
        for completion in sample.completions
        if completion.logprobs_kind is LogprobKind.PROCESSED and completion.temperature != 0
        for name, off in {"top_p": 1.0, "top_k": 0, "min_p": 0.0, **PENALTIES}.items()
        if (value := getattr(completion, name)) not in (None, off)
    }
    if changed:
        what = f"rows were sampled with {' and '.join(sorted(changed))}, which {trainer} does not apply"
        warnings.warn(f"{what}: importance ratios will not be 1", stacklevel=3)


def rows_of(trajectory: Trajectory, *, several: bool) -> list[Sample]:
    """The rows, or the only one. Raises SampleError for none, or several if one is needed."""
    samples, name = trajectory_samples(trajectory), trajectory.name or "the trajectory"
    if not samples:
        raise SampleError(f"{name}: nothing was sampled, so there is no row")
    if len(samples) > 1 and not several:
        raise SampleError(
            f"{name} has {len(samples)} rows: its history was rewritten; this trainer takes one row"
        )
    return samples


def only_sample(trajectory: Trajectory) -> Sample:
    """The only row. Raises SampleError if there is none, or several."""
    return rows_of(trajectory, several=False)[0]


def reward_of(rollout: Rollout) -> float:
    """Raises SampleError if there is no reward."""
    if rollout.reward is None:
        raise SampleError(f"rollout {rollout.task.name!r} has no reward: give the agent a reward function")
    return rollout.reward


def failed_row(rollout: Rollout, failed_reward: float | None, trainer: str) -> PromptResponse | None:
    """A row without loss for a rollout that failed or sampled nothing; None for any other.

    Its response is the last token of the prompt. Raises SampleError without a `failed_reward`.
    """
    failed, trajectory = rollout.end in FAILED_ENDS, rollout.trajectory
    if not failed and trajectory.num_sampled:
        return None
    if failed_reward is None:
        what = "failed" if failed else "ended before anything was sampled"
        problem = f"rollout {rollout.task.name!r} {what} ({'; '.join([str(rollout.end), *rollout.notes])})"
        raise SampleError(f"{problem}; {trainer} needs a row for each: pass a failed_reward")
    ids = trajectory.stream().tolist() if trajectory.num_branches else []
    ids = ids if len(ids) > 1 else [0, 0]
    return PromptResponse(ids[:-1], ids[-1:], [0], [0.0])


def ids_and_mask(row: Mapping[str, Any]) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
    """A row's ids and mask. Raises SampleError if they are missing or do not match."""
    if row.get("input_ids") is None:
        raise SampleError(f"a row has no input_ids; it has {', '.join(row)}")
    ids = check_ids(row["input_ids"], "input_ids", error=SampleError)
    present = {name: row[name] for name in ("labels", "loss_mask") if row.get(name) is not None}
    for name, values in present.items():
        if len(values) != len(ids):
            raise SampleError(f"a row has {len(ids)} ids, but {len(values)} entries in {name}")
    if not present:
        raise SampleError("a row has neither labels nor loss_mask: every token would be trained")
    masks: list[npt.NDArray[np.bool_]] = []
    if "labels" in present:
        labels = check_integers(present["labels"], "labels", SampleError)
        masks.append(labels != IGNORE)
        if (labels[masks[0]] != ids[masks[0]]).any():
            raise SampleError("the labels of a row differ from its ids: they must not be shifted")
    if "loss_mask" in present:
        mask = np.asarray(present["loss_mask"])
        if not np.isin(mask, (0, 1)).all():
            raise SampleError("a loss_mask must be 0 or 1 for each token")
        masks.append(mask.astype(np.bool_))
    if (masks[0] != masks[-1]).any():
        raise SampleError("the labels and the loss_mask of a row do not agree")
    return ids, masks[0]
