"""slime: rollouts as its `Sample`s, and a function for ``--custom-generate-function-path``.

slime gives the sample to fill, so nothing of it is imported here. A rollout whose history was rewritten makes several
samples, as slime wants them: siblings that share a ``rollout_id``, each sampled token with loss in one of them.

In a module that slime can import, named by ``--custom-generate-function-path my_agent.generate``::

    renderer = create_renderer("path/to/model")

    async def make_agent(args, sampling):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        return Agent(await SGLangEngine.connect(url, vocab_size=...), renderer, sampling=sampling, tools=[...])

    generate = generate_function(make_agent, failed_reward=0.0)

with ``--dynamic-sampling-filter-path tokentrace.integrations.slime.whole_groups``, so that a group with a rollout that
failed is sampled again and not trained.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from ..engines.protocol import SamplingParams
from ..errors import SampleError
from ..rollout.ends import FAILED_ENDS, End
from ..rollout.loop import Agent
from ..rollout.record import Rollout, Task
from ..samples.trajectories import trajectory_samples
from ..trajectory.trajectory import Trajectory
from .rows import PromptResponse, failed_row, filled_logprobs, prompt_response
from .sampling import sampling_of


def slime_samples(
    trajectory: Trajectory, like: Any, *, reward: float | None = None, status: str = "completed", response: str = ""
) -> list[Any]:
    """The rows of a trajectory as copies of a slime sample: one for each branch that has sampled tokens.

    `like` is the sample that slime gave; what it says of the prompt, the group and the label is kept. `response` is
    text for reward models and logs. `SampleError` where a token that carries loss has no logprob.
    """
    made = []
    for sample in trajectory_samples(trajectory):
        filled_logprobs(sample)  # refuses rows without
        about = {**like.metadata, "branch": sample.branch}
        versions = [str(span.version) for span in sample.versions if span.version is not None]
        more = {"response": response, "weight_versions": versions, "metadata": about}
        made.append(_filled(like, prompt_response(sample), reward, status, **more))
    return made


def rollout_samples(rollout: Rollout, like: Any, *, failed_reward: float | None = None) -> list[Any]:
    """A rollout as slime's samples, whose response is what the model said last.

    One that failed, or where nothing was sampled, is a `SampleError`, unless `failed_reward` says what to count it as:
    it is one sample then, marked so, that trains nothing (``remove_sample``). Its reward still counts in the mean of
    its group, unless `whole_groups` leaves the group out.
    """
    status = _status(rollout.end)
    failed = failed_row(rollout, failed_reward, "slime")
    if failed is None:
        return slime_samples(rollout.trajectory, like, reward=rollout.reward, status=status, response=rollout.answer)
    # without a reward slime's reward model would be asked, or, where it was aborted, nobody
    about = {**like.metadata, "tokentrace": "; ".join(rollout.notes)}
    return [_filled(like, failed, failed_reward, status, remove_sample=True, metadata=about)]


def whole_groups(args: Any, group: Sequence[Any], **_: Any) -> bool:
    """Whether no rollout of a group failed, for ``--dynamic-sampling-filter-path``: slime samples another group then.

    Without it, a rollout that failed counts in the mean reward of its group, as whatever it was counted as.
    """
    rows = [one for each in group for one in (each if isinstance(each, list) else [each])]
    return not any(one.remove_sample for one in rows)


def _filled(like: Any, row: PromptResponse, reward: float | None, status: str, **more: Any) -> Any:
    """A copy of a slime sample with a row in it. The samples of a rollout have its ``rollout_id`` in common."""
    return dataclasses.replace(
        like,
        rollout_id=like.rollout_id if like.rollout_id is not None else like.index,
        tokens=row.prompt_ids + row.response_ids,
        response_length=len(row.response_ids),
        loss_mask=row.response_mask,
        rollout_log_probs=row.response_logprobs,  # slime sends nobody's where the first sample has none
        reward=reward,
        status=type(like).Status(status),
        **more,
    )


def _status(end: End | None) -> str:
    if end in (End.ANSWER, End.USER):
        return "completed"
    if end is End.ABORT:
        return "aborted"
    return "failed" if end in FAILED_ENDS else "truncated"


def sample_task(sample: Any) -> Task:
    """What a slime sample asks for: its prompt, text or messages, with its label and metadata for rewards."""
    prompt = sample.prompt
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return Task(messages, metadata={**sample.metadata, "label": sample.label})


def generate_function(
    make_agent: Callable[[Any, SamplingParams], Agent | Awaitable[Agent]],
    *,
    task: Callable[[Any], Task] = sample_task,
    failed_reward: float | None = None,
) -> Callable[..., Awaitable[Any]]:
    """The function that slime calls for each sample.

    `make_agent` is given slime's arguments and the sampling parameters, each time: keep engine and renderer between
    calls. A sample that has a response already is a SampleError. `failed_reward` is that of `rollout_samples`.
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        if sample.response_length:
            raise SampleError("the sample has a response already: partial rollouts of slime are not continued here")
        made = make_agent(args, sampling_of(sampling_params))
        agent = await made if inspect.isawaitable(made) else made
        rows = rollout_samples(await agent.run(task(sample)), sample, failed_reward=failed_reward)
        return rows[0] if len(rows) == 1 else rows

    return generate
