"""OpenRLHF: rollouts as what an `AgentExecutor` returns, and an executor that runs our agents on its vLLM engine.

In the file that ``--train.agent_func_path`` names::

    from tokentrace.integrations.openrlhf import AgentExecutorOf

    def make_agent(engine, sampling):
        return Agent(engine, renderer, sampling=sampling, tools=[...], reward=...)

    class AgentExecutor(AgentExecutorOf):
        make_agent = staticmethod(make_agent)
"""

from __future__ import annotations

import copy
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from ..engines.answers import answered_ids, answered_logprobs, checked_request, completion_kind
from ..engines.protocol import Capabilities, Delta, Engine, EngineAnswerError, FinishReason, GenerateRequest
from ..engines.protocol import SamplingParams as Sampling
from ..errors import InputError
from ..rollout.loop import Agent
from ..rollout.record import Rollout, Task
from ..tokens.ids import runs
from ..trajectory.turns import LogprobKind
from .rows import failed_row, filled_logprobs, only_sample, reward_of, without_tail
from .sampling import sampling_of

try:
    from openrlhf.utils.agent import AgentExecutorBase
except ImportError as error:
    raise ImportError("this needs OpenRLHF: pip install openrlhf") from error

_READ: Final = (
    *("temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop", "stop_token_ids", "seed", "n"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
)
"""Of vLLM's sampling parameters those that change what is sampled."""


def executed(rollout: Rollout, prompt: str, label: Any, *, failed_reward: float | None = None) -> dict[str, Any]:
    """A rollout as OpenRLHF takes it: the whole sequence, the ranges that carry loss, and logprobs, which are 0.0 where
    nothing was sampled.

    One row a rollout: `SampleError` where its history was rewritten, and where it has no reward. So is one that failed
    or where nothing was sampled, unless `failed_reward` says what to count it as; it is then its prompt, with no range
    that carries loss.
    """
    failed = failed_row(rollout, failed_reward, "OpenRLHF")
    if failed is not None:
        ids, ranges, reward = failed.prompt_ids + failed.response_ids, [], failed_reward
        logprobs = [0.0] * len(ids)
    else:
        sample, reward = without_tail(only_sample(rollout.trajectory)), reward_of(rollout)
        ids, ranges, logprobs = sample.token_ids, runs(sample.mask), filled_logprobs(sample).tolist()
    return {
        "prompt": prompt,
        "label": label,
        "images": None,
        "mm_train_inputs": None,
        "observation_tokens": ids,
        "action_ranges": ranges,
        "rollout_log_probs": logprobs,
        "truncated": failed is None and rollout.per_turn[-1].finish_reason == "length",
        "reward": reward,
        "scores": reward,
        "extra_logs": {"turns": rollout.turns, "tool_calls": rollout.use.calls, "failed": int(failed is not None)},
    }


class VLLMOfTheTrainer(Engine):
    """The vLLM engine that OpenRLHF hands to an executor. It samples with what the agent asks for, turn by turn; of the
    trainer's parameters only what is not about sampling is kept."""

    def __init__(self, engine: Any, params: Any, max_length: int) -> None:
        if getattr(params, "logprobs", None) is None:
            raise InputError("OpenRLHF does not ask vLLM for logprobs: turn on its importance sampling correction")
        super().__init__(Capabilities("openrlhf", max_length=max_length, logprobs=LogprobKind.UNKNOWN))
        self._engine, self._params = engine, params

    async def _stream(self, request: GenerateRequest) -> AsyncGenerator[Delta]:
        request = checked_request(request, self.capabilities)
        params = copy.deepcopy(self._params)
        asked = request.sampling
        params.max_tokens, params.min_tokens, params.seed = asked.max_tokens, 0, asked.seed
        params.temperature, params.top_p, params.top_k = asked.temperature, asked.top_p, asked.top_k or -1
        params.stop_token_ids = list(asked.stop_token_ids)
        answer = await self._engine.generate([int(id) for id in request.prompt_ids], params, multi_modal_data=None)
        [output] = answer.outputs
        ids = answered_ids(list(output.token_ids), "token_ids", None)
        told = output.logprobs or []
        if len(told) != len(ids) or not all(int(id) in one for id, one in zip(ids, told, strict=True)):
            raise EngineAnswerError("vLLM did not tell the logprob of each id that it sampled")
        found = [one[int(id)].logprob for id, one in zip(ids, told, strict=True)]
        logprobs = answered_logprobs(found, ids, "logprobs")
        finish = FinishReason(output.finish_reason) if output.finish_reason else FinishReason.ABORT
        yield Delta(ids, logprobs, finish, logprobs_kind=completion_kind(asked, self.capabilities))


class AgentExecutorOf(AgentExecutorBase):
    """An executor that runs our agents. A subclass named ``AgentExecutor`` gives it a `make_agent`.

    The prompt has to come as it is in the dataset, without a chat template (OpenRLHF applies one only if told to).
    `task` may be overridden where it is not a user's message.
    """

    make_agent: Callable[[Engine, Sampling], Agent]
    failed_reward: float | None = None

    def task(self, prompt: str, label: Any) -> Task:
        """What to do for a prompt; the label is in the task's metadata, where rewards find it."""
        return Task([{"role": "user", "content": prompt}], metadata={"label": label})

    async def execute(
        self,
        prompt: str,
        label: Any,
        sampling_params: Any,
        max_length: int,
        hf_tokenizer: Any,
        llm_engine: Any,
        images: Any = None,
    ) -> dict[str, Any]:
        """One rollout, as OpenRLHF takes it. Images are refused."""
        if images:
            raise InputError("images are not supported here")
        given = {name: getattr(sampling_params, name) for name in _READ if hasattr(sampling_params, name)}
        given["max_tokens"] = given.get("max_tokens") or max_length
        agent = self.make_agent(VLLMOfTheTrainer(llm_engine, sampling_params, max_length), sampling_of(given))
        rollout = await agent.run(self.task(prompt, label))
        return executed(rollout, prompt, label, failed_reward=self.failed_reward)
