"""Leave the last message open, to be continued.

A mark goes after its content, as in transformers, and the rendering is cut there. So the template
sees empty content, and keeps white space at its end.
"""

import bisect
from collections.abc import Mapping, Sequence
from typing import Any

from ..conversation.messages import Messages
from ..errors import InputError, TemplateError
from .trace import Rendering

_MARK = "CONTINUED_FROM_HERE"
_TAG = _MARK + " "
"""The trailing space shows whether the template strips content."""


def with_mark(messages: Messages) -> list[Mapping[str, Any]]:
    """Mark where the last message's content ends. Raises InputError if it has none."""
    at = len(messages) - 1
    last = messages[at]
    content, field = last.get("content"), None
    if last["role"] != "assistant":
        advice = "use add_generation_prompt for a new one"
        problem = f"an assistant message, but the last one has role {last['role']}; {advice}"
    elif last.get("tool_calls"):
        problem = "content at the end, but tool calls come after it; leave the calls out"
        field = "tool_calls"
    elif isinstance(content, str):
        return [*messages[:at], {**last, "content": content + _TAG}]
    else:
        *before, part = content if isinstance(content, Sequence) and content else [None]
        if isinstance(part, str) or (isinstance(part, Mapping) and "text" in part):
            part = part + _TAG if isinstance(part, str) else {**part, "text": part["text"] + _TAG}
            return [*messages[:at], {**last, "content": [*before, part]}]
        problem = "content; an empty string will do"
    raise InputError(f"continue_final_message needs {problem}", message=at, field=field)


def left_open(rendering: Rendering, message: int) -> Rendering:
    """The rendering up to the mark, stripped where the template strips content."""
    at = len(rendering.text)
    while (at := rendering.text.rfind(_MARK, 0, at)) >= 0:
        origin = rendering.origins[bisect.bisect_right(rendering.ends, at)]
        if origin is not None and origin.message == message:  # other messages may contain it too
            stripped = not rendering.text.startswith(_TAG, at)
            stop = len(rendering.text[:at].rstrip()) if stripped else at
            opened = Rendering.of(rendering.spans(0, stop))
            opened.generation = [
                (start, min(end, stop)) for start, end in rendering.generation if start < stop
            ]
            return opened
    problem = "the template does not write the content of this message where it could be continued"
    raise TemplateError(problem, message=message)
