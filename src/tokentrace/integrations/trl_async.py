"""A rollout worker for TRL's `AsyncGRPOTrainer`."""

import asyncio
import dataclasses
import itertools
import queue
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..engines.protocol import Engine
from ..errors import InputError, SampleError
from ..rollout.batch import grouped
from ..rollout.calling import together
from ..rollout.record import Task
from ..samples.batches import token_versions
from ..samples.sample import Sample
from .rows import FinishedRollout, filled_logprobs
from .trl import TrainerRollouts, check_temperature

try:
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample
except ImportError as error:
    raise ImportError("this needs TRL's AsyncGRPO: pip install 'trl>=1.16'") from error

_NOTHING = "a group of rollouts sampled nothing and gives no samples"


@dataclass(eq=False)
class RolloutWorker(TrainerRollouts):
    """A `rollout_worker` for `AsyncGRPOTrainer`: groups of rollouts of an agent.

    Repeats the tasks, `num_generations` of each, `groups` groups at a time, while fewer than
    `waiting` samples are in the buffer. With `weights_to`, pass `weight_transfer=worker` to the
    trainer, too: that engine gets its weights, and samples record their version.
    """

    tasks: Iterable[Task]
    _: KW_ONLY
    num_generations: int
    temperature: float = 1.0
    groups: int = 4
    waiting: int = 256

    def __post_init__(self) -> None:
        self._tasks = list(self.tasks)
        if not self._tasks:
            raise InputError("there are no tasks to run")
        self.rollout_buffer = queue.Queue[Any]()
        self.metrics_queue = queue.Queue[dict[str, float]]()
        self.model_version, self._moved, self._why = 0, time.monotonic(), ""
        self._running: Future[Any] | None = None

    def start(self) -> None:
        self._moved, numbers = time.monotonic(), itertools.count()
        self._running = self.loop.start(together(self._run_groups(numbers) for _ in range(self.groups)))

    def stop(self) -> None:
        """Cancel all rollouts. Samples stay in the buffer."""
        if self._running is not None:
            self._running.cancel()

    def update_model_version(self, model_version: int) -> None:
        self.model_version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise the error that ended the work, or TimeoutError if there are no samples."""
        if self._running is not None and self._running.done():
            self._running.result()
        idle = time.monotonic() - self._moved
        if idle > stale_after_s and self.rollout_buffer.empty():
            why = f" ({self._why})" if self._why else ""
            raise TimeoutError(f"no group of rollouts has produced samples for {idle:.0f} s{why}")

    def init_weight_transfer(self) -> None:
        """Nothing to set up."""

    def pause(self) -> None:
        self.loop.run(self._updated().pause())

    def send_weights(self, iterator: Iterable[tuple[str, Any]]) -> None:
        """Send weights, with the next version."""
        weights = dict(iterator)
        self.loop.run(self._updated().update_weights(weights, version=self.model_version + 1))

    def resume(self) -> None:
        self.loop.run(self._updated().resume())

    def destroy(self) -> None:
        """Close the engine and the loop."""
        self.close()

    def _updated(self) -> Engine:
        if self.weights_to is None:
            raise InputError("this worker was made with weights_to=None: leave weight_transfer to TRL")
        return self.weights_to

    async def _run_groups(self, numbers: Iterator[int]) -> None:
        while True:
            while self.rollout_buffer.qsize() >= self.waiting:
                self._moved = time.monotonic()
                await asyncio.sleep(0.05)
            number, began = next(numbers), self.model_version
            task = self._tasks[number % len(self._tasks)]
            named = dataclasses.replace(task, name=f"{task.name or 'grpo'}-{number:06d}")
            members = itertools.count(number * self.num_generations)
            finished = await together(map(self.finish, members, grouped([named], self.num_generations)))
            if self.done is not None:
                self.done(finished)
            version = began if self.weights_to is None else None
            samples = rollout_samples(finished, group=number, version=version, temperature=self.temperature)
            self._warn_of(finished, samples)
            for sample in samples:
                self.rollout_buffer.put(sample)
                self._moved = time.monotonic()

    def _warn_of(self, finished: Sequence[FinishedRollout], samples: Sequence[Any]) -> None:
        if any(one.reward is not None for one in finished) and samples:
            return
        what = "no rollout of a group has a reward, so all have an advantage of 0" if samples else _NOTHING
        why = "; ".join(finished[0].notes) or f"it ended with {finished[0].metrics.get('end')}"
        self._why = f"{what}: {why}"
        warnings.warn(self._why, stacklevel=2)


def rollout_samples(
    finished: Sequence[FinishedRollout], *, group: int, version: int | None = None, temperature: float = 1.0
) -> list[RolloutSample]:
    """A sample for each row of a group, with advantages as TRL computes them.

    TRL drops samples by `model_version`: `version`, or the oldest one that sampled a trained
    token.
    """
    rewards = np.asarray([np.nan if one.reward is None else one.reward for one in finished], float)
    scored = rewards[~np.isnan(rewards)]
    mean, deviation = (scored.mean(), scored.std()) if len(scored) else (np.nan, np.nan)
    advantages = np.nan_to_num((rewards - mean) / (deviation + 1e-8), nan=0.0)
    samples = []
    for one, reward, advantage in zip(finished, rewards, advantages, strict=True):
        for row in one.samples:
            check_temperature(row, temperature)
            versions = _versions(row) if version is None else np.asarray([version])
            newest = versions.max()
            metrics = {"reward": reward, "reward_std": deviation, "rollout/rows": len(one.samples)}
            metrics |= {"version/newest": newest, "version/older_tokens": (versions < newest).mean()}
            samples.append(
                RolloutSample(
                    prompt=list(map(dict, one.messages[: one.prompt])),
                    completion=list(map(dict, one.messages[one.prompt :])),
                    input_ids=row.ids.astype(np.int64),
                    completion_mask=row.mask.astype(np.int64),
                    old_log_probs=np.where(row.mask, filled_logprobs(row), 0).astype(np.float32),
                    advantage=float(advantage),
                    model_version=int(versions.min()),
                    group_id=group,
                    metrics={name: float(value) for name, value in metrics.items()},
                    enqueued_at=time.time(),
                )
            )
    return samples


def _versions(row: Sample) -> npt.NDArray[np.int64]:
    trained = token_versions(row)[row.mask]
    if (trained < 0).any():
        raise SampleError(f"{row!r}: the engine gives no number for the weights that sampled it")
    return trained
