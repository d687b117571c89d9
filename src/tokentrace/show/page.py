"""Pages for browsers: each needs nothing but itself, and no text in it can act.

One environment makes them all. Every text that a template prints is made visible and escaped. Should some slip through
all the same, the page's policy lets a browser run and apply nothing but the script and the style sheet of the page, by
their hashes, and load nothing at all. So pages must not need handlers or styles in attributes.
"""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import jinja2
from markupsafe import Markup, escape

from ..tokens.visible import visible
from .pieces import KINDS, Kind

_HUES: Final = 12
"""Colours that messages take in turn: the classes ``h0``, ``h1``, … of page.css."""


class Card(NamedTuple):
    """A figure at the top of a page."""

    label: str
    value: str
    more: str
    tone: str = ""


class Token(NamedTuple):
    """A token on a page. One with no text is part of the character before it."""

    text: str
    control: bool
    title: str = ""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Tokens that look alike: of one kind, and perhaps inside of one ``del``, ``ins`` or ``mark`` element."""

    kind: Kind
    start: int
    """The position of the first token: shades alternate with it."""
    tokens: Sequence[Token]
    marked: bool = False
    title: str = ""
    tag: str = ""

    @property
    def colour(self) -> int:
        return KINDS.index(self.kind)


@dataclass(frozen=True, slots=True)
class Row:
    """Tokens of one message (-1: of none), with its name and notes beside them. Text among the parts is a remark."""

    message: int
    name: str
    notes: Sequence[str] = ()
    parts: list[Stretch | str] = field(default_factory=list)

    @property
    def hue(self) -> str:
        return f"h{self.message % _HUES}" if self.message >= 0 else "h"


def make_page(template: str, title: str, brand: str, *, scripted: bool = True, **values: Any) -> str:
    """A page from a template that extends ``page.html``."""
    script = _asset("page.js") if scripted else ""
    return make_fragment(template, title=title, brand=brand, script=script, **values)


def make_fragment(template: str, **values: Any) -> str:
    """A part of a page from a template, which is given the style sheet as well."""
    return _environment().get_template(template).render(style=_asset("page.css"), **values)


@functools.cache
def _environment() -> jinja2.Environment:
    made = jinja2.Environment(
        loader=jinja2.PackageLoader("tokentrace.show"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=lambda value: visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    made.filters["breaks"] = _with_breaks
    made.filters["source"] = _source
    return made


@functools.cache
def _asset(name: str) -> Markup:
    loader = _environment().loader
    assert loader is not None
    return Markup(loader.get_source(_environment(), name)[0])


def _with_breaks(text: str) -> Markup:
    """Text with a sign at each newline and tab."""
    shown = escape(visible(text))
    return shown.replace("\n", Markup("<u>⏎</u>\n")).replace("\t", Markup("<u>⇥</u>\t"))


def _source(text: str) -> str:
    """How a policy names a script or a style sheet."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
