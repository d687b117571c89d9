"""Agents' rollouts for TRL's `GRPOTrainer`, and a collator for rows."""

import asyncio
import dataclasses
import functools
import inspect
import itertools
import threading
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, TypeVar

import numpy as np

from ..engines.protocol import Engine
from ..errors import InputError, SampleError, brief
from ..rollout.batch import rollout_seed
from ..rollout.calling import together
from ..rollout.patience import Patience
from ..rollout.record import Task
from ..samples.batches import collate
from ..samples.sample import Sample
from .rows import (
    FinishedRollout,
    PromptResponse,
    Runs,
    finish,
    ids_and_mask,
    prompt_response,
    warn_of_other_distribution,
)

Result = TypeVar("Result")


class BackgroundLoop:
    """Runs coroutines in its own thread. Connect engines in this loop too."""

    def __init__(self) -> None:
        self._loop, self._closing = asyncio.new_event_loop(), asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="tokentrace-loop", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._closing.wait())

    def start(self, work: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop.is_closed():
            work.close()
            raise InputError("the loop is closed: create a new one")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Ctrl-C cancels the coroutine."""
        future = self.start(work)
        try:
            return future.result()
        finally:
            future.cancel()

    def close(self) -> None:
        """Cancel all coroutines and end the thread."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()


@dataclass(eq=False)
class TrainerRollouts:
    """Runs an agent's rollouts for a trainer without asyncio."""

    agent: Runs
    _: KW_ONLY
    weights_to: Engine | None
    done: Callable[[Sequence[FinishedRollout]], None] | None = None
    patience: Patience = field(default_factory=Patience)
    seed: int | None = None
    loop: BackgroundLoop = field(default_factory=BackgroundLoop)

    async def finish(self, number: int, task: Task) -> FinishedRollout:
        """Run a task with a seed derived from its number."""
        return await finish(self.agent, task, seed=rollout_seed(self.seed, number), patience=self.patience)

    def close(self) -> None:
        if self.weights_to is not None:
            self.loop.run(self.weights_to.close())
        self.loop.close()


def _task(prompt: Any) -> Task:
    if not isinstance(prompt, list):
        raise InputError(f"a prompt must be a list of messages, not {brief(prompt)}: pass task=")
    return Task(prompt)


def _only(rows: Sequence[Sample]) -> Sample:
    problem = f"{rows[0].name or 'a rollout'} has {len(rows)} rows: its history was rewritten"
    raise SampleError(f"{problem}; GRPOTrainer takes one: choose with one_of=, or use AsyncGRPOTrainer")


@dataclass(eq=False)
class RolloutFunction(TrainerRollouts):
    """A `rollout_func` for `GRPOTrainer`: each prompt becomes one rollout of an agent, and one row.

    - `weights_to`: the engine that gets the trainer's weights when they change; None if TRL
      updates it.
    - `task`: makes a `Task` from a prompt that is no list of messages.
    - `one_of`: chooses a row if a rewritten history gives several, which is a SampleError
      otherwise.

    Reward functions also get ``messages`` and ``rollout`` (a `FinishedRollout` per row). TRL leaves
    out a failed rollout only if all return None: see `rollout_reward`, `unless_failed`.
    """

    _: KW_ONLY
    task: Callable[[Any], Task] = _task
    one_of: Callable[[Sequence[Sample]], Sample] = _only
    concurrency: int = 64

    def __post_init__(self) -> None:
        self._started = 0
        self._sent: tuple[Any, int] = (None, -1)

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        _check_trainer(trainer)
        ranks, rank = trainer.accelerator.num_processes, trainer.accelerator.process_index
        numbers = [(self._started + at) * ranks + rank for at in range(len(prompts))]
        self._started += len(prompts)
        finished = self.loop.run(self._run(numbers, self._tasks(prompts, numbers), trainer))
        if self.done is not None:
            self.done(finished)
        _warn_of_scored_failures(finished, trainer)
        rows = [self._row(one, trainer) for one in finished]
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.response_ids for row in rows],
            "logprobs": [row.response_logprobs for row in rows],
            "env_mask": [row.response_mask for row in rows],
            "messages": [list(one.messages) for one in finished],
            "rollout": finished,
        }

    def _tasks(self, prompts: Sequence[Any], numbers: Sequence[int]) -> list[Task]:
        """Adjacent equal prompts form a group."""
        tasks: list[Task] = []
        for _, group in itertools.groupby(prompts):
            name = f"grpo-{numbers[len(tasks)]:06d}"
            for member, prompt in enumerate(group):
                task = self.task(prompt)
                about = {**task.metadata, "group": name, "member": member}
                title = f"{task.name or 'grpo'}-{numbers[len(tasks)]:06d}"
                tasks.append(dataclasses.replace(task, name=title, metadata=about))
        return tasks

    async def _run(
        self, numbers: Sequence[int], tasks: Sequence[Task], trainer: Any
    ) -> list[FinishedRollout]:
        state, step = trainer.state, trainer.state.global_step
        before, at = self._sent
        if self.weights_to is not None and not (before is state and at == step):
            await self.weights_to.update_weights(_weights(trainer), version=step)
            self._sent = (state, step)
        room = asyncio.Semaphore(self.concurrency)

        async def one(number: int, task: Task) -> FinishedRollout:
            async with room:
                return await self.finish(number, task)

        return await together(map(one, numbers, tasks))

    def _row(self, finished: FinishedRollout, trainer: Any) -> PromptResponse:
        if not finished.samples:
            why = "; ".join(finished.notes) or str(finished.metrics.get("end"))
            warnings.warn(f"a rollout sampled nothing, so its row carries no loss: {why}", stacklevel=4)
            pad = trainer.processing_class.pad_token_id
            return PromptResponse([pad], [pad], [0], [0.0])
        row = finished.samples[0] if len(finished.samples) == 1 else self.one_of(finished.samples)
        check_temperature(row, trainer.args.temperature)
        warn_of_other_distribution(row, "TRL")
        return prompt_response(row)


_UNREAD = ("top_p", "top_k", "min_p", "repetition_penalty", "generation_kwargs")
"""Settings of TRL's own generation."""


def _check_trainer(trainer: Any) -> None:
    if getattr(trainer, "tools", None):
        raise InputError("TRL would run the tools of tools= after the agent: give them only to the agent")
    for one in dataclasses.fields(trainer.args):
        if one.name in _UNREAD and getattr(trainer.args, one.name) != one.default:
            raise InputError(f"{one.name} of the trainer's config has no effect: set it in SamplingParams")


def check_temperature(row: Sample, temperature: float) -> None:
    """Raise SampleError if the trainer has another temperature."""
    for completion in row.completions:
        if completion.temperature not in (None, temperature):
            both = f"{completion.temperature:g}, but the trainer's is {temperature:g}"
            raise SampleError(f"{row!r} was sampled at temperature {both}: set the same for both")


def _weights(trainer: Any) -> dict[str, Any]:
    if trainer.accelerator.num_processes > 1:
        how = "connect the agent to TRL's vLLM server (use_vllm=True), and pass weights_to=None"
        raise InputError(f"weights_to is for one process: {how}")
    return dict(trainer.accelerator.unwrap_model(trainer.model).state_dict())


_MARK = "leaves_out_failed_rollouts"


def unless_failed(reward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a TRL reward function, plain or async, to return None for failed rollouts."""
    if not callable(reward):
        raise InputError(f"unless_failed takes a reward function, not {brief(reward)}")

    def judged(rewards: Sequence[Any], rollout: Sequence[FinishedRollout]) -> list[Any]:
        return [None if one.failed else score for one, score in zip(rollout, rewards, strict=True)]

    async def awaited(*, rollout: Sequence[FinishedRollout], **arguments: Any) -> list[Any]:
        return judged(await reward(rollout=rollout, **arguments), rollout)

    def plain(*, rollout: Sequence[FinishedRollout], **arguments: Any) -> list[Any]:
        return judged(reward(rollout=rollout, **arguments), rollout)

    waits = inspect.iscoroutinefunction(reward) or inspect.iscoroutinefunction(type(reward).__call__)
    scored: Callable[..., Any] = functools.update_wrapper(awaited if waits else plain, reward)
    scored.__name__ = getattr(reward, "__name__", type(reward).__name__)  # its name in TRL's logs
    scored.__dict__[_MARK] = True
    return scored


@unless_failed
def rollout_reward(rollout: Sequence[FinishedRollout], **_: Any) -> list[float | None]:
    """The agent's reward; None for failed rollouts."""
    return [one.reward for one in rollout]


def _warn_of_scored_failures(finished: Sequence[FinishedRollout], trainer: Any) -> None:
    failed = sum(one.failed for one in finished)
    rewards = zip(trainer.reward_funcs, trainer.reward_func_names, strict=True)
    scoring = [name for reward, name in rewards if not getattr(reward, _MARK, False)]
    if failed and scoring:
        problem = f"{failed} of {len(finished)} rollouts failed and are trained, as functions score them"
        warnings.warn(f"{problem}: {', '.join(scoring)}; wrap them in unless_failed", stacklevel=3)


_EXTRAS = ("logprobs", "advantages")


@dataclass(frozen=True, slots=True)
class Collator:
    """Collates rows like `SFTTrainer`, with positions, logprobs and advantages."""

    pad_id: int
    multiple_of: int | None = None

    def __call__(self, rows: Sequence[Sample | Mapping[str, Any]]) -> dict[str, Any]:
        samples = [row if isinstance(row, Sample) else _sample(row) for row in rows]
        batch = collate(samples, pad_id=self.pad_id, multiple_of=self.multiple_of, tensors="torch")
        names = ("input_ids", "attention_mask", "position_ids", "labels", *_EXTRAS)
        return {name: batch[name] for name in names if name in batch}


def _sample(row: Mapping[str, Any]) -> Sample:
    if not isinstance(row, Mapping):
        raise SampleError(f"a row must be a Sample or a mapping of columns, not {brief(row)}")
    if "seq_lengths" in row:
        raise SampleError("these rows are packed: leave SFTTrainer's own collator in place")
    ids, mask = ids_and_mask(row)
    try:
        extras: Any = {
            name: np.asarray(row[name], np.float32) for name in _EXTRAS if row.get(name) is not None
        }
    except (TypeError, ValueError, OverflowError) as error:
        raise SampleError(f"the logprobs or advantages of a row are not numbers: {error}") from error
    return Sample(ids, mask, np.full(len(ids), -1, np.int32), np.zeros(len(ids), np.uint8), **extras)
