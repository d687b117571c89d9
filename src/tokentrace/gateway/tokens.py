"""Ids in, ids and logprobs out, as in vLLM's ``/inference/v1/generate``. Pure."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct

from ..engines.channels import TOP_LOGPROBS
from ..engines.protocol import Delta
from ..tokens.ids import check_ids
from . import requests as wire
from .dialect import OPENAI_END, Dialect, Head, ItemChange, Reply, StreamEvent
from .requests import NOTHING_READ, ReadHistory, Request, TokenFields

_MOST = 10_000_000
_REFUSED: wire.Refused = {
    **{name: reason for name, reason in wire.REFUSED.items() if name != "stop_token_ids"},
    "n": ((1,), "only one completion per request is supported"),
    "stop": (([], ""), "stop texts are not supported here (use stop_token_ids)"),
}


class _Sampling(wire.SamplingBody):
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    stop_token_ids: list[Any] | None = None


class TokensBody(Struct):
    token_ids: Annotated[list[Any], Meta(min_length=1, max_length=_MOST)]
    sampling_params: _Sampling | None = None
    model: str | None = None
    stream: bool | None = None
    stream_options: wire.StreamOptions | None = None
    return_token_ids: bool | None = None


def read_tokens(raw: Any, headers: Mapping[str, str], past: ReadHistory = NOTHING_READ) -> Request:
    body = wire.convert(raw, TokensBody)
    sampling = body.sampling_params or _Sampling()
    wire.refuse(raw.get("sampling_params") or {}, _REFUSED)
    with wire.naming_fields():
        ids = check_ids(body.token_ids, "token_ids")
        stop_ids = check_ids(sampling.stop_token_ids or [], "sampling_params.stop_token_ids")
    ignored = wire.ignored_fields(raw, body, "request_id", "cache_salt", "priority")
    return Request(
        messages=(),
        prompt_ids=ids,
        stop_token_ids=tuple(stop_ids.tolist()),
        model=body.model or "",
        max_tokens=sampling.max_tokens,
        sampling=wire.sampling_of(sampling, "sampling_params."),
        stream=bool(body.stream),
        ignored=tuple(name for name in ignored if name.rpartition(".")[2] not in _REFUSED),
        answer=wire.AnswerOptions(
            logprobs=max(0, (sampling.logprobs or 0) - 1),
            usage_in_stream=bool(body.stream_options and body.stream_options.include_usage),
            token_fields=(TokenFields.VLLM,) if body.return_token_ids else (),
        ),
    )


class Tokens(Dialect):
    name = "tokens"
    history = ""
    end = OPENAI_END
    read = staticmethod(read_tokens)

    def __init__(self, head: Head) -> None:
        super().__init__(head)
        self._prompt: Mapping[str, Any] = self.prompt_fields

    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]:
        [reply] = replies
        choice = {**_choice(reply.completion), **_ending(reply)}
        return {**self._event(choice), "usage": self.usage(replies).openai()}

    def feed(self, choice: int, changes: Sequence[ItemChange], delta: Delta | None) -> list[StreamEvent]:
        if delta is None or not len(delta.ids):
            return []
        return [self._event({**_choice(delta), "finish_reason": None})]

    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        [reply] = replies
        events = [self._event({"index": 0, "token_ids": [], "logprobs": None, **_ending(reply)})]
        if self.options.usage_in_stream:
            events.append({**self._event(), "usage": self.usage(replies).openai()})
        return events

    def _event(self, *choices: dict[str, Any]) -> StreamEvent:
        prompt, self._prompt = self._prompt, {}
        return {"request_id": self.head.id, "choices": list(choices), **prompt}


def _choice(delta: Delta) -> dict[str, Any]:
    top = delta.channels.get(TOP_LOGPROBS) or [()] * len(delta.ids)
    sampled = zip(delta.ids.tolist(), delta.logprobs.tolist(), top, strict=True)
    content = [
        {
            "token_id": id,
            "token": f"token_id:{id}",  # renderers' client reads this; vLLM 0.32 has only token_id
            "logprob": logprob,
            "top_logprobs": [
                {"token_id": int(alternative), "logprob": float(value), "rank": rank}
                for rank, (alternative, value) in enumerate(alternatives, 1)
            ],
        }
        for id, logprob, alternatives in sampled
    ]
    return {"index": 0, "token_ids": delta.ids.tolist(), "logprobs": {"content": content}}


def _ending(reply: Reply) -> dict[str, Any]:
    spans = reply.completion.versions
    reason = str(reply.completion.finish_reason)
    versions = [{"version": version, "start": start, "end": stop} for version, start, stop in spans]
    return {"finish_reason": reason, "stop_reason": None, "weight_versions": versions or None}
