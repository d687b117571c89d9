"""Outlines: a template's turns with holes where fields go.

``<|im_start|>assistant\\n<think>\\n⟨reasoning⟩\\n</think>\\n\\n⟨content⟩…``: two templates that
write the same text count as the same.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from ..computed import computed
from ..conversation.messages import REASONING_FIELDS
from ..errors import RendererError
from ..formats.families import BY_NAME, FAMILIES
from ..template.chat_template import PythonFormat
from ..template.origin import KEY, Origin
from ..template.trace import Rendering
from .probes import ANSWER, REASONED, RESULT, THOUGHT, USER, Message, call
from .turns import common_prefix

if TYPE_CHECKING:
    from .study import TemplateStudy


class TemplateOutline:
    """The scaffold of a template's turns; empty for a turn that the template refuses."""

    def __init__(self, study: TemplateStudy) -> None:
        self._study = study

    @computed
    def answer(self) -> str:
        return _turn(self._study.probe(REASONED), 1)

    @computed
    def call(self) -> str:
        return _turn(self._called, 1)

    @computed
    def result(self) -> str:
        return _turn(self._called, 2)

    @computed
    def prompt(self) -> str:
        rendering = self._study.probe((USER,), prompt=True)
        return rendering.text[rendering.tail :] if rendering is not None else ""

    @computed
    def image(self) -> str:
        """The placeholder of an image in a user's message."""
        part = {"type": "text", "text": "question"}
        image = {"type": "image", "image": "picture"}
        pictured = self._study.probe([{"role": "user", "content": [image, part]}], prompt=True)
        for plain in ((USER,), [{"role": "user", "content": [part]}]):
            rendering = self._study.probe(plain, prompt=True)
            if rendering is not None and pictured is not None:
                start = common_prefix(rendering.text, pictured.text)
                stop = start + len(pictured.text) - len(rendering.text)
                if start <= stop and pictured.text[stop:] == rendering.text[start:]:
                    return pictured.text[start:stop]
        return ""

    @computed
    def _called(self) -> Rendering | None:
        replies: tuple[Message, ...] = (THOUGHT, {**ANSWER, "content": ""}, {**ANSWER, "content": None})
        ways = itertools.product(replies, (False, True))
        called = ({**reply, "tool_calls": [call(as_text=as_text)]} for reply, as_text in ways)
        renderings = (self._study.probe([USER, message, RESULT]) for message in called)
        return next((rendering for rendering in renderings if rendering is not None), None)


def _turn(rendering: Rendering | None, message: int) -> str:
    spans = rendering.spans() if rendering is not None else ()
    return "".join(_hole(origin, text) for text, turn, origin in spans if turn == message)


def _hole(origin: Origin | None, text: str) -> str:
    """The hole that a field leaves in the scaffold. Roles are scaffold."""
    if origin is None:
        return text
    if origin.field is None:
        return "⟨?⟩"
    path, last = origin.path, origin.path[-1]
    inside = path[path.index("arguments") + 1 :] if "arguments" in path else ()
    if inside and inside != (KEY,):
        return "⟨key⟩" if last == KEY else "⟨value⟩"
    if path == ("role",) or last in (KEY, "function", "tool_calls") or isinstance(last, int):
        return text  # scaffold, or punctuation and keys of JSON
    name = "⟨reasoning⟩" if path[0] in REASONING_FIELDS else f"⟨{last}⟩"
    return f'"{name}"' if text[:1] == '"' else name  # quoted where it was written as JSON


def recognise(study: TemplateStudy, renderer: str) -> str:
    """The template's family, or ``"default"``. Raises RendererError if `renderer` is another."""
    if renderer not in BY_NAME and renderer != "auto":
        raise RendererError(
            f"there is no renderer {renderer!r}; there are auto, default, {', '.join(BY_NAME)}"
        )
    template = study.template
    if isinstance(template, PythonFormat):
        return next((family.name for family in FAMILIES if family.format is template), "default")
    if renderer == "auto":
        families = (family for family in FAMILIES if family.format is None)
        return next((family.name for family in families if not family.differs(study.outline)), "default")
    if difference := BY_NAME[renderer].differs(study.outline):
        problem = f"this template does not behave like {renderer}: {difference}"
        raise RendererError(f"{problem}; renderer='auto' takes any template")
    return renderer
