"""verl's inference servers as an engine: what `server_manager.generate` takes and returns."""

from __future__ import annotations

from typing import Any, Final

from ..engines.answers import EngineReply
from ..engines.protocol import Capabilities, EngineAnswerError, FinishReason, GenerateRequest, SamplingParams
from ..engines.scripted import CallbackEngine
from ..trajectory.turns import PENALTIES, LogprobKind, VersionSpan

_ABORTED: Final = ("aborted", "abort")
_ADDED_UP: Final = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
OPTIONAL: Final = ("min_p", *PENALTIES)
"""Sampling parameters that verl's servers take beside those that all engines take."""


def logprob_kind(rollout: Any) -> LogprobKind:
    """The distribution of the servers' logprobs, by verl's ``actor_rollout_ref.rollout``."""
    name, mode = rollout.get("name"), rollout.get("logprobs_mode")
    if name == "vllm" and mode == "processed_logprobs":
        return LogprobKind.PROCESSED
    if name == "vllm" and mode == "raw_logprobs":
        return LogprobKind.RAW
    return LogprobKind.SCALED if name == "sglang" else LogprobKind.UNKNOWN


class ServerEngine(CallbackEngine):
    """verl's servers for one rollout, with the settings ``actor_rollout_ref.rollout``.

    All its requests go to one of them, where their prefix is cached.
    """

    def __init__(
        self, server_manager: Any, request_id: str, rollout: Any, *, vocab_size: int, priority: int = 0
    ) -> None:
        kind, optional = logprob_kind(rollout), frozenset(OPTIONAL)
        capabilities = Capabilities("verl", vocab_size=vocab_size, logprobs=kind, versions=True, sampling=optional)
        super().__init__(self._ask, capabilities)
        self.answers: list[Any] = []
        """verl's ``TokenOutput`` of each request."""
        self._servers = server_manager
        self._request_id = request_id
        self._priority = priority
        self._seed_field = "sampling_seed" if rollout.get("name") == "sglang" else "seed"

    async def _ask(self, request: GenerateRequest) -> EngineReply:
        sampling = request.sampling
        answer = await self._servers.generate(
            request_id=self._request_id,
            prompt_ids=list(map(int, request.prompt_ids)),
            sampling_params={
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "repetition_penalty": 1.0,
                **{name: getattr(sampling, name) for name in sampling.optional},
                **({} if sampling.seed is None else {self._seed_field: sampling.seed}),
                "logprobs": True,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": list(sampling.stop_token_ids),
            },
            priority=self._priority,
        )
        if not len(answer.token_ids) and answer.stop_reason not in _ABORTED:
            raise EngineAnswerError("verl's server returned no ids; its log may say why")
        self.answers.append(answer)
        cached = answer.extra_fields.get("num_cached_tokens")
        return EngineReply(answer.token_ids, answer.log_probs, _finish(answer, sampling), _versions(answer), cached)

    @property
    def num_preempted(self) -> int:
        """How often the requests were preempted, or -1 if no server reports it."""
        reported = [answer.num_preempted for answer in self.answers if answer.num_preempted is not None]
        return sum(reported) if reported else -1

    @property
    def routed_experts(self) -> Any:
        """The experts of every position, from the last request that reports them."""
        reported = [answer.routed_experts for answer in self.answers if answer.routed_experts is not None]
        return reported[-1] if reported else None

    def extra_fields(self) -> dict[str, Any]:
        """The extra fields of the first request, with the last version of the weights, and sums."""
        if not self.answers:
            return {}
        fields = [answer.extra_fields for answer in self.answers]
        merged = dict(fields[0])
        if (last := fields[-1].get("max_global_steps")) is not None:
            merged["max_global_steps"] = last
        merged |= {key: sum(int(one.get(key, 0)) for one in fields) for key in _ADDED_UP if key in merged}
        return merged


def _finish(answer: Any, sampling: SamplingParams) -> FinishReason:
    """vLLM's ``completed`` is a stop or the end of the budget; SGLang says which."""
    ids = answer.token_ids
    if answer.stop_reason in _ABORTED:
        return FinishReason.ABORT
    if ids[-1] in sampling.stop_token_ids:
        return FinishReason.STOP
    is_cut = answer.stop_reason == "length" or len(ids) == sampling.max_tokens
    return FinishReason.LENGTH if is_cut else FinishReason.STOP


def _versions(answer: Any) -> tuple[VersionSpan, ...]:
    """The global step of the weights; none if there were several, since verl does not say where they changed."""
    fields = answer.extra_fields
    first = fields.get("min_global_steps", fields.get("global_steps"))
    last = fields.get("max_global_steps", fields.get("global_steps"))
    if first is None or first != last or not len(answer.token_ids):
        return ()
    return (VersionSpan(int(first), 0, len(answer.token_ids)),)
