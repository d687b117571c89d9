"""Lost text: text of a message that is not in the spans of its origin, and so reaches no token.

What a template drops from the past by design (reasoning) is *dropped*. Text in other letters or marks
(``content|lower``) is *altered*, and a note reports it. Not lost are white space, delimiters that a template writes
itself (``</think>``), and `BOOKKEEPING` fields, which are not text for the model.
"""

from __future__ import annotations

import bisect
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

import msgspec

from ..computed import computed
from ..conversation.forms import texts_of
from ..conversation.messages import Messages
from ..errors import LostTextError, LostTextWarning, place
from ..study.forms import TemplateForms
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, UNKNOWN, FieldPath, Origin
from ..template.trace import Rendering

BOOKKEEPING: Final = frozenset(
    {
        *("role", "id", "type", "object", "index", "status", "name", "tool_call_id", "call_id", "model", "created"),
        *("finish_reason", "stop_reason", "usage", "created_at", "timestamp", "metadata", "annotations", "logprobs"),
        *("cache_control", "prompt_token_ids", "generation_token_ids", "generation_log_probs", "token_ids"),
        *("train", "weight", "loss", "trainable", "mask", "masked"),
    }
)
"""Fields of a message that are about it and not in it: that a template does not write them is no loss."""

PAST_REASONING: Final = "past_reasoning"
"""The policy of templates that show the reasoning of the last turn, and not that of turns before it."""

_DELIMITERS: Final = re.compile(r"(?:\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\]))+\s*")
_CALL: Final = BOOKKEEPING | {"function", "arguments"}
_FUNCTION: Final = frozenset({"name", "arguments"})
_JSON: Final = json.JSONDecoder(strict=False)
_MOST: Final = 50_000
"""Values of one field that are searched, and _DEEP how deep: a value may contain itself."""
_DEEP: Final = 160


class LostPolicy(StrEnum):
    """What happens if text reaches no token."""

    WARN = "warn"
    ERROR = "error"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Lost:
    """A field of which some text, or all, reached no token. `message` is None for a tool."""

    message: int | None
    field: str
    why: str
    text: str
    """What is missing."""
    policy: str = ""
    """The policy that drops it by design; empty for what is lost."""

    def __str__(self) -> str:
        excerpt = self.text if len(self.text) <= 80 else f"{self.text[:60]}…{self.text[-15:]}"
        return f"{place(self.message, self.field)}{self.why}: {excerpt!r}"


class LeftOut(NamedTuple):
    """Text that is not written as in its message."""

    lost: list[Lost]
    dropped: list[Lost]
    """Text that the template drops by design."""
    altered: list[str]
    """A note for each field that is written with other letters or marks."""


def report_lost(lost: Sequence[Lost], policy: LostPolicy) -> None:
    """Warn or raise, as the policy says, if anything is lost."""
    if not lost or policy is LostPolicy.IGNORE:
        return
    if policy is LostPolicy.ERROR:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        one = lost[0]
        raise LostTextError(f"{one.why}: {one.text[:80]!r}{more}", message=one.message, field=one.field, lost=lost)
    excerpt = "; ".join(map(str, lost[:3])) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
    warning = LostTextWarning(f"text reached no token: {excerpt} (rendered.lost lists it; lost='error' or 'ignore')")
    frame, level = sys._getframe(0), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tokentrace":
        frame, level = frame.f_back, level + 1
    warnings.warn(warning, stacklevel=level)


def find_lost(
    rendering: Rendering,
    messages: Messages,
    forms: TemplateForms,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> LeftOut:
    """What of `messages` (from message `first` on) and of `tools` is lost, dropped by design, or altered."""
    finder = _LostFinder(rendering, messages, forms)
    for index in range(first, len(messages)):
        for key, value in messages[index].items():
            has_text = isinstance(value, (str, list, tuple, Mapping)) and value and key not in BOOKKEEPING
            if has_text and not finder.is_whole(("messages", index, key), value):
                finder.check_field(Origin.of(index, key), value)
    origins = [origin for origin in finder.texts if origin[0] == "tools"] if tools else []
    if ("tools",) not in origins:  # else all are printed, as a list
        for at in sorted(set(range(len(tools))).difference(*(origin[1:2] for origin in origins))):
            name = str(tools[at].get("function", tools[at])["name"])
            finder.left_out.lost.append(Lost(None, f"tools.{at}", "the template writes nothing of it", name))
    return finder.left_out


class _LostFinder:
    """Compares fields of messages with the spans that came from them."""

    def __init__(self, rendering: Rendering, messages: Messages, forms: TemplateForms) -> None:
        self.left_out = LeftOut([], [], [])
        self._rendering, self._messages, self._forms = rendering, messages, forms
        self._budget = 0
        self.texts: dict[FieldPath, list[str]] = {}
        """The text that came from each field, span by span."""
        start = 0
        for end, origin in zip(rendering.ends, rendering.origins, strict=True):
            if origin is not None:
                self.texts.setdefault(origin, []).append(rendering.text[start:end])
            start = end

    def is_whole(self, path: FieldPath, value: Any) -> bool:
        """True for a field in one span as it is, and for usual calls with all their names and arguments.

        Most fields are: `check_field` takes ten times as long.
        """
        if path[-1] != "tool_calls" or type(value) is not list:
            return self.texts.get(path) == [value]
        for at, call in enumerate(value):
            function = call.get("function") if type(call) is dict and call.keys() <= _CALL else None
            if type(function) is not dict or function.keys() != _FUNCTION:
                return False
            base, arguments = (*path, at, "function"), function["arguments"]
            texts = self.texts.get((*base, "arguments"), [])
            if type(arguments) is dict and len(texts) == 1:
                try:
                    texts = [msgspec.json.decode(texts[0])]
                except msgspec.DecodeError:
                    return False
            if texts != [arguments] or self.texts.get((*base, "name")) != [function["name"]]:
                return False
        return True

    def check_field(self, origin: Origin, value: Any) -> None:
        """Report what is missing of a field of a message."""
        self._budget = _MOST
        message, name = self._messages[origin[1]], origin[2]  # type: ignore[index]
        if name == "tool_calls" and isinstance(value, list | tuple):
            for at, call in enumerate(value if origin not in self.texts else ()):  # else it was printed as it is
                if isinstance(call, Mapping):
                    self._check_call(origin.at(at), call)
        elif name == "content" and not isinstance(value, Mapping):
            for path, text in texts_of(message):
                self._check_text(Origin((*origin[:2], *path)), text)
        else:  # reasoning may have several names, of which the template reads one
            names = REASONING_FIELDS if name in REASONING_FIELDS and isinstance(value, str) else ()
            same = (Origin((*origin[:2], other)) for other in names if message.get(other) == value)
            if not any(self._is_present(other, value) for other in same):
                self._check_value(origin, value)

    def _check_call(self, base: Origin, call: Mapping[str, Any]) -> None:
        """Report what is missing of a call: as a whole if nothing of it is written."""
        function = call.get("function")
        holder, inner = (function, base.at("function")) if isinstance(function, Mapping) else (call, base)
        name, arguments = holder.get("name"), holder.get("arguments")
        if base not in self._calls:
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
            self._add(base, f"{name}({text})")
            return
        for path, fields in {base: call, inner: holder}.items():
            for key in fields:
                if key not in _CALL:
                    self._check_value(path.at(key), fields[key])
        if isinstance(name, str) and not self._is_present(base.at("id"), name):  # Kimi writes it there
            self._check_text(inner.at("name"), name)
        self._check_arguments(inner.at("arguments"), arguments)

    @computed
    def _calls(self) -> set[FieldPath]:
        """The calls of which something is written."""
        return {origin[:4] for origin in self.texts if len(origin) > 3 and origin[2] == "tool_calls"}

    def _check_arguments(self, origin: Origin, arguments: Any) -> None:
        """Report each text, number and key of a call's arguments that is not written."""
        if isinstance(arguments, str):
            value = _as_json(arguments)
            is_read = not value or any(path[: len(origin)] == origin for path in self.texts)
            if self._is_present(origin, arguments) or not isinstance(value, Mapping) or not is_read:
                self._check_text(origin, arguments)
                return
            arguments = value
        if origin not in self.texts or _as_json("".join(self.texts[origin])) != arguments:
            self._check_value(origin, arguments or {}, keys=True)

    def _check_value(self, origin: Origin, value: Any, *, keys: bool = False) -> bool:
        """Report texts in a value that are missing; with `keys` also numbers, and keys whose value is there.

        Returns whether anything is. True, false and null a template may write in other words.
        """
        self._budget -= 1
        if len(origin) > _DEEP or self._budget < 0:
            return False
        if isinstance(value, (Mapping, list, tuple)):
            missing = False
            for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
                place = origin.at(key if isinstance(key, (str, int)) else str(key))
                missing |= self._check_value(place, inner, keys=keys) or (
                    keys and isinstance(key, str) and self._check_text(place.at(KEY), key)
                )
            return missing
        if keys and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
            value = json.dumps(value)
        return isinstance(value, str) and self._check_text(origin, value)

    def _check_text(self, origin: Origin, text: str) -> bool:
        """Report what is missing of a text: as dropped if it is reasoning of the past, else as lost."""
        gaps = self._gaps(origin, text)
        if not gaps:
            return False
        index, message = origin.message or 0, self._messages[origin.message or 0]
        missing = "…".join(text[start:stop] for start, stop in gaps)
        end = text.rfind("</think>")
        inline = origin.field == "content" and end >= 0 and not any(text[end + 8 : stop].strip() for _, stop in gaps)
        is_past = index < len(self._messages) - 1 and message["role"] == "assistant"
        is_reasoning = (inline or origin.field in REASONING_FIELDS) and is_past
        if is_reasoning and self._forms.shows_reasoning(bool(message.get("tool_calls")), inline):
            why = "the template shows the reasoning of the last turn only"
            self.left_out.dropped.append(Lost(index, _path(origin), why, missing, PAST_REASONING))
        else:
            is_all = sum(len(text[start:stop].strip()) for start, stop in gaps) == len(text.strip())
            self._add(origin, missing, is_all=is_all)
        return True

    def _gaps(self, origin: Origin, text: str) -> list[tuple[int, int]]:
        """The stretches of a text that are not written, without white space and delimiters."""
        if self._is_present(origin, text):
            return []
        pieces = self.texts.get(origin, [])
        if _letters(text) and _letters(text) in _letters("".join(pieces)):
            self.left_out.altered.append(f"{place(origin.message, _path(origin))}text is not written as in the message")
            return []
        scaffold = self._scaffold.get(origin.message or 0, "") + "\0" + self._scaffold.get(-1, "")
        return [
            (start, stop)
            for start, stop in _uncovered(text, pieces)
            if not _DELIMITERS.fullmatch(text[start:stop])
            or not all(word in scaffold for word in text[start:stop].split())
        ]

    @computed
    def _scaffold(self) -> dict[int, str]:
        """The template's own text in each message's turn."""
        pieces: dict[int, list[str]] = {}
        for text, turn, origin in self._rendering.spans():
            if origin is None:
                pieces.setdefault(turn, []).append(text)
        return {turn: "\0".join(some) for turn, some in pieces.items()}

    def _is_present(self, origin: Origin, text: str) -> bool:
        """Whether a text (stripped, as JSON or as Python) is in the spans of its field, or of a value around it."""
        around = (origin[:length] for length in range(len(origin), 1, -1))
        outputs = ["".join(self.texts[path]) for path in (*around, UNKNOWN) if path in self.texts]
        stripped = text.strip()
        return any(stripped in output for output in outputs) or any(
            form[1:-1] in output
            for form in ((json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text)) if outputs else ())
            for output in outputs
        )

    def _add(self, origin: Origin, missing: str, *, is_all: bool = True) -> None:
        """Report lost text."""
        if not is_all:
            why = "the template leaves out a part of it"
        elif any(path[:2] == origin[:2] and path[2:] != ("role",) for path in self.texts if len(path) > 2):
            why = "the template does not write it"
        else:
            why = "the template writes nothing of this message"
        self.left_out.lost.append(Lost(origin.message or 0, _path(origin), why, missing))


def _path(origin: Origin) -> str:
    return ".".join(map(str, origin.path))


def _uncovered(text: str, pieces: Sequence[str]) -> list[tuple[int, int]]:
    """The stretches of a text that no written piece covers, without those that are only white space."""
    covered: list[tuple[int, int]] = []
    cursor = 0
    for piece in pieces:
        remaining = next((form for form in _forms(piece) if form in text), piece)
        for _ in range(64):
            if not remaining:
                break
            size = bisect.bisect_left(  # of its longest beginning that is in the text
                range(1, len(remaining) + 1), True, key=lambda length: remaining[:length] not in text
            )
            if size:
                at = text.find(remaining[:size], cursor)
                at = text.find(remaining[:size]) if at < 0 else at
                cursor = at + size
                covered.append((at, cursor))
            remaining = remaining[max(size, 1) :]
    gaps: list[tuple[int, int]] = []
    end = 0
    for start, stop in [*sorted(covered), (len(text), len(text))]:
        if start > end and text[end:start].strip():
            gaps.append((end, start))
        end = max(end, stop)
    return gaps


def _forms(piece: str) -> Iterator[str]:
    """The texts that a written piece may stand for: itself, or what it is JSON of."""
    yield piece
    bare = piece[1:-1] if len(piece) > 1 and piece[0] == piece[-1] and piece[0] in "\"'" else piece
    value = _as_json(f'"{bare}"')
    yield from (form for form in (bare, value, piece.strip()) if isinstance(form, str) and form)


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _as_json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
