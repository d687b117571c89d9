"""Lost text: text of a message that is not in the spans of its origin, and so reaches no token.

Past reasoning that a template leaves out by design is *dropped*. Other case or punctuation is
*altered*. White space, the template's delimiters and `BOOKKEEPING` fields are never lost.
"""

import bisect
import itertools
import json
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from ..computed import computed
from ..conversation.forms import texts_of
from ..conversation.messages import REASONING_FIELDS, Messages
from ..errors import LostTextError, LostTextWarning, place
from ..study.forms import TemplateForms
from ..template.origin import KEY, UNKNOWN, FieldPath, Origin
from ..template.trace import Rendering

BOOKKEEPING = frozenset(
    [
        *("role", "id", "type", "object", "index", "status", "name", "tool_call_id", "call_id"),
        *("model", "created", "created_at", "timestamp", "finish_reason", "stop_reason", "usage"),
        *("metadata", "annotations", "logprobs", "cache_control"),
        *("prompt_token_ids", "generation_token_ids", "generation_log_probs", "token_ids"),
        *("train", "weight", "loss", "trainable", "mask", "masked"),
    ]
)
"""Fields with metadata, which a template need not write."""

_DELIMITERS = re.compile(r"(?:\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\]))+\s*")
_CALL = BOOKKEEPING | {"function", "arguments"}
_JSON = json.JSONDecoder(strict=False)
_MOST = 50_000
"""How many values of one field are searched, at most, and `_DEEP` how deep."""
_DEEP = 160

Text = tuple[Origin, str]


class LostPolicy(StrEnum):
    """What to do if text reaches no token."""

    WARN = "warn"
    ERROR = "error"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Lost:
    """A field with text that reached no token."""

    message: int | None
    """None for a tool."""
    field: str
    why: str
    text: str

    def __str__(self) -> str:
        excerpt = self.text if len(self.text) <= 80 else f"{self.text[:60]}…{self.text[-15:]}"
        return f"{place(self.message, self.field)}{self.why}: {excerpt!r}"


class LeftOut(NamedTuple):
    """Text that is not written as in its message. Each altered field has a note."""

    lost: list[Lost]
    dropped: list[Lost]
    altered: list[str]


def report_lost(lost: Sequence[Lost], policy: LostPolicy) -> None:
    """Raise LostTextError or warn, as the policy says."""
    if not lost or policy is LostPolicy.IGNORE:
        return
    if policy is LostPolicy.ERROR:
        one, more = lost[0], f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        problem = f"{one.why}: {one.text[:80]!r}{more}"
        raise LostTextError(problem, message=one.message, field=one.field, lost=lost)
    excerpt = "; ".join(map(str, lost[:3])) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
    advice = "see result.lost; or set lost='error' or 'ignore'"
    warning = LostTextWarning(f"text reached no token: {excerpt} ({advice})")
    frame, level = sys._getframe(0), 1
    while (
        frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tokentrace"
    ):
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
    """Compare `messages` (from `first` on) and `tools` with what the template wrote."""
    finder = _LostFinder(rendering, messages, forms)
    spans = zip([0, *rendering.ends], rendering.ends, strict=False)  # one start too many
    last = dict(zip(rendering.origins, spans, strict=True))
    for index in range(first, len(messages)):
        for key, value in messages[index].items():
            has_text = key not in BOOKKEEPING and isinstance(value, (str, list, tuple, Mapping)) and value
            if has_text and not _is_whole(rendering.text, last, ("messages", index, key), value):
                finder.check_field(Origin.of(index, key), value)
    origins = [origin for origin in last if origin is not None and origin[0] == "tools"] if tools else []
    if tools and ("tools",) not in origins:  # else all are printed, as a list
        for at in sorted(set(range(len(tools))).difference(*(origin[1:2] for origin in origins))):
            name = str(tools[at].get("function", tools[at])["name"])
            finder.left_out.lost.append(Lost(None, f"tools.{at}", "the template leaves it out", name))
    return finder.left_out


def _is_whole(text: str, last: Mapping[Any, tuple[int, int]], path: FieldPath, value: Any) -> bool:
    """A quick test: does the last span of each value hold it verbatim?"""
    if isinstance(value, str):
        start, end = last.get(path, (0, 0))
        return end - start == len(value) and text.startswith(value, start)
    if path[-1] != "tool_calls" or type(value) is not list:
        return False
    for at, call in enumerate(value):
        function = call.get("function") if type(call) is dict and call.keys() <= _CALL else None
        if type(function) is not dict or function.keys() != {"name", "arguments"}:
            return False
        base, arguments = (*path, at, "function"), function["arguments"]
        start, end = last.get((*base, "arguments"), (0, 0))
        actual: Any = text[start:end]
        try:
            actual = actual if actual == arguments else msgspec.json.decode(actual)
        except msgspec.DecodeError:
            return False
        start, end = last.get((*base, "name"), (0, 0))
        if actual != arguments or text[start:end] != function["name"]:
            return False
    return True


class _LostFinder:
    def __init__(self, rendering: Rendering, messages: Messages, forms: TemplateForms) -> None:
        self.left_out = LeftOut([], [], [])
        self._rendering, self._messages, self._forms = rendering, messages, forms

    @computed
    def _texts(self) -> dict[FieldPath, list[str]]:
        texts: dict[FieldPath, list[str]] = {}
        for text, turn, origin in self._rendering.spans():
            texts.setdefault(("scaffold", turn) if origin is None else origin, []).append(text)
        return texts

    def check_field(self, origin: Origin, value: Any) -> None:
        """Report missing text; a missing key only if its value is there."""
        missing = origin
        for path, text in itertools.islice(self._texts_in(origin, value), _MOST):
            is_inside = path.is_key and missing[: len(path) - 1] == path[:-1]
            if text and not is_inside and self._is_missing(path, text):
                missing = path

    def _texts_in(self, origin: Origin, value: Any) -> Iterable[Text]:
        message, name = self._messages[origin[1]], origin[2]  # type: ignore[index]
        if name == "content" and not isinstance(value, Mapping):
            return ((Origin((*origin[:2], *path)), text) for path, text in texts_of(message))
        if name == "tool_calls" and isinstance(value, (list, tuple)):
            values = enumerate(value if origin not in self._texts else ())  # else it was printed as it is
            calls = ((origin.at(at), call) for at, call in values if isinstance(call, Mapping))
            return itertools.chain.from_iterable(itertools.starmap(self._texts_of_call, calls))
        names = REASONING_FIELDS if name in REASONING_FIELDS and isinstance(value, str) else ()
        same = (Origin((*origin[:2], other)) for other in names if message.get(other) == value)
        return () if any(self._is_present(other, value) for other in same) else texts_in(origin, value)

    def _texts_of_call(self, base: Origin, call: Mapping[str, Any]) -> Iterator[Text]:
        """The texts of a call. Reports the whole call if it is left out."""
        function = call.get("function")
        holder, inner = (function, base.at("function")) if isinstance(function, Mapping) else (call, base)
        name, arguments = holder.get("name"), holder.get("arguments")
        if not any(path[:4] == base for path in self._texts):
            is_text = isinstance(arguments, str)
            text = arguments if is_text else json.dumps(arguments, ensure_ascii=False, default=str)
            self._add(base, f"{name}({text})")
            return
        for path, fields in {base: call, inner: holder}.items():
            for key in fields:
                if key not in _CALL:
                    yield from texts_in(path.at(key), fields[key])
        if isinstance(name, str) and not self._is_present(base.at("id"), name):  # Kimi writes it there
            yield inner.at("name"), name
        origin, value = inner.at("arguments"), arguments
        if isinstance(arguments, str):
            value = _as_json(arguments)
            is_read = not value or any(path[: len(origin)] == origin for path in self._texts)
            if self._is_present(origin, arguments) or not isinstance(value, Mapping) or not is_read:
                yield origin, arguments
                return
        if _as_json("".join(self._texts.get(origin, ()))) != value:
            yield from texts_in(origin, value or {}, keys=True)

    def _is_missing(self, origin: Origin, text: str) -> bool:
        """Report what is missing of a text: past reasoning as dropped, else as lost."""
        if self._is_present(origin, text):
            return False
        pieces, name = self._texts.get(origin, []), ".".join(map(str, origin.path))
        if _letters(text) and _letters(text) in _letters("".join(pieces)):
            where = place(origin.message, name)
            self.left_out.altered.append(f"{where}the template writes this text differently")
            return False
        remaining = _uncovered(text, pieces)
        gaps = [gap for gap in remaining.split("\0") if gap.strip()]
        gaps = [gap for gap in gaps if not self._is_delimiter(gap, origin.message)]
        if not gaps:
            return False
        index, message = origin.message or 0, self._messages[origin.message or 0]
        missing, (_, tag, after) = "…".join(gaps), remaining.rpartition("</think>")
        inline = origin.field == "content" and bool(tag) and not after.replace("\0", "").strip()
        is_past = index < len(self._messages) - 1 and message["role"] == "assistant"
        is_reasoning = (inline or origin.field in REASONING_FIELDS) and is_past
        if is_reasoning and self._forms.shows_reasoning(bool(message.get("tool_calls")), inline):
            self.left_out.dropped.append(Lost(index, name, "the template omits past reasoning", missing))
        else:
            is_all = sum(len(gap.strip()) for gap in gaps) == len(text.strip())
            self._add(origin, missing, is_all=is_all)
        return True

    def _is_delimiter(self, text: str, message: int | None) -> bool:
        """Whether the template itself writes all tags in a text that has nothing else."""
        if not _DELIMITERS.fullmatch(text):
            return False
        turns = (-1,) if message is None else (message, -1)
        written = [self._texts.get(("scaffold", turn), []) for turn in turns]
        return all(any(word in piece for pieces in written for piece in pieces) for word in text.split())

    def _is_present(self, origin: Origin, text: str) -> bool:
        """Whether a text is in the spans of its field or of a value around it."""
        around = (origin[:length] for length in range(len(origin), 1, -1))
        outputs = ["".join(self._texts[path]) for path in (*around, UNKNOWN) if path in self._texts]
        if not outputs:
            return False
        quoted = (json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text))
        forms = [text.strip(), *(form[1:-1] for form in quoted)]
        return any(form in output for form in forms for output in outputs)

    def _add(self, origin: Origin, missing: str, *, is_all: bool = True) -> None:
        if not is_all:
            why = "the template leaves out part of it"
        elif any(path[:2] == origin[:2] and path[2:] != ("role",) for path in self._texts if len(path) > 2):
            why = "the template leaves it out"
        else:
            why = "the template leaves out the whole message"
        self.left_out.lost.append(Lost(origin.message or 0, ".".join(map(str, origin.path)), why, missing))


def texts_in(origin: Origin, value: Any, *, keys: bool = False) -> Iterator[Text]:
    """The texts in a value, with `keys` also numbers and keys; other values are empty."""
    if len(origin) > _DEEP:
        return
    if isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            path = origin.at(key if isinstance(key, (str, int)) else str(key))
            yield from texts_in(path, inner, keys=keys)
            if keys and isinstance(key, str):
                yield path.at(KEY), key
    elif keys and isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 1e300:
        value = json.dumps(value)
    yield origin, value if isinstance(value, str) else ""


def _uncovered(text: str, pieces: Sequence[str]) -> str:
    """A text without what each written piece, or its beginning, covers."""
    for piece in pieces:
        bare = piece[1:-1] if len(piece) > 1 and piece[0] == piece[-1] and piece[0] in "\"'" else piece
        value = _as_json(f'"{bare}"')
        forms = (form for form in (piece, bare, value, piece.strip()) if isinstance(form, str) and form)
        match = next((form for form in forms if form in text), "")
        if not match:
            lengths = range(1, len(piece) + 1)
            match = piece[
                : bisect.bisect_left(lengths, True, key=lambda length: piece[:length] not in text)
            ]
        text = text.replace(match, "\0", 1) if match else text
    return text


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _as_json(text: str) -> Any:
    try:
        return _JSON.decode(text)
    except (ValueError, RecursionError):
        return None
