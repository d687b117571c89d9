"""Markup inside a template: what ``|safe`` and ``|escape`` give."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Final

from markupsafe import Markup

from .budget import check_pieces, dear
from .origin import UNKNOWN
from .strings import TracedStr, derived, join_traced, plain_text, promoted, traced, with_runs


class TracedMarkup(TracedStr):
    """What ``|safe`` and ``|escape`` give: text that escapes whatever plain text is added to it, as Markup does."""

    __slots__ = ()

    def __html__(self) -> TracedMarkup:
        return self

    def __repr__(self) -> str:
        return f"Markup({str.__repr__(self)})"

    def __add__(self, other: str) -> TracedStr:
        return as_markup(join_traced((self, escaped(other)))) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> TracedStr:
        return as_markup(join_traced((escaped(other), self))) if isinstance(other, str) else NotImplemented

    def __mod__(self, values: Any) -> str:
        return as_markup(traced(str(Markup(plain_text(self)) % values), UNKNOWN))

    def method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of Markup: text it is given is escaped, text it returns is markup."""
        if name in ("striptags", "unescape"):
            dear(len(self))
        own: Any = None
        mine = getattr(with_runs(plain_text(self), self.runs), name, None)
        if mine is not None:  # asked first: it knows what is too large
            with contextlib.suppress(TypeError):
                own = mine(*(escaped(value) if isinstance(value, str) else value for value in args), **kwargs)
        result = getattr(Markup(plain_text(self)), name)(*args, **kwargs)
        if not isinstance(result, (str, list, tuple)):
            return own if isinstance(result, bytes) else result
        if own != result:
            own = traced(result, UNKNOWN) if isinstance(result, str) else [traced(part, UNKNOWN) for part in result]
        return as_markup(own) if isinstance(own, str) else type(result)(map(as_markup, own))


def _keeping_markup(name: str) -> Callable[..., TracedStr]:
    method = getattr(TracedStr, name)
    return lambda self, *args: as_markup(method(self, *args))


for _name in ("__getitem__", "capitalize", "lower", "strip", "upper"):
    setattr(TracedMarkup, _name, _keeping_markup(_name))


_ESCAPES: Final = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "'": "&#39;", '"': "&#34;"}


def as_markup(text: str) -> TracedMarkup:
    self = str.__new__(TracedMarkup, plain_text(text))
    self.runs = promoted(text).runs
    return self


def escaped(text: str) -> str:
    """The text with HTML's characters escaped, unless it is markup already."""
    if isinstance(text, TracedMarkup) or not any(char in text for char in _ESCAPES):
        return text
    check_pieces(len(text))
    return join_traced([derived(char, _ESCAPES.get(char, char)) for char in text])
