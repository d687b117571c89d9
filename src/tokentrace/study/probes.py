"""Probe conversations: the small conversations that a template is rendered with to see what it does.

They use the same few messages, to share renderings. None spells a control token or a tag.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]
Probe = Sequence[Message]

SYSTEM = {"role": "system", "content": "instruction"}
USER = {"role": "user", "content": "question"}
ANSWER = {"role": "assistant", "content": "answer"}
THOUGHT = {"role": "assistant", "content": "answer", "reasoning_content": "thought"}
INLINE_THOUGHT = {"role": "assistant", "content": "<think>\nthought\n</think>\n\nanswer"}
"""Reasoning that a parser left in the content."""

ONE_ARGUMENT = {"key": "value"}
TWO_ARGUMENTS = {"key": "value", "more": "other"}

_PARAMETERS = {"type": "object", "properties": {}, "required": []}
_FUNCTION = {"name": "probe", "description": "", "parameters": _PARAMETERS}
STAND_IN_TOOL = {"type": "function", "function": _FUNCTION}


def call(number: int = 1, arguments: Any = ONE_ARGUMENT, *, as_text: bool = False) -> dict[str, Any]:
    arguments = json.dumps(arguments, ensure_ascii=False) if as_text else arguments
    function = {"name": f"probe{number}", "arguments": arguments}
    return {"id": f"call0000{number}", "type": "function", "function": function}


def calling(*calls: Mapping[str, Any], **fields: Any) -> Message:
    """An assistant's message with tool calls (one by default), and other `fields`."""
    return {"role": "assistant", "content": "", **fields, "tool_calls": list(calls) or [call()]}


def result(number: int = 1, **fields: Any) -> Message:
    call_id = f"call0000{number}"
    return {
        "role": "tool",
        "name": f"probe{number}",
        "tool_call_id": call_id,
        "content": "result",
        **fields,
    }


RESULT = result()


def stringified(message: Message) -> Message:
    """A message with arguments as JSON text, and None for empty content next to calls."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.dumps(function["arguments"])}})
    return {**message, "content": message.get("content") or None, "tool_calls": calls}


ANSWERED: Probe = (USER, ANSWER)
CONTINUED: Probe = (USER, ANSWER, USER)
REASONED: Probe = (USER, THOUGHT)
CALLED: Probe = (USER, calling())
RETURNED: Probe = (USER, calling(), RESULT)
CALLED_TWICE: Probe = (USER, calling(call(1), call(2)))

_SPOKEN_CALLS = (
    calling(call(1), call(2)),
    calling(),
    calling(call(1), call(2), content="answer", reasoning_content="thought"),
    calling(content="answer", reasoning_content="thought"),
)
ASSISTANT_TURNS: tuple[Probe, ...] = (ANSWERED, REASONED, *((USER, reply) for reply in _SPOKEN_CALLS))
"""Conversations in which an assistant answers a user."""
OTHER_TURNS: tuple[Probe, ...] = (
    (USER,),
    (SYSTEM, USER),
    ({"role": "developer", "content": "instruction"}, USER),
    (USER, ANSWER, USER, ANSWER),
    *(
        (USER, reply, *(result(n + 1) for n in range(len(reply["tool_calls"]))), *following)
        for reply in _SPOKEN_CALLS
        for following in ((), (ANSWER, USER), (THOUGHT,))
    ),
    *(
        (
            {
                "role": "user",
                "content": [{"type": kind, kind: "medium"}, {"type": "text", "text": "question"}],
            },
        )
        for kind in ("image", "video", "audio")
    ),
)
"""Other conversations, to see what is outside an assistant's turn."""
