"""What a template does, written down: its turns with holes where fields go.

``<|im_start|>assistant\\n<think>\\n⟨reasoning⟩\\n</think>\\n\\n⟨content⟩…``: two templates that write the same are the
same to us, whatever they are called and however they are spelled.
"""

from __future__ import annotations

import functools
import itertools
from typing import TYPE_CHECKING

from ..errors import RendererError
from ..formats.families import BY_NAME, FAMILIES
from ..template.chat_template import REASONING_FIELDS, PythonFormat
from ..template.trace import Rendering
from ..template.traced import KEY, Origin
from .probes import REASONED, RESULT, USER, call
from .turns import common_prefix

if TYPE_CHECKING:
    from .study import TemplateStudy


class TemplateOutline:
    """The scaffold of a template's turns. Empty where the template refuses such a turn or writes nothing."""

    def __init__(self, study: TemplateStudy) -> None:
        self._study = study

    @functools.cached_property
    def answer(self) -> str:
        """An assistant's turn with reasoning and content."""
        return _turn(self._study.probe(REASONED), 1)

    @functools.cached_property
    def call(self) -> str:
        """An assistant's turn with a tool call (and reasoning and content where the template lets them stand there)."""
        return _turn(self._called, 1)

    @functools.cached_property
    def result(self) -> str:
        """A tool's turn."""
        return _turn(self._called, 2)

    @functools.cached_property
    def prompt(self) -> str:
        """The generation prompt after a user's message."""
        rendering = self._study.probe((USER,), prompt=True)
        return rendering.text[rendering.tail :] if rendering is not None else ""

    @functools.cached_property
    def image(self) -> str:
        """What stands for an image in a user's message, found by what is missing without it."""
        part = {"type": "text", "text": "question"}
        pictured = self._study.probe([{"role": "user", "content": [{"type": "image", "image": "picture"}, part]}])
        plain = self._study.probe([{"role": "user", "content": [part]}]) if pictured is not None else None
        if plain is None or pictured is None or len(pictured.text) <= len(plain.text):
            return ""
        start = common_prefix(plain.text, pictured.text)
        return pictured.text[start : start + len(pictured.text) - len(plain.text)]

    @functools.cached_property
    def _called(self) -> Rendering | None:
        """A call and its result, as the template wants them: beside content or not, arguments as a mapping or JSON."""
        for said, as_text in itertools.product(
            ({"content": "answer", "reasoning_content": "thought"}, {"content": ""}, {"content": None}), (False, True)
        ):
            message = {"role": "assistant", **said, "tool_calls": [call(as_text=as_text)]}
            rendering = self._study.probe([USER, message, RESULT])
            if rendering is not None:
                return rendering
        return None


def _turn(rendering: Rendering | None, message: int) -> str:
    return "".join(
        hole(origin, text) if origin is not None else text
        for text, turn, origin in (rendering.spans() if rendering is not None else ())
        if turn == message
    )


def hole(origin: Origin, text: str) -> str:
    """The hole that a field leaves in the scaffold. Roles are scaffold."""
    if origin[0] != "messages" or len(origin) < 3:
        return "⟨?⟩"
    path = origin[2:]
    last = path[-1]
    inside = path[path.index("arguments") + 1 :] if "arguments" in path else ()
    if inside and inside != (KEY,):
        return "⟨key⟩" if last == KEY else "⟨value⟩"
    if path == ("role",) or last in (KEY, "function", "tool_calls") or isinstance(last, int):
        return text  # scaffold, or the punctuation and the keys of a message written out as JSON
    name = "⟨reasoning⟩" if path[0] in REASONING_FIELDS else f"⟨{last}⟩"
    return f'"{name}"' if text[:1] == '"' else name  # quoted where it was written as JSON


def recognise(study: TemplateStudy, renderer: str) -> str:
    """The name of the family a template belongs to, ``"default"`` if of none that is known.

    With the name of a family as `renderer`, RendererError says where the template does not behave like it.
    """
    if renderer not in BY_NAME and renderer != "auto":
        known = ", ".join(["auto", "default", *BY_NAME])
        raise RendererError(f"there is no renderer {renderer!r}; known are {known}")
    template = study.template
    if isinstance(template, PythonFormat):
        return next((family.name for family in FAMILIES if family.format is template), "default")
    if renderer == "auto":
        fits = (family.name for family in FAMILIES if family.format is None and not family.differs(study.outline))
        return next(fits, "default")
    difference = BY_NAME[renderer].differs(study.outline)
    if difference:
        raise RendererError(
            f"this template does not behave like {renderer}: {difference}; renderer='auto' takes any template"
        )
    return renderer
