"""Turns of templates that do not say whose turn they write.

Some put their whole output together in a variable and print it at the end: text keeps its origin, but scaffold has no
owner. Their turns are found by what a render of the conversation up to there is: a turn begins where the prompt for
it ends, and ends where the conversation with it ends. That costs two renders a turn, and holds only where the past is
not rewritten; where it is, nothing is claimed.
"""

from __future__ import annotations

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..template.trace import Rendering
from ..tokens.tokenizer import Tokenizer
from .turns import Render, Section, cut_points, matched_prefix


def missing_turns(rendering: Rendering, turns: list[Section], messages: Messages) -> list[int]:
    """Assistant messages whose text is in the rendering, but which have no turn there."""
    known = {section.message for section in turns}
    if all(i in known or message["role"] != "assistant" for i, message in enumerate(messages)):
        return []
    shown = {
        origin.message
        for origin in rendering.origins
        if origin is not None and origin.message is not None and origin.field not in (None, "role")
    }
    return sorted(i for i in shown - known if messages[i]["role"] == "assistant")


def turns_by_prefix(
    rendering: Rendering, missing: list[int], messages: Messages, render: Render, tokenizer: Tokenizer
) -> tuple[list[Section], list[str]]:
    """The turns of `missing` messages, and notes on those that could not be proven."""
    found: list[Section] = []
    notes: list[str] = []
    for index in missing:
        start = _after_prompt(rendering, messages[:index], render, tokenizer)
        last = index == len(messages) - 1
        end = len(rendering.text) if last else _shared(rendering, messages[: index + 1], render)
        if start is None or end is None or end < start:
            notes.append(
                f"message {index}: the template does not say where its turn stands, and it cannot be proven; "
                "nothing of it counts as sampled"
            )
            continue
        own = [
            stop
            for stop, origin in zip(rendering.ends, rendering.origins, strict=True)
            if origin is not None and origin.message == index and start < stop <= end
        ]
        found.append(Section(index, start, end, start, own[-1] if own else start, index - 1))
    return found, notes


def _after_prompt(rendering: Rendering, messages: Messages, render: Render, tokenizer: Tokenizer) -> int | None:
    """Where the generation prompt after `messages` ends in the rendering, which may have less of it."""
    before = _shared(rendering, messages, render)
    if not messages or before is None:
        return before
    try:
        prompt = render(messages, True).text
    except TokentraceError:
        return None
    tail = prompt[before:]
    if not prompt.startswith(rendering.text[:before]) or not tail:
        return before
    return before + matched_prefix(rendering.text[before:], tail, cut_points(tail, tokenizer))


def _shared(rendering: Rendering, messages: Messages, render: Render) -> int | None:
    """How long the rendering of `messages` is, if the whole rendering begins with it."""
    if not messages:
        return 0
    try:
        text = render(messages, False).text
    except TokentraceError:
        return None
    return len(text) if rendering.text.startswith(text) else None
