"""What a model writes, by its grammar, and what differs once it is rendered and parsed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from ..errors import TokentraceError
from ..formats.dialects import dialect_of
from ..rendering.renderer import Renderer
from ..study.probes import ANSWER, THOUGHT, USER, call, calling
from .cases import TOOLS
from .field_texts import call_ids


@dataclass(frozen=True, slots=True)
class Writing:
    """The grammar of a turn, and what is not read back."""

    dialect: str | None
    reasoning: tuple[str, str] | None
    calls: str
    notes: tuple[str, ...]
    tried: int
    unreadable: tuple[str, ...]

    @property
    def altered(self) -> tuple[str, ...]:
        """Arguments that are not read back, where those of a plain call are."""
        if any(loss.startswith("a call: ") for loss in self.unreadable):
            return ()
        return tuple(dict.fromkeys(loss.partition(": ")[2] for loss in self.unreadable if ": argument " in loss))


_STRINGS: Final[Mapping[str, Any]] = {
    "text": "Line One\n\nline  \"two\" & 'three' \\four é 雨 <b>",
    "number": "12",
    "word": "true",
    "empty": "",
    "spaces": "  padded ",
}
_VALUES: Final[Mapping[str, Any]] = {
    "whole": 12,
    "part": 2.5,
    "truth": True,
    "none": None,
    "list": [1, "a"],
    "map": {"k": {}},
}
_SCHEMA: Final = {
    "type": "object",
    "properties": {key: {"type": "string"} for key in ("key", *_STRINGS)} | {key: {} for key in _VALUES},
}
_TYPED_TOOLS: Final = [
    {"type": "function", "function": {"name": name, "description": "a tool", "parameters": _SCHEMA}}
    for name in ("probe1", "probe2")
]
"""Tools for the parser: text that looks like a number stays text where the schema says so."""


def find_writing(renderer: Renderer) -> Writing:
    grammar, study = renderer.grammar(TOOLS), renderer.study(TOOLS)
    frame = grammar.reasoning
    tried, losses = 0, dict[str, None]()
    for name, message in _replies(call_ids(study)):
        if message.get("tool_calls") and not study.forms.calls.are_shown:
            losses["calls: the template writes none"] = None
            continue
        tried += 1
        losses |= dict.fromkeys(f"{name}: {loss}" for loss in _losses(renderer.silent(), message))
    return Writing(
        dialect_of(grammar.calls, grammar.channels),
        None if frame is None else (frame.open, frame.close),
        "channels" if grammar.channels is not None else "" if grammar.calls is None else grammar.calls.outline,
        grammar.notes,
        tried,
        tuple(losses),
    )


def _replies(ids: Sequence[str]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    def calls(*arguments: Mapping[str, Any], **fields: Any) -> Mapping[str, Any]:
        return calling(*({**call(n + 1, one), "id": ids[n]} for n, one in enumerate(arguments)), **fields)

    plain = {"key": "value"}
    yield "an answer", ANSWER
    yield "an answer with space around it", {"role": "assistant", "content": "\n answer \n\n"}
    yield "reasoning and an answer", THOUGHT
    yield "a call", calls(plain)
    yield "a call without arguments", calls({})
    yield "a call with odd strings", calls(_STRINGS)
    yield "a call with numbers, lists and maps", calls(_VALUES)
    yield "words and a call", calls(plain, content="answer")
    yield "two calls", calls(plain, {"key": "other"})
    yield "all at once", calls(plain, {}, content="answer", reasoning_content="thought")


def _losses(renderer: Renderer, message: Mapping[str, Any]) -> Iterator[str]:
    """Yield what of a message differs after rendering and parsing it."""
    try:
        rendered = renderer.render([USER, message], tools=_TYPED_TOOLS)
    except TokentraceError as error:
        yield f"refused ({error})"
        return
    turn = next((turn for turn in rendered.turns if turn.message == 1), None)
    if turn is None:
        yield "the template writes no turn for it"
        return
    ids, lost = rendered.ids, {one.field for one in rendered.lost if one.message == 1}
    parsed = renderer.parse_response(ids[turn.start : turn.stop], tools=_TYPED_TOOLS, prompt_ids=ids[: turn.start])
    for name, text in (("content", parsed.content), ("reasoning_content", parsed.reasoning_content)):
        expected, actual = message.get(name) or "", text or ""
        if expected == actual:
            continue
        same = expected.strip() == actual.strip()
        changed = "loses the space around it" if same else f"{expected!r} is read as {actual!r}"
        yield f"{name} is not written" if name in lost else f"{name} {changed}"
    functions = [one["function"] for one in message.get("tool_calls", ())]
    if [one["name"] for one in functions] != [one.name for one in parsed.tool_calls]:
        yield f"{len(functions)} calls are read as {[one.name for one in parsed.tool_calls]}"
        return
    for function, read in zip(functions, parsed.tool_calls, strict=True):
        arguments = read.arguments if isinstance(read.arguments, Mapping) else {}
        for key, value in function["arguments"].items():
            if key not in arguments or (arguments[key], type(arguments[key])) != (value, type(value)):
                actual = f"is read as {arguments[key]!r}" if key in arguments else "is not read"
                yield f"argument {key} {value!r} {actual}"
