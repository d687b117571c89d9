"""A parsed completion in the shapes that clients know: Anthropic's messages and OpenAI's Responses. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, Literal, NamedTuple

from ..parsing.messages import CallId, call_id_of, expressible
from ..parsing.response import CallStatus, Finish, ParsedResponse, ParsedToolCall, PartKind, TokenRange

ItemId = Callable[[str, int], str]
"""An id for the output item of a kind (``rs``, ``msg`` or ``fc``) at this position."""

TokenLogprobs = Callable[[TokenRange], list[dict[str, Any]]]
"""What a client is told of the logprobs of these tokens."""

STOP_REASONS: Final[dict[str, Literal["end_turn", "tool_use", "max_tokens"]]] = {
    "stop": "end_turn",
    "tool_calls": "tool_use",
    "length": "max_tokens",
}
"""How Anthropic's API calls the ends of a completion."""


def numbered_item_id(kind: str, at: int) -> str:
    """``msg_00000``, ``fc_00001``, …: the same in every response; give an `item_id` where ids have to be unique."""
    return f"{kind}_{at:05d}"


def anthropic_message(
    response: ParsedResponse, *, call_id: CallId | None = None, signature: str = ""
) -> dict[str, Any]:
    """An assistant message as in Anthropic's API: blocks of thinking, text and tool use, in the order written.

    Empty texts are left out, and so are calls that are not `expressible`; neighbours of one kind are one block. Blocks
    of thinking have the `signature`.
    """
    blocks = [_anthropic_block(stretch, call_id, signature) for stretch in _stretches(response)]
    return {"role": "assistant", "content": blocks}


def anthropic_stop_reason(response: ParsedResponse) -> Literal["end_turn", "tool_use", "max_tokens"]:
    """What Anthropic calls the response's `finish_reason`."""
    return STOP_REASONS[response.finish_reason]


def responses_items(
    response: ParsedResponse,
    *,
    call_id: CallId | None = None,
    item_id: ItemId | None = None,
    logprobs: TokenLogprobs | None = None,
    never_empty: bool = False,
) -> list[dict[str, Any]]:
    """Output items as in OpenAI's Responses: reasoning, messages and function calls, in the order written.

    A message is incomplete if the completion was cut off inside it. Empty texts are left out, and so are calls that are
    not `expressible`; neighbours of one kind are one item. Messages have `logprobs` of their tokens if it is given.
    With `never_empty`, an empty message stands for nothing at all.
    """
    stretches = _stretches(response)
    if never_empty and not stretches:
        stretches = [_Stretch(PartKind.CONTENT, "", None, response.finish is Finish.LENGTH, [])]
    make_id = item_id or numbered_item_id
    return [_responses_item(at, stretch, call_id, make_id, logprobs) for at, stretch in enumerate(stretches)]


class _Stretch(NamedTuple):
    """Neighbouring parts of one kind, or one call."""

    kind: PartKind
    text: str
    call: ParsedToolCall | None
    cut_off: bool
    spans: list[TokenRange]


def _stretches(response: ParsedResponse) -> list[_Stretch]:
    """What of the response has a place in a message."""
    written = [part for part in response.parts if part.text or part.call is not None]
    stretches: list[_Stretch] = []
    for part in written:
        call = None if part.call is None else response.tool_calls[part.call]
        if call is not None and not expressible(call):
            continue
        cut_off = response.finish is Finish.LENGTH and part is written[-1]
        text, spans = part.text, [part.span]
        if call is None and stretches and stretches[-1].kind is part.kind:
            before = stretches.pop()
            text, spans = before.text + text, [*before.spans, *spans]
        stretches.append(_Stretch(part.kind, text, call, cut_off, spans))
    return stretches


def _anthropic_block(stretch: _Stretch, call_id: CallId | None, signature: str) -> dict[str, Any]:
    if stretch.call is not None:
        call = stretch.call
        return {"type": "tool_use", "id": call_id_of(call, call_id), "name": call.name, "input": call.arguments}
    if stretch.kind is PartKind.REASONING:
        return {"type": "thinking", "thinking": stretch.text, "signature": signature}
    return {"type": "text", "text": stretch.text}


def _responses_item(
    at: int, stretch: _Stretch, call_id: CallId | None, make_id: ItemId, logprobs: TokenLogprobs | None
) -> dict[str, Any]:
    if stretch.call is not None:
        call = stretch.call
        return call_item(
            make_id("fc", at), call_id_of(call, call_id), str(call.name), call.arguments_text, call_item_status(call)
        )
    if stretch.kind is PartKind.REASONING:
        return reasoning_item(make_id("rs", at), stretch.text)
    item = message_item(make_id("msg", at), stretch.text, "incomplete" if stretch.cut_off else "completed")
    if logprobs is not None:
        item["content"][0]["logprobs"] = [each for span in stretch.spans for each in logprobs(span)]
    return item


def reasoning_item(id: str, text: str) -> dict[str, Any]:
    """Reasoning as an output item. The text is all of it: there is no summary."""
    return {"type": "reasoning", "id": id, "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def message_item(id: str, text: str, status: str = "completed") -> dict[str, Any]:
    """Content as an output item."""
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": id, "role": "assistant", "status": status, "content": content}


def call_item(id: str, call_id: str, name: str, arguments: str, status: str = "completed") -> dict[str, Any]:
    """A call as an output item."""
    call = {"call_id": call_id, "name": name, "arguments": arguments}
    return {"type": "function_call", "id": id, **call, "status": status}


def call_item_status(call: ParsedToolCall) -> str:
    """What the item of a call that has ended says of it: incomplete if the completion ended inside of it."""
    return "incomplete" if call.status is CallStatus.TRUNCATED or not expressible(call) else "completed"
