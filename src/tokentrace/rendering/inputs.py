"""What a renderer is given: tools, wrapped once; content that was put into parts, credited to where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..conversation.forms import Adapted
from ..conversation.messages import Messages, check_tools, tools_text
from ..conversation.place import Place
from ..conversation.values import plain_json
from ..errors import InputError
from ..study.memory import Memory
from ..template.chat_template import wrap_tools
from ..template.origin import Origin
from ..template.trace import Rendering
from ..template.traced import TracedList


class ToolCache:
    """Tools wrapped for templates: the same ones come again and again."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._wrapped = Memory(most=64)

    def wrap(self, tools: Any) -> TracedList | None:
        """Checked and wrapped; values that are not JSON are made JSON where the settings say so."""
        checked = check_tools(tools)
        if checked is None:
            return None
        try:
            key = tools_text(checked)
        except (TypeError, ValueError, RecursionError):
            if self._as_json:
                checked = [plain_json(tool, Place(field=f"tools.{at}")) for at, tool in enumerate(checked)]
            return wrap_tools(checked)
        return self._wrapped.once(key, lambda: wrap_tools(checked))


def tools_of_each(conversations: Sequence[Any], tools: Any) -> Sequence[Any]:
    """The tools of each of several conversations."""
    lists = isinstance(tools, Sequence) and not isinstance(tools, (str, bytes))
    if lists and tools and all(own is None or isinstance(own, (list, tuple)) for own in tools):
        if len(tools) != len(conversations):
            raise InputError(
                f"must be one list of tools, or one for each of {len(conversations)} conversations, not {len(tools)}",
                field="tools",
            )
        return tools  # type: ignore[no-any-return]
    return [tools] * len(conversations)


def credit_content(rendering: Rendering, adapted: Adapted) -> None:
    """Text that was put into a part for the template's sake is the content that was given."""
    if adapted.wrapped:
        rendering.origins = [
            Origin.of(origin.message, "content")
            if origin is not None and origin.message in adapted.wrapped and origin.field == "content"
            else origin
            for origin in rendering.origins
        ]


def with_given_text(messages: Messages, adapted: Adapted, given: Messages) -> Messages:
    """Messages, with those whose text was put into a part as they were given."""
    if not adapted.wrapped:
        return messages
    return [given[at] if at in adapted.wrapped else message for at, message in enumerate(messages)]
