"""Ids and logprobs in an answer, for those who ask for them. Pure.

An answer has them in one of three ways, or in several:

- ``tokentrace``: one object, ``"tokentrace": {"prompt_token_ids", "completion_token_ids", "logprobs"}``, the same in
  every dialect: in each choice of a chat completion, in a message of Anthropic's, in a response. In a stream it comes
  with the frame that says how the completion ended.
- ``vllm``: the fields of vLLM's ``return_token_ids`` in chat completions: ``prompt_token_ids`` of the answer, which is
  in the first chunk of a stream, and ``token_ids`` of each choice, which a stream has piece by piece.
- ``nemo_gym``: ``prompt_token_ids``, ``generation_token_ids`` and ``generation_log_probs`` of the message or of the
  last output item, as NeMo Gym's have them.

One asks with the header ``x-tokentrace-token-ids``, whose value is one of these names (several with commas between),
or ``true`` for ``tokentrace``; with ``"return_token_ids": true`` in the body for the way that the dialect's own servers
have; or with ``"return_token_id_information": true`` for NeMo Gym's.

The ids are those that the engine was given and returned: a stop token is the last of them, and so are tokens that a
stop text has cut off from the content.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

from .dialect import Head, Replied
from .requests import Body, RequestError

HEADER: Final = "x-tokentrace-token-ids"
"""The header that asks for ids."""


class TokenFields(StrEnum):
    """How an answer carries ids and logprobs."""

    TOKENTRACE = "tokentrace"
    VLLM = "vllm"
    NEMO_GYM = "nemo_gym"


_YES: Final = ("true", "1", "yes", "on")
_NO: Final = ("false", "0", "no", "off", "")


def asked_fields(
    said: Body, headers: Mapping[str, str], usual: TokenFields, offered: Sequence[TokenFields] = tuple(TokenFields)
) -> tuple[TokenFields, ...]:
    """In which ways a request asks for ids; `usual` is what ``return_token_ids`` means in the dialect.

    RequestError for a way that is not `offered` in the dialect.
    """
    found = set(_named(headers.get(HEADER, "")))
    if said.flag("return_token_ids"):
        found.add(usual)
    if said.flag("return_token_id_information"):
        found.add(TokenFields.NEMO_GYM)
    for way in found.difference(offered):
        problem = f"no answer of this API has ids as {way} has them in chat completions; ask for {', '.join(offered)}"
        raise RequestError(problem, field=HEADER, code="unsupported_parameter")
    return tuple(way for way in TokenFields if way in found)


def _named(value: str) -> list[TokenFields]:
    found = []
    for word in value.lower().split(","):
        word = word.strip().replace("-", "_")
        if word in _YES:
            found.append(TokenFields.TOKENTRACE)
        elif word in list(TokenFields):
            found.append(TokenFields(word))
        elif word not in _NO:
            raise RequestError(f"must be true, or some of {', '.join(TokenFields)}", field=HEADER)
    return found


def asks(head: Head, way: TokenFields) -> bool:
    """Whether an answer is to carry ids in this way."""
    return way in head.request.echo.get("token_fields", ())


def carried(head: Head, reply: Replied, way: TokenFields) -> dict[str, Any]:
    """The fields of one completion in this way, to be put into an answer; none where they were not asked for."""
    if not asks(head, way):
        return {}
    ids, logprobs = reply.completion.ids.tolist(), reply.completion.logprobs.tolist()
    match way:
        case TokenFields.VLLM:
            return {"token_ids": ids}
        case TokenFields.NEMO_GYM:
            own = {"generation_token_ids": ids, "generation_log_probs": logprobs}
            return {"prompt_token_ids": head.prompt_ids.tolist(), **own}
        case TokenFields.TOKENTRACE:
            own = {"completion_token_ids": ids, "logprobs": logprobs}
            return {"tokentrace": {"prompt_token_ids": head.prompt_ids.tolist(), **own}}
