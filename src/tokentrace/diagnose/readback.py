"""What the model writes, by its grammar, and what of it is not the same once it is written and read back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import TokentraceError
from ..formats.dialects import dialect_of
from ..rendering.renderer import Renderer
from ..study.probes import ANSWER, THOUGHT, USER, call, calling
from .cases import TOOLS
from .field_texts import Indent, call_ids


@dataclass(frozen=True, slots=True)
class Writing:
    """What the model writes, and what of it cannot be read back."""

    dialect: str | None
    reasoning: tuple[str, str] | None
    calls: str
    notes: tuple[str, ...]
    tried: int
    unreadable: tuple[str, ...]
    indent: Indent | None = None
    """How arguments are indented; None where they are not."""

    @property
    def altered(self) -> tuple[str, ...]:
        """Arguments that are not read back as they were given, where those of a plain call are."""
        if any(loss.startswith("a call: ") for loss in self.unreadable):
            return ()  # nothing is known of how the template writes them
        return tuple(dict.fromkeys(loss.partition(": ")[2] for loss in self.unreadable if ": argument " in loss))


_ODD: Final[Mapping[str, Any]] = {
    "text": "Line One\n\nline  \"two\" & 'three' \\four é 雨 <b>",
    "number": "12",
    "word": "true",
    "empty": "",
    "spaces": "  padded ",
}
_TYPED: Final[Mapping[str, Any]] = {
    "whole": 12,
    "part": 2.5,
    "truth": True,
    "none": None,
    "list": [1, "a"],
    "map": {"k": {}},
}
_TYPES: Final = [
    {"type": "function", "function": {"name": name, "description": "a tool", "parameters": parameters}}
    for properties in [{key: {"type": "string"} for key in ("key", *_ODD)} | {key: {} for key in _TYPED}]
    for parameters in [{"type": "object", "properties": properties}]
    for name in ("probe1", "probe2")
]
"""Tools as the parser knows them: text that looks like a number is text where the schema says so."""


def find_writing(renderer: Renderer) -> Writing:
    grammar = renderer.grammar(TOOLS)
    shown = "" if grammar.calls is None else grammar.calls.shown
    frame = grammar.reasoning
    tried, losses = 0, dict[str, None]()
    for name, message in _spoken(call_ids(renderer.study(TOOLS))):
        if message.get("tool_calls") and not renderer.study(TOOLS).forms.calls.are_shown:
            losses |= {"calls: the template writes none": None}
            continue
        found = list(_read_back(renderer.silent(), message))
        tried += 1
        losses |= dict.fromkeys(f"{name}: {loss}" for loss in found)
    return Writing(
        dialect_of(grammar.calls, grammar.channels),
        None if frame is None else (frame.open, frame.close),
        "channels" if grammar.channels is not None else shown,
        grammar.notes,
        tried,
        tuple(losses),
    )


def _spoken(ids: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def calls(*arguments: Mapping[str, Any]) -> list[dict[str, Any]]:
        return [{**call(n + 1, given), "id": ids[n]} for n, given in enumerate(arguments)]

    yield "an answer", ANSWER
    yield "an answer with space around it", {"role": "assistant", "content": "\n answer \n\n"}
    yield "reasoning and an answer", THOUGHT
    yield "a call", calling(*calls({"key": "value"}))
    yield "a call without arguments", calling(*calls({}))
    yield "a call with odd strings", calling(*calls(_ODD))
    yield "a call with numbers, lists and maps", calling(*calls(_TYPED))
    yield "words and a call", calling(*calls({"key": "value"}), content="answer")
    yield "two calls", calling(*calls({"key": "value"}, {"key": "other"}))
    yield "all at once", calling(*calls({"key": "value"}, {}), content="answer", reasoning_content="thought")


def _read_back(renderer: Renderer, message: Mapping[str, Any]) -> Iterator[str]:
    """What of a message is not the same after it was written and read."""
    try:
        rendered = renderer.render([USER, message], tools=_TYPES)
    except TokentraceError as error:
        yield f"refused ({error})"
        return
    turn = next((turn for turn in rendered.turns if turn.message == 1), None)
    if turn is None:
        yield "the template writes no turn for it"
        return
    ids = rendered.ids
    parsed = renderer.parse_response(ids[turn.start : turn.stop], tools=_TYPES, prompt_ids=ids[: turn.start])
    unwritten = {one.field for one in rendered.lost if one.message == 1}
    for name, given, read in (
        ("content", message.get("content") or "", parsed.content or ""),
        ("reasoning_content", message.get("reasoning_content") or "", parsed.reasoning_content or ""),
    ):
        if given != read and name in unwritten:
            yield f"{name} is not written"
        elif given != read:
            same = given.strip() == read.strip()
            yield f"{name} loses the space around it" if same else f"{name} {given!r} is read as {read!r}"
    given_calls = [one["function"] for one in message.get("tool_calls", ())]
    read_calls = parsed.tool_calls
    if len(given_calls) != len(read_calls):
        yield f"{len(given_calls)} calls are read as {len(read_calls)}"
        return
    for function, found in zip(given_calls, read_calls, strict=True):
        if function["name"] != found.name:
            yield f"name {function['name']!r} is read as {found.name!r}"
        arguments = found.arguments if isinstance(found.arguments, Mapping) else {}
        for key, value in function["arguments"].items():
            if key not in arguments or arguments[key] != value or type(arguments[key]) is not type(value):
                found_as = f"is read as {arguments[key]!r}" if key in arguments else "is not read"
                yield f"argument {key} {value!r} {found_as}"
