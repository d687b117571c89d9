"""A last message that is left open, for the model to go on with: prefill.

As in transformers, a mark is put after the content and the rendering is cut where it stands. So the template sees a
message with content, even if it is empty, and white space before the mark is not taken for the end of the message.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.messages import Messages
from ..errors import InputError, TemplateError
from ..template.trace import Rendering

_MARK: Final = "CONTINUED_FROM_HERE"
_TAG: Final = _MARK + " "
"""Its space tells whether the template strips content."""


def with_mark(messages: Messages) -> list[Mapping[str, Any]]:
    """The messages with a mark after the content of the last one; InputError if there is nothing to go on with."""
    at = len(messages) - 1
    last = messages[at]
    if last["role"] != "assistant":
        raise InputError(
            f"continue_final_message goes on with an assistant's message, and the last one is of role {last['role']}; "
            "use add_generation_prompt for a new one",
            message=at,
        )
    if last.get("tool_calls"):
        raise InputError(
            "continue_final_message goes on with content, and tool calls come after it; leave the calls out",
            message=at,
            field="tool_calls",
        )
    content = last.get("content")
    if isinstance(content, str):
        return [*messages[:at], {**last, "content": content + _TAG}]
    if isinstance(content, Sequence) and content and isinstance(content[-1], Mapping) and "text" in content[-1]:
        part = {**content[-1], "text": content[-1]["text"] + _TAG}
        return [*messages[:at], {**last, "content": [*content[:-1], part]}]
    raise InputError("continue_final_message needs content to go on with, if only an empty one", message=at)


def left_open(rendering: Rendering, message: int) -> Rendering:
    """The rendering up to the mark. Where the template strips content, white space before the mark goes too."""
    at = _place(rendering, message)
    if at < 0:
        raise TemplateError(
            "the template does not write the content of this message where it could be continued", message=message
        )
    if not rendering.text.startswith(_TAG, at):
        at = len(rendering.text[:at].rstrip())
    return rendering.until(at)


def _place(rendering: Rendering, message: int) -> int:
    """Where the mark stands in text of the message itself: others may spell it too."""
    at = len(rendering.text)
    while (at := rendering.text.rfind(_MARK, 0, at)) >= 0:
        origin = rendering.origins[bisect.bisect_right(rendering.ends, at)]
        if origin is not None and origin.message == message:
            return at
    return -1
