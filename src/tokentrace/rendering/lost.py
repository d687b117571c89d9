"""Lost text: what was given and reached no token.

The trace says what each span of a rendering came from. Text that does not stand in the spans of its origin is *lost*: a
whole field, or a part of it. What a template drops from the past by design (the reasoning of turns that are not the
last) is *dropped*, under the name of that policy. The rest:

- white space is never lost: templates strip it;
- delimiters that a template takes out of content and writes itself (``</think>``) are not lost;
- `BOOKKEEPING` fields are not text for the model: ids, names of results, what a data set says about training;
- text that is written with other letters or marks (``content|lower``) is not lost but *altered*: a note says so.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, NamedTuple

from ..computed import computed
from ..conversation.forms import texts_of
from ..conversation.messages import Messages
from ..conversation.place import Place
from ..conversation.values import check_depth
from ..errors import InputError, LostTextError, LostTextWarning, place
from ..study.forms import TemplateForms
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, UNKNOWN, FieldPath, Origin
from ..template.spans import Rendering

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


_DEEP: Final = 160
"""No value that was checked is nested deeper than that."""
_DELIMITERS: Final = re.compile(r"(?:\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\]))+\s*")
_MOST_MATCHES: Final = 64
"""In how many pieces a field's text is looked for: one that was changed in more places counts as lost from there on."""


_RESPELLED: Final = "text is not written as in the message"
_CALL: Final = frozenset({"function", "name", "arguments"})
"""The keys of calls and their functions that are looked at one by one."""

Gap = tuple[int, int]
"""A stretch of a text that is missing: from, to."""


class LostPolicy(StrEnum):
    """What happens where given text reaches no token."""

    WARN = "warn"
    ERROR = "error"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True)
class Lost:
    """A given field of which some text, or all, reached no token. `message` is None for a tool."""

    message: int | None
    field: str
    why: str
    text: str
    """What is missing."""
    policy: str = ""
    """The policy that drops it by design; empty for what is lost."""

    def __str__(self) -> str:
        shown = self.text if len(self.text) <= 80 else f"{self.text[:60]}…{self.text[-15:]}"
        return f"{place(self.message, self.field)}{self.why}: {shown!r}"


class LeftOut(NamedTuple):
    """What became of given text that is not written as it was given."""

    lost: list[Lost]
    dropped: list[Lost]
    """What the template drops by design."""
    altered: list[str]
    """A note for each field that is written with other letters or marks."""


def find_lost(
    rendering: Rendering,
    messages: Messages,
    forms: TemplateForms,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> LeftOut:
    """What of `messages` (from message `first` on) and of `tools` is lost, dropped by design, or altered."""
    return _Account(rendering, messages, forms).settle(tools, first)


def report_lost(lost: Sequence[Lost], policy: LostPolicy) -> None:
    """Warn or raise, as the policy says, if anything is lost."""
    if not lost or policy is LostPolicy.IGNORE:
        return
    if policy is LostPolicy.ERROR:
        more = f" (and {len(lost) - 1} more)" if len(lost) > 1 else ""
        one = lost[0]
        raise LostTextError(f"{one.why}: {one.text[:80]!r}{more}", message=one.message, field=one.field, lost=lost)
    some = "; ".join(map(str, lost[:3])) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
    warnings.warn(
        LostTextWarning(f"given text reached no token: {some} (rendered.lost lists it; lost='error' or 'ignore')"),
        stacklevel=_outside(),
    )


def _outside() -> int:
    """How many calls up the caller is that is not tokentrace's own."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == "tokentrace":
        frame, level = frame.f_back, level + 1
    return level


class _Account:
    """Every field of the messages compared with the spans that came from it."""

    def __init__(self, rendering: Rendering, messages: Messages, forms: TemplateForms) -> None:
        self._rendering = rendering
        self._messages = messages
        self._forms = forms
        self._lost: list[Lost] = []
        self._dropped: list[Lost] = []
        self._altered: list[str] = []
        ends, origins = rendering.ends, rendering.origins
        pieces = map(rendering.text.__getitem__, map(slice, [0, *ends], ends))
        self._texts: dict[FieldPath, list[str]] = {}
        """What is written of each field, piece by piece."""
        for origin, piece in itertools.compress(zip(origins, pieces, strict=True), origins):  # scaffold has no origin
            self._texts.setdefault(origin, []).append(piece)  # type: ignore[arg-type]

    def settle(self, tools: Sequence[Mapping[str, Any]], first: int) -> LeftOut:
        for index, message in enumerate(self._messages[first:], first):
            for key, value in message.items():
                if isinstance(value, (str, Sequence, Mapping)) and value and key not in BOOKKEEPING:
                    self._field(index, key, value)
        for at in self._unwritten(len(tools)) if tools else ():
            name = str(tools[at].get("function", tools[at])["name"])
            self._lost.append(Lost(None, f"tools.{at}", "the template writes nothing of it", name))
        return LeftOut(self._lost, self._dropped, self._altered)

    def _unwritten(self, count: int) -> list[int]:
        """The tools, of so many, of which nothing is written."""
        missing = set(range(count))
        for origin in self._rendering.origins:
            if origin is not None and origin[0] == "tools":
                missing.difference_update(origin[1:2])
                if not missing or len(origin) == 1:  # all, printed as a list
                    return []
        return sorted(missing)

    def _field(self, index: int, key: str, value: Any) -> None:
        written = self._texts.get(("messages", index, key))
        if written is not None and written[0] == value and len(written) == 1:
            return  # as nearly all are
        if key == "tool_calls" and not isinstance(value, (str, Mapping)):
            for at, call in enumerate(value):
                if isinstance(call, Mapping):
                    self._call(index, at, call)
        elif key in REASONING_FIELDS and isinstance(value, str):
            self._reasoning(index, key, value)
        elif key == "content" and not isinstance(value, Mapping):
            for path, text in texts_of(self._messages[index]):
                self._content(index, path, text)
        elif key == "content":
            self._leaves(Origin.of(index, key), value)
        else:
            self._unknown(Origin.of(index, key), value)

    # -- texts

    def _content(self, index: int, path: FieldPath, text: str) -> None:
        gaps = self._missing(Origin.of(index, *path), text)
        if not gaps:
            self._compare(Origin.of(index, *path), text)
        end = text.rfind("</think>") + len("</think>")
        is_reasoning = "</think>" in text and not any(text[end:stop].strip() for _, stop in gaps)
        self._report(index, path, text, gaps, inline=True, is_reasoning=is_reasoning)

    def _reasoning(self, index: int, key: str, text: str) -> None:
        message = self._messages[index]
        names = [name for name in REASONING_FIELDS if message.get(name) in (None, text)]
        for name in names:
            if self._shows(Origin.of(index, name), text):
                self._compare(Origin.of(index, name), text)
                return  # it goes by several names, and the template reads one of them
        gaps = self._missing(Origin.of(index, key), text)
        self._report(index, (key,), text, gaps, inline=False, is_reasoning=True)

    def _report(
        self, index: int, path: FieldPath, text: str, gaps: list[Gap], *, inline: bool, is_reasoning: bool
    ) -> None:
        """Reasoning of the past is dropped by design, if the template shows that of the last turn; the rest is lost."""
        message = self._messages[index]
        is_past = index < len(self._messages) - 1 and message["role"] == "assistant"
        if gaps and is_reasoning and is_past and self._forms.shows_reasoning(bool(message.get("tool_calls")), inline):
            why = "the template shows the reasoning of the last turn only"
            missing = "".join(text[start:stop] for start, stop in gaps)
            self._dropped.append(Lost(index, ".".join(map(str, path)), why, missing, PAST_REASONING))
        else:
            self._lose(index, path, text, gaps)

    # -- calls

    def _call(self, index: int, at: int, call: Mapping[str, Any]) -> None:
        base = Origin.of(index, "tool_calls", at)
        if base[:3] in self._texts and base not in self._called:
            return  # the list of calls was printed as it is
        function = call.get("function")
        holder, inner = (function, base.at("function")) if isinstance(function, Mapping) else (call, base)
        for path, fields in {base: call, inner: holder}.items():
            for key, value in fields.items():
                if key not in _CALL and key not in BOOKKEEPING and isinstance(value, (str, Sequence, Mapping)):
                    self._unknown(path.at(key), value)
        name, arguments = holder.get("name"), holder.get("arguments")
        if base not in self._called:
            text = f"{name}({_shown_arguments(arguments)})"
            self._lose(index, base.path, text, [(0, len(text))])
            return
        if isinstance(name, str) and not self._shows(inner.at("name"), name):
            in_id = name in "".join(self._texts.get(base.at("id"), ()))  # as Kimi writes it
            self._lose(index, inner.at("name").path, name, [] if in_id else [(0, len(name))])
        path = inner.at("arguments")
        if not isinstance(arguments, str):
            self._leaves(path, arguments or {})
        elif gaps := self._missing(path, arguments):
            value = _as_json(arguments)
            if isinstance(value, Mapping) and (not value or any(one[: len(path)] == path for one in self._texts)):
                self._leaves(path, value)
            else:
                self._lose(index, path.path, arguments, gaps)

    def _leaves(self, path: Origin, value: Any) -> None:
        """Each text and number in a value that is JSON for the model, and each key."""
        if path in self._texts and _as_json("".join(self._texts[path])) == value:
            return  # it was printed as a whole
        lost: dict[Origin, tuple[str, list[Gap]]] = {}
        for inner, leaf in _leaves_of(value, path):
            text = leaf if isinstance(leaf, str) else _number(leaf)
            if not text.strip() or self._above(inner, path, text):
                continue
            if gaps := self._missing(inner, text):
                lost[inner] = text, gaps
            elif isinstance(leaf, str):
                self._compare(inner, text)
        for inner, (text, gaps) in lost.items():
            if not inner.is_key or not any(other[: len(inner) - 1] == inner[:-1] for other in lost if other != inner):
                self._lose(path.message or 0, inner.path, text, gaps)

    def _above(self, path: Origin, base: Origin, text: str) -> bool:
        """True if a text stands in the text of a value around it, which was printed whole."""
        return any(
            _contains("".join(self._texts[path[:length]]), text)
            for length in range(len(path), len(base) - 1, -1)
            if path[:length] in self._texts
        )

    def _unknown(self, base: Origin, value: Any) -> None:
        """The texts in a field of which nothing is known."""
        try:
            check_depth(value, Place(field=str(base[-1])))
        except InputError:
            return  # it contains itself: no text of it could be shown
        missing = [
            leaf
            for path, leaf in itertools.islice(_leaves_of(value, base), 10_000)
            if isinstance(leaf, str) and leaf.strip() and not path.is_key
            if not self._above(path, base, leaf) and self._missing(path, leaf)
        ]
        if missing:
            text = "…".join(missing)
            self._lose(base.message or 0, base.path, text, [(0, len(text))])

    # -- what is missing

    @computed
    def _called(self) -> set[FieldPath]:
        """The calls of which something is written."""
        return {origin[:4] for origin in self._texts if len(origin) > 3 and origin[2] == "tool_calls"}

    @computed
    def _scaffold(self) -> dict[int, str]:
        """What the template itself wrote in each message's turn."""
        pieces: dict[int, list[str]] = {}
        for text, turn, origin in self._rendering.spans():
            if origin is None:
                pieces.setdefault(turn, []).append(text)
        return {turn: "\0".join(some) for turn, some in pieces.items()}

    @computed
    def _spoken(self) -> set[int | None]:
        """The messages of which more is written than their role."""
        fields = (origin for origin in self._texts if origin[0] == "messages" and len(origin) > 2)
        return {origin[1] for origin in fields if origin[2] != "role"}  # type: ignore[misc]

    def _shows(self, origin: Origin, text: str) -> bool:
        return origin in self._texts and not self._missing(origin, text)

    def _missing(self, origin: Origin, text: str) -> list[Gap]:
        """The stretches of a field's text that stand nowhere, white space aside."""
        pieces = self._texts.get(origin, [])
        if text.strip() in "".join(pieces) or _contains("".join(self._texts.get(UNKNOWN, ())), text):
            return []
        gaps = _gaps(text, pieces)
        written = self._scaffold.get(origin.message or 0, "") + "\0" + self._scaffold.get(-1, "") if gaps else ""
        return [(start, stop) for start, stop in gaps if not _is_written(text[start:stop], written)]

    def _compare(self, origin: Origin, text: str) -> None:
        """Note a text that is written, but not as it is in the message."""
        pieces = self._texts.get(origin, [])
        if not _contains("".join(pieces), text) and _is_respelled(text, pieces, _forms_in(text, pieces)):
            self._altered.append(f"{place(origin.message, '.'.join(map(str, origin.path)))}{_RESPELLED}")

    def _lose(self, index: int, path: Sequence[Any], text: str, gaps: Sequence[Gap]) -> None:
        if not gaps:
            return
        whole = sum(len(text[start:stop].strip()) for start, stop in gaps) == len(text.strip())
        if not whole:
            why = "the template leaves out a part of it"
        elif index in self._spoken:
            why = "the template does not write it"
        else:
            why = "the template writes nothing of this message"
        missing = "…".join(text[start:stop] for start, stop in gaps)
        self._lost.append(Lost(index, ".".join(map(str, path)), why, missing))


def _number(value: float) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # more digits than Python writes
        return ""


def _shown_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)


def _gaps(text: str, pieces: Sequence[str]) -> list[Gap]:
    """The stretches of a text that none of the written pieces covers, without those that are white space only."""
    forms = _forms_in(text, pieces)
    if _is_respelled(text, pieces, forms):
        return []
    covered: list[Gap] = []
    cursor = 0
    for piece, form in zip(pieces, forms, strict=True):
        rest = piece if form is None else form
        for _ in range(_MOST_MATCHES):
            size = _longest_prefix(rest, text)
            if size:
                at = text.find(rest[:size], cursor)
                at = text.find(rest[:size]) if at < 0 else at
                cursor = at + size
                covered.append((at, cursor))
            rest = rest[max(size, 1) :]
            if not rest:
                break
    gaps: list[Gap] = []
    end = 0
    for start, stop in [*sorted(covered), (len(text), len(text))]:
        if start > end and text[end:start].strip():
            gaps.append((end, start))
        end = max(end, stop)
    return gaps


def _forms_in(text: str, pieces: Sequence[str]) -> list[str | None]:
    """What each written piece stands for in a text; None for a piece that does not occur in it."""
    return [next((form for form in _forms_of(piece) if form in text), None) for piece in pieces]


def _is_respelled(text: str, pieces: Sequence[str], forms: Sequence[str | None]) -> bool:
    """True if a text is written in another way: in capitals, with other white space."""
    return None in forms and bool(_letters(text)) and _letters(text) in _letters("".join(pieces))


def _longest_prefix(piece: str, text: str) -> int:
    """The length of the longest beginning of a piece that stands in a text."""
    low, high = 0, len(piece)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if piece[:middle] in text else (low, middle - 1)
    return low


def _forms_of(piece: str) -> Iterator[str]:
    """The texts that a written piece may stand for: itself, or what it is JSON of."""
    yield piece
    bare = piece[1:-1] if len(piece) > 1 and piece[0] == piece[-1] and piece[0] in "\"'" else piece
    if bare:
        yield bare
    value = _as_json(f'"{bare}"')
    if isinstance(value, str) and value:
        yield value
    if piece.strip():
        yield piece.strip()


def _letters(text: str) -> str:
    return "".join(filter(str.isalnum, text.casefold()))


def _contains(whole: str, text: str) -> bool:
    """Whether a text stands in another, as it is or as JSON or Python writes it."""
    if text in whole or text.strip() in whole:
        return True
    return any(form[1:-1] in whole for form in (json.dumps(text, ensure_ascii=False), json.dumps(text), repr(text)))


def _is_written(gap: str, scaffold: str) -> bool:
    """Whether the template wrote itself what it took out of a field: delimiters, all of them, in order."""
    if not _DELIMITERS.fullmatch(gap):
        return False
    at = 0
    for word in gap.split():
        at = scaffold.find(word, at)
        if at < 0:
            return False
        at += len(word)
    return True


def _as_json(text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return None


def _leaves_of(value: Any, path: Origin) -> Iterator[tuple[Origin, Any]]:
    """Texts and numbers in a value, and keys. True, false and null a template may write as words of its own."""
    if len(path) > _DEEP:
        return
    if isinstance(value, Mapping):
        for key, inner in value.items():
            name = key if isinstance(key, (str, int)) else str(key)
            if isinstance(key, str):
                yield path.at(name, KEY), key
            yield from _leaves_of(inner, path.at(name))
    elif isinstance(value, (list, tuple)):
        for at, inner in enumerate(value):
            yield from _leaves_of(inner, path.at(at))
    elif isinstance(value, str) or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        yield path, value
