"""slime: rollouts as its `Sample`s, and a function for ``--custom-generate-function-path``.

slime gives the sample to fill, so nothing of it is imported here. A rollout whose history was rewritten makes several
samples, as slime wants them: siblings that share a ``rollout_id``, each sampled token with loss in one of them.

In a module that slime can import, named by ``--custom-generate-function-path my_agent.generate``::

    renderer = create_renderer("path/to/model")

    async def make_agent(args, sampling):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}"
        return Agent(await SGLangEngine.connect(url, vocab_size=...), renderer, sampling=sampling, tools=[...])

    generate = generate_function(make_agent)
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

from ..engines.protocol import SamplingParams
from ..errors import SampleError
from ..rollout.ends import FAILED_ENDS, End
from ..rollout.loop import Agent
from ..rollout.record import Rollout, Task
from ..samples.trajectories import trajectory_samples
from ..trajectory.trajectory import Trajectory
from .rows import filled_logprobs, prompt_response
from .sampling import sampling_of


def slime_samples(
    trajectory: Trajectory, like: Any, *, reward: float | None = None, status: str = "completed", response: str = ""
) -> list[Any]:
    """The rows of a trajectory as copies of a slime sample: one for each branch that has sampled tokens.

    `like` is the sample that slime gave; what it says of the prompt, the group and the label is kept. `response` is
    text for reward models and logs. `SampleError` where a token that carries loss has no logprob.
    """
    shared = like.rollout_id if like.rollout_id is not None else like.index
    made = []
    for sample in trajectory_samples(trajectory):
        filled_logprobs(sample)  # refuses rows without
        row = prompt_response(sample)
        made.append(
            dataclasses.replace(
                like,
                rollout_id=shared,
                tokens=row.prompt_ids + row.response_ids,
                response=response,
                response_length=len(row.response_ids),
                loss_mask=row.response_mask,
                rollout_log_probs=row.response_logprobs,
                reward=reward,
                weight_versions=[str(span.version) for span in sample.versions if span.version is not None],
                status=type(like).Status(status),
                metadata={**like.metadata, "branch": sample.branch},
            )
        )
    return made


def rollout_samples(rollout: Rollout, like: Any) -> list[Any]:
    """A rollout as slime's samples. One that failed is marked so and trains nothing (``remove_sample``)."""
    last = rollout.messages[-1].get("content")
    made = slime_samples(
        rollout.trajectory,
        like,
        reward=rollout.reward,
        status=_status(rollout.end),
        response=last if isinstance(last, str) else "",
    )
    if rollout.end not in FAILED_ENDS and made:
        return made
    failed = made or [dataclasses.replace(like, status=type(like).Status(_status(rollout.end)))]
    notes = {"tokentrace": "; ".join(rollout.notes)}
    return [dataclasses.replace(one, remove_sample=True, metadata={**one.metadata, **notes}) for one in failed]


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
) -> Callable[..., Awaitable[Any]]:
    """The function that slime calls for each sample.

    `make_agent` is given slime's arguments and the sampling parameters, each time: keep engine and renderer between
    calls. A sample that has a response already is a SampleError.
    """

    async def generate(args: Any, sample: Any, sampling_params: dict[str, Any], evaluation: bool = False) -> Any:
        if sample.response_length:
            raise SampleError("the sample has a response already: partial rollouts of slime are not continued here")
        made = make_agent(args, sampling_of(sampling_params))
        agent = await made if inspect.isawaitable(made) else made
        rows = rollout_samples(await agent.run(task(sample)), sample)
        return rows[0] if len(rows) == 1 else rows

    return generate
