"""What a template does, written down: its turns with holes where fields go.

``<|im_start|>assistant\\n<think>\\n⟨reasoning⟩\\n</think>\\n\\n⟨content⟩…``: two templates that write the same are the
same to us, whatever they are called and however they are spelled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from ..errors import RendererError, TokentraceError
from ..formats.families import BY_NAME, FAMILIES, Outline
from ..template.chat_template import REASONING_FIELDS, PythonFormat, Template
from ..template.origin import KEY, Origin
from ..template.trace import Rendering
from .turns import common_prefix

_USER: Final = {"role": "user", "content": "question"}
_RESULT: Final = {"role": "tool", "name": "lookup", "tool_call_id": "call00001", "content": "result"}


def read_outline(template: Template, variables: Mapping[str, Any]) -> Outline:
    """Render small conversations and note the scaffold."""
    answer = call = result = prompt = ""
    reply = {"role": "assistant", "reasoning_content": "thought", "content": "answer"}
    rendering = _try(template, variables, [_USER, reply])
    if rendering is not None:
        answer = _turn(rendering, 1)
    for message in _calls():
        rendering = _try(template, variables, [_USER, message, _RESULT])
        if rendering is not None:
            call, result = _turn(rendering, 1), _turn(rendering, 2)
            break
    rendering = _try(template, variables, [_USER], prompt=True)
    if rendering is not None:
        prompt = rendering.text[rendering.tail :]
    return Outline(answer, call, result, prompt, _image(template, variables))


def _image(template: Template, variables: Mapping[str, Any]) -> str:
    """What the template writes for an image part, found by what is missing without it."""
    part = {"type": "text", "text": "question"}
    plain, pictured = (
        _try(template, variables, [{"role": "user", "content": parts}])
        for parts in ([part], [{"type": "image", "image": "picture"}, part])
    )
    if plain is None or pictured is None or len(pictured.text) <= len(plain.text):
        return ""
    start = common_prefix(plain.text, pictured.text)
    return pictured.text[start : start + len(pictured.text) - len(plain.text)]


def _calls() -> Iterator[dict[str, Any]]:
    """A call, as the template may want it: beside content or not, arguments as a mapping or as JSON."""
    for extra in ({"reasoning_content": "thought", "content": "answer"}, {"content": ""}, {"content": None}):
        for arguments in ({"place": "value"}, '{"place": "value"}'):
            function = {"name": "lookup", "arguments": arguments}
            yield {
                "role": "assistant",
                **extra,
                "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
            }


def _try(
    template: Template, variables: Mapping[str, Any], messages: list[Any], *, prompt: bool = False
) -> Rendering | None:
    try:
        return template.render(messages, None, add_generation_prompt=prompt, variables=variables)
    except TokentraceError:
        return None


def _turn(rendering: Rendering, message: int) -> str:
    return "".join(
        hole(origin, text) if origin is not None else text
        for text, turn, origin in rendering.spans()
        if turn == message
    )


def hole(origin: Origin, text: str) -> str:
    """The hole that a field leaves in the scaffold. Roles are scaffold."""
    if origin.field is None:
        return "⟨?⟩"
    path = origin.path
    last = path[-1]
    inside = path[path.index("arguments") + 1 :] if "arguments" in path else ()
    if inside and inside != (KEY,):
        return "⟨key⟩" if last == KEY else "⟨value⟩"
    if origin.is_role or last in (KEY, "function", "tool_calls") or isinstance(last, int):
        return text  # scaffold, or the punctuation and the keys of a message written out as JSON
    name = "⟨reasoning⟩" if path[0] in REASONING_FIELDS else f"⟨{last}⟩"
    return f'"{name}"' if text[:1] == '"' else name  # quoted where it was written as JSON


def recognise(template: Template, variables: Mapping[str, Any], renderer: str) -> str:
    """The name of the family a template belongs to, ``"default"`` if of none that is known.

    With the name of a family as `renderer`, RendererError says where the template does not behave like it.
    """
    if renderer not in BY_NAME and renderer != "auto":
        known = ", ".join(["auto", "default", *BY_NAME])
        raise RendererError(f"there is no renderer {renderer!r}; known are {known}")
    if isinstance(template, PythonFormat):
        return next((family.name for family in FAMILIES if family.format is template), "default")
    outline = read_outline(template, variables)
    if renderer == "auto":
        fits = (family.name for family in FAMILIES if family.format is None and not family.differs(outline))
        return next(fits, "default")
    difference = BY_NAME[renderer].differs(outline)
    if difference:
        raise RendererError(
            f"this template does not behave like {renderer}: {difference}; renderer='auto' takes any template"
        )
    return renderer
