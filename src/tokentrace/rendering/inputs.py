"""What a renderer is given: tools, wrapped once; content that was put into parts, credited to where it came from."""

from __future__ import annotations

import marshal
from typing import Any

from ..conversation.forms import Adapted
from ..conversation.messages import Messages, check_tools
from ..conversation.place import Place
from ..conversation.values import is_plain, plain_json
from ..parsing.values import Tools, schemas_of
from ..study.memory import Memory
from ..template.chat_template import wrap_tools
from ..template.origin import Origin
from ..template.trace import Rendering
from ..template.traced import TracedList


class ToolCache:
    """Tools wrapped for templates: the same ones come again and again.

    They are known by their content, never by who they are, as a caller may change a list that was given before. What is
    kept is made of copies, so nothing that a caller changes is seen here.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._known = Memory(most=64)
        self._wrapped = Memory(most=64)
        self._schemas = Memory(most=64)

    def wrap(self, tools: Any) -> TracedList | None:
        """Checked and wrapped; values that are not JSON are made JSON where the settings say so."""
        if tools is None:
            return None
        try:
            key = marshal.dumps(tools)
        except ValueError:  # objects of other types, a function for one
            return self._wrap(check_tools(tools) or [])
        return self._known.once(key, lambda: self._wrap(check_tools(tools) or []), keep=lambda _: is_plain(tools))

    def key(self, tools: Any) -> object:
        """Equal for equal tools."""
        try:
            return marshal.dumps(tools, 2)
        except ValueError:
            return repr(tools)

    def schemas(self, tools: Any) -> Tools:
        """Checked, and as a parser asks them what bare values mean."""
        try:
            key = marshal.dumps(tools) if tools else None
        except ValueError:
            key = None
        if key is None:
            return schemas_of(check_tools(tools))
        return self._schemas.once(key, lambda: schemas_of(check_tools(tools)), keep=lambda _: is_plain(tools))

    def _wrap(self, checked: list[dict[str, Any]]) -> TracedList:
        """`marshal` writes equal tools in several ways, as they share parts or not; its second version in one."""
        if not is_plain(checked):
            if self._as_json:
                checked = [plain_json(tool, Place(field=f"tools.{at}")) for at, tool in enumerate(checked)]
            return wrap_tools(checked)
        key = marshal.dumps(checked, 2)
        return self._wrapped.once(key, lambda: wrap_tools(marshal.loads(key)))


def credit_content(rendering: Rendering, adapted: Adapted) -> None:
    """Text that was put into a part for the template's sake is the content that was given."""
    if adapted.wrapped:
        rendering.origins = [
            Origin.of(origin.message, "content")
            if origin is not None and origin.message in adapted.wrapped and origin.field == "content"
            else origin
            for origin in rendering.origins
        ]


def with_original_text(messages: Messages, adapted: Adapted, originals: Messages) -> Messages:
    """Messages, with the originals of those whose text was wrapped in a part."""
    if not adapted.wrapped:
        return messages
    return [originals[at] if at in adapted.wrapped else message for at, message in enumerate(messages)]
