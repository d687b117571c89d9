"""Inputs of a renderer: tools, wrapped once; content that was wrapped in parts, credited to its field."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from typing import Any, TypeVar

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

Value = TypeVar("Value")


class ToolCache:
    """Tools wrapped for templates, and as parsers read them. The same ones come again and again.

    Keys are contents, not identities, since a caller may change a list of tools. Cached values are copies.
    """

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._cache = Memory(most=256)

    def wrap(self, tools: Any) -> TracedList | None:
        """Tools, checked and wrapped; with `as_json`, values that are not JSON become JSON."""
        return None if tools is None else self._once("wrapped", tools, lambda: self._wrap(tools))

    def schemas(self, tools: Any) -> Tools:
        """Tools, checked, for a parser that needs the types of bare values."""
        return self._once("schemas", tools, lambda: schemas_of(check_tools(tools)))

    def key(self, tools: Any) -> object:
        """Equal for equal tools. Raises InputError for tools that are not valid, or too deep or too large to print."""
        try:
            graph = marshal.dumps(tools)  # writes a shared value once, so equal tools may have several graphs
        except ValueError:  # too deep, or objects of other types, a function for one
            return self._key(tools)
        return self._cache.once(("key", graph), lambda: self._key(tools), keep=lambda _: is_plain(tools))

    def _key(self, tools: Any) -> object:
        checked = tools if is_plain(tools) else self._check(tools)
        # version 2 writes equal values in one way, a shared one each time: only for values of a limited size
        return marshal.dumps(checked, 2) if is_plain(checked) else repr(checked)

    def _once(self, what: str, tools: Any, make: Callable[[], Value]) -> Value:
        key = self.key(tools)
        return self._cache.once((what, key), make) if type(key) is bytes else make()

    def _check(self, tools: Any) -> list[dict[str, Any]]:
        checked = check_tools(tools) or []
        if self._as_json:
            checked = [plain_json(tool, Place(field=f"tools.{at}")) for at, tool in enumerate(checked)]
        return checked

    def _wrap(self, tools: Any) -> TracedList:
        checked = self._check(tools)
        return wrap_tools(marshal.loads(marshal.dumps(checked)) if is_plain(checked) else checked)


def credit_content(rendering: Rendering, adapted: Adapted) -> None:
    """Give text that was wrapped in a part for the template the origin of its content."""
    if wrapped := adapted.wrapped:
        rendering.origins = [
            Origin.of(origin.message, "content")
            if origin is not None and origin.message in wrapped and origin.field == "content"
            else origin
            for origin in rendering.origins
        ]


def with_original_text(messages: Messages, adapted: Adapted, originals: Messages) -> Messages:
    """Messages, with the originals of those whose text was wrapped in a part."""
    wrapped = adapted.wrapped
    return (
        messages
        if not wrapped
        else [originals[at] if at in wrapped else message for at, message in enumerate(messages)]
    )
