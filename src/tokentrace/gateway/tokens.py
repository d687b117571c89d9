"""The token-level endpoint: ids in, ids and logprobs out, as vLLM's ``/inference/v1/generate`` has them. Pure.

For agents that render for themselves. Nothing is matched by meaning: a prompt that begins with a recorded stream goes
on from it, another one branches where its ids do. tokentrace's vLLM engine can be connected to a session's base URL.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..engines.protocol import TOP_LOGPROBS, Delta
from ..parsing.events import Event
from ..parsing.messages import CallId
from ..tokens.ids import check_ids
from .chat import chat_usage
from .dialect import AgentDialect, Head, Replied, openai_error
from .requests import Body, Request, RequestError, refusing
from .sse import OPENAI_END, encode_sse
from .token_fields import TokenFields

_MOST: Final = 10_000_000


def read_tokens(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /inference/v1/generate``."""
    said = Body(body)
    given = said.get("token_ids", list, "a list of token ids")
    if not given or len(given) > _MOST:
        raise RequestError("must be a list of at least one token id", field="token_ids")
    with refusing():
        ids = check_ids(given, "token_ids")
    sampling = said.inside("sampling_params")
    sampling.refuse("n", (1,), "one completion a request is sampled here")
    sampling.refuse("stop", ([], ""), "texts are not looked for among ids: use stop_token_ids")
    stops = sampling.get("stop_token_ids", list, "a list of token ids", [])
    with refusing():
        stop_ids = tuple(check_ids(stops, "sampling_params.stop_token_ids").tolist())
    wanted = sampling.whole("logprobs", 0, 20)
    said.skip("request_id", "cache_salt", "priority")
    options = said.get("stream_options", Mapping, "an object", {})
    return Request(
        messages=(),
        prompt_ids=ids,
        stop_token_ids=stop_ids,
        model=said.get("model", str, "a string", ""),
        max_tokens=sampling.whole("max_tokens", 1),
        temperature=sampling.number("temperature", 0, 2),
        top_p=sampling.number("top_p", 0, 1),
        top_k=sampling.top_k(),
        seed=sampling.whole("seed", -(2**63), 2**63 - 1),
        shaping=sampling.shaping(),
        logprobs=max(0, (wanted or 0) - 1),
        stream=said.flag("stream"),
        usage_in_stream=bool(options.get("include_usage")),
        echo={"token_fields": [TokenFields.VLLM.value]} if said.flag("return_token_ids") else {},
        ignored=(*said.unread, *sampling.unread),
    )


def write_tokens(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """Ids, logprobs, why it ended, and which weights sampled."""
    [reply] = replies
    choice = {**_choice(reply.completion), **_end(reply)}
    return {**_frame(head, [choice]), **_prompt(head), "usage": _usage(head, replies)}


class _TokenFrames:
    """Pieces as they are sampled, and ``[DONE]``."""

    def __init__(self, head: Head, call_ids: Sequence[CallId]) -> None:
        self._head, self._first = head, True

    def open(self) -> list[str]:
        return []

    def feed(self, choice: int, events: Sequence[Event], delta: Delta | None) -> list[str]:
        if delta is None or not len(delta.ids):
            return []
        frame = _frame(self._head, [{**_choice(delta), "finish_reason": None}])
        if self._first:
            frame |= _prompt(self._head)
            self._first = False
        return [encode_sse(frame)]

    def close(self, replies: Sequence[Replied]) -> list[str]:
        [reply] = replies
        nothing = {"index": 0, "token_ids": [], "logprobs": None}
        frame = _frame(self._head, [{**nothing, **_end(reply)}])
        if self._first:
            frame |= _prompt(self._head)
        frames = [encode_sse(frame)]
        if self._head.request.usage_in_stream:
            frames.append(encode_sse({**_frame(self._head, []), "usage": _usage(self._head, replies)}))
        return [*frames, OPENAI_END]

    def fail(self, error: RequestError) -> list[str]:
        return [encode_sse(openai_error(error))]


def _frame(head: Head, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {"request_id": head.id, "choices": choices}


def _prompt(head: Head) -> dict[str, Any]:
    return {"prompt_token_ids": head.prompt_ids.tolist()} if head.request.token_ids else {}


def _choice(delta: Delta) -> dict[str, Any]:
    top = delta.channels.get(TOP_LOGPROBS) or [()] * len(delta.ids)
    content = [
        {
            "token_id": id,
            "token": f"token_id:{id}",  # what renderers' client reads; vLLM 0.32 tells only token_id
            "logprob": logprob,
            "top_logprobs": [
                {"token_id": int(other), "logprob": float(value), "rank": rank}
                for rank, (other, value) in enumerate(alternatives, 1)
            ],
        }
        for id, logprob, alternatives in zip(delta.ids.tolist(), delta.logprobs.tolist(), top, strict=True)
    ]
    return {"index": 0, "token_ids": delta.ids.tolist(), "logprobs": {"content": content}}


def _end(reply: Replied) -> dict[str, Any]:
    versions = [
        {"version": span.version, "start": span.start, "end": span.stop} for span in reply.completion.versions
    ]  # fmt: skip
    return {
        "finish_reason": str(reply.completion.finish_reason),
        "stop_reason": None,
        "weight_versions": versions or None,
    }


def _usage(head: Head, replies: Sequence[Replied]) -> dict[str, Any]:
    """What it cost, as in chat; how much of it is reasoning is a question about text, and is not told here."""
    return {name: value for name, value in chat_usage(head, replies).items() if name != "completion_tokens_details"}


TOKENS: Final = AgentDialect("tokens", read_tokens, write_tokens, _TokenFrames, openai_error)
