"""Lost text: what was given and reached no token.

The trace says what each span of a rendering came from, so what came from a field can be compared with the field. Text
that the template leaves out is *lost*, and so is a part of a text. What a template drops from the past by design (the
reasoning of turns that are not the last) is *dropped*, under the name of that policy. The rest:

- white space is never lost: templates strip it;
- delimiters that a template takes out of content and writes itself (``</think>``) are not lost;
- `BOOKKEEPING` fields are not text for the model: ids, names of results, what a data set says about training.
"""

from __future__ import annotations

import itertools
import json
import operator
import re
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from ..computed import computed
from ..conversation.forms import texts_of
from ..conversation.messages import Messages
from ..conversation.place import Place
from ..conversation.values import check_depth
from ..errors import InputError, LostTextError, LostTextWarning, place
from ..study.forms import TemplateForms
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import KEY, UNKNOWN, FieldPath, Origin
from ..template.spans import Block, Rendering

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


_PLAIN: Final = frozenset({"content", *BOOKKEEPING})
_CALL: Final = frozenset({"function", *BOOKKEEPING})
_FUNCTION: Final = frozenset({"name", "arguments"})
"""The keys of messages that only say something, and of calls and their functions, as nearly all are."""

_TEXT: Final = frozenset({str})
_DEEP: Final = 160
"""No value that was checked is nested deeper than that."""
_DELIMITERS: Final = re.compile(r"(?:\s*(?:<[^<>\s]+>|\[[^\[\]\s]+\]))+\s*")


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


def find_lost(
    rendering: Rendering,
    messages: Messages,
    forms: TemplateForms,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    first: int = 0,
) -> tuple[list[Lost], list[Lost]]:
    """What of `messages` (from message `first` on) and of `tools` is lost, and what is dropped by design."""
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
        ends, _, origins = rendering.closed
        rows = zip(origins, map(operator.sub, ends, [0, *ends]), strict=False)  # one start too many
        fields = list(itertools.compress(rows, origins))  # scaffold has no origin
        self._lengths: dict[FieldPath, int] = dict(fields)  # type: ignore[arg-type]
        if len(self._lengths) < len(fields):  # a field was written in several pieces
            self._lengths = dict.fromkeys(self._lengths, 0)
            for origin, size in fields:
                self._lengths[origin] += size  # type: ignore[index]

    def settle(self, tools: Sequence[Mapping[str, Any]], first: int) -> tuple[list[Lost], list[Lost]]:
        lengths = self._lengths
        for index, message in enumerate(self._messages[first:] if first else self._messages, first):
            said = message.get("content") if _PLAIN.issuperset(message) else None
            if type(said) is str and lengths.get(("messages", index, "content")) == len(said):
                continue  # as nearly all are
            for key, value in message.items():
                if key in BOOKKEEPING:
                    continue
                if type(value) is str:
                    if not value or lengths.get(("messages", index, key)) == len(value):
                        continue
                elif key == "tool_calls" and type(value) is list:
                    if self._are_written_plainly(index, value):
                        continue
                elif not isinstance(value, (str, Sequence, Mapping)) or not value:
                    continue
                self._field(index, key, value)
        for at in self._unwritten(len(tools)) if tools else ():
            name = str(tools[at].get("function", tools[at])["name"])
            self._lost.append(Lost(None, f"tools.{at}", "the template writes nothing of it", name))
        return self._lost, self._dropped

    def _unwritten(self, count: int) -> list[int]:
        """The tools, of so many, of which nothing is written."""
        missing = set(range(count))
        for origin in self._rendering.closed.origins:
            if origin is not None and origin[0] == "tools":
                missing.difference_update(origin.tools if type(origin) is Block else origin[1:2])
                if not missing or (len(origin) == 1 and type(origin) is not Block):  # all of them, printed as a list
                    return []
        return sorted(missing)

    def _field(self, index: int, key: str, value: Any) -> None:
        if key == "tool_calls" and isinstance(value, Sequence):
            for at, call in enumerate(value):
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
        origin = Origin.of(index, *path)
        gaps = self._missing(index, origin, text)
        if not gaps:
            return
        end = text.rfind("</think>") + len("</think>")
        called = bool(self._messages[index].get("tool_calls"))
        thought = "</think>" in text and not any(text[end:stop].strip() for _, stop in gaps)
        if thought and self._is_past(index) and self._forms.shows_reasoning(called, True):
            self._drop(index, path, "".join(text[start:stop] for start, stop in gaps))
        else:
            self._lose(index, path, text, gaps)

    def _reasoning(self, index: int, key: str, text: str) -> None:
        given = self._messages[index]
        names = [name for name in REASONING_FIELDS if given.get(name) in (None, text)]
        if any(self._shows(index, Origin.of(index, name), text) for name in names):
            return  # it goes by several names, and the template reads one of them
        gaps = self._missing(index, Origin.of(index, key), text)
        if gaps and self._is_past(index):
            called = bool(self._messages[index].get("tool_calls"))
            if self._forms.shows_reasoning(called, False):
                self._drop(index, (key,), "".join(text[start:stop] for start, stop in gaps))
                return
        self._lose(index, (key,), text, gaps)

    def _is_past(self, index: int) -> bool:
        return index < len(self._messages) - 1 and self._messages[index]["role"] == "assistant"

    # -- calls

    def _call(self, index: int, at: int, call: Any) -> None:
        if not isinstance(call, Mapping):
            return
        base = Origin.of(index, "tool_calls", at)
        if base[:3] in self._lengths and base not in self._called:
            return  # the list of calls was printed as it is
        function = call.get("function")
        if isinstance(function, Mapping):
            holder, inner = function, base.at("function")
        else:
            holder, inner = call, base
        self._rest(base, call, ("function", "name", "arguments"))
        if holder is function:
            self._rest(inner, function, ("name", "arguments"))
        name = holder.get("name")
        if base not in self._called:
            text = f"{name}({_shown_arguments(holder.get('arguments'))})"
            self._lose(index, base.path, text, [(0, len(text))])
            return
        if isinstance(name, str) and not self._shows(index, inner.at("name"), name):
            in_id = name in "".join(self._texts.get(base.at("id"), ()))  # as Kimi writes it
            self._lose(index, inner.at("name").path, name, [] if in_id else [(0, len(name))])
        arguments = holder.get("arguments")
        path = inner.at("arguments")
        if isinstance(arguments, str):
            gaps = self._missing(index, path, arguments)
            value = _as_json(arguments) if gaps else None
            if isinstance(value, Mapping) and (not value or any(own[: len(path)] == path for own in self._lengths)):
                self._leaves(path, value)
            else:
                self._lose(index, path.path, arguments, gaps)
        elif arguments and not self._is_written_plainly(path, arguments):
            self._leaves(path, arguments)

    def _are_written_plainly(self, index: int, calls: Any) -> bool:
        """Whether calls are of the usual form and each is written as nearly all are, so that `_call` finds nothing."""
        lengths = self._lengths
        for at, call in enumerate(calls):
            function = call.get("function") if type(call) is dict else None
            if type(function) is not dict or not _CALL.issuperset(call) or not _FUNCTION.issuperset(function):
                return False
            name, arguments = function.get("name"), function.get("arguments")
            if type(name) is not str or not arguments:
                return False
            if lengths.get(("messages", index, "tool_calls", at, "function", "name")) != len(name):
                return False
            path = ("messages", index, "tool_calls", at, "function", "arguments")
            if type(arguments) is str:
                if lengths.get(path) != len(arguments):
                    return False
            elif type(arguments) is not dict or not self._is_written_plainly(path, arguments):
                return False
        return True

    def _is_written_plainly(self, path: FieldPath, arguments: Mapping[str, Any]) -> bool:
        """Whether arguments are written as nearly all are: whole, or each text on its own with its key."""
        lengths = self._lengths
        if not _TEXT.issuperset(map(type, arguments.values())):
            return path in lengths and lengths[path] == len(_shown_arguments(arguments))
        if lengths.get(path, 0) >= sum(map(len, arguments)) + sum(map(len, arguments.values())):
            return True  # a mapping has text of its own only where it was printed as a whole
        return all(
            lengths.get((*path, key), 0) == len(value) and (*path, key, KEY) in lengths
            for key, value in arguments.items()
        )

    def _leaves(self, path: Origin, value: Any) -> None:
        """Each text and number in a value that is JSON for the model, and each key."""
        index, lost = path.message or 0, {}
        if path in self._lengths and _as_json("".join(self._texts[path])) == value:
            return  # it was printed as a whole
        for inner, leaf in _leaves_of(value, path):
            text = leaf if isinstance(leaf, str) else _number(leaf)
            if text.strip() and not self._above(inner, path, text):
                gaps = self._missing(index, inner, text)
                if gaps:
                    lost[inner] = text, gaps
        for inner, (text, gaps) in lost.items():
            if not inner.is_key or not any(other[: len(inner) - 1] == inner[:-1] for other in lost if other != inner):
                self._lose(index, inner.path, text, gaps)

    def _above(self, path: Origin, base: Origin, text: str) -> bool:
        """Whether a text stands in the text of a value around it, which was printed whole."""
        return any(
            _contains("".join(self._texts[path[:length]]), text)
            for length in range(len(path), len(base) - 1, -1)
            if path[:length] in self._lengths
        )

    def _rest(self, base: Origin, holder: Mapping[str, Any], known: Sequence[str]) -> None:
        """The fields of a call, or of its function, beside the usual ones."""
        for key, value in holder.items():
            if key not in known and key not in BOOKKEEPING and isinstance(value, (str, Sequence, Mapping)):
                self._unknown(base.at(key), value)

    def _unknown(self, base: Origin, value: Any) -> None:
        """The texts in a field of which nothing is known."""
        index = base.message or 0
        try:
            check_depth(value, Place(field=str(base[-1])))
        except InputError:
            return  # it contains itself: no text of it could be shown
        missing = [
            leaf
            for path, leaf in itertools.islice(_leaves_of(value, base), 10_000)
            if isinstance(leaf, str) and leaf.strip() and not path.is_key
            if not self._above(path, base, leaf) and self._missing(index, path, leaf)
        ]
        if missing:
            text = "…".join(missing)
            self._lose(index, base.path, text, [(0, len(text))])

    # -- what is missing

    @computed
    def _called(self) -> set[FieldPath]:
        """The calls of which something is written."""
        return {origin[:4] for origin in self._lengths if len(origin) > 3 and origin[2] == "tool_calls"}

    @computed
    def _texts(self) -> dict[FieldPath, list[str]]:
        texts: dict[FieldPath, list[str]] = {}
        whole, start = self._rendering.text, 0
        for end, origin in zip(self._rendering.closed.ends, self._rendering.closed.origins, strict=True):
            if origin is not None and origin[0] in ("messages", UNKNOWN.source):
                texts.setdefault(origin, []).append(whole[start:end])
            start = end
        return texts

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
        own = (origin for origin in self._lengths if origin[0] == "messages" and len(origin) > 2)
        return {origin[1] for origin in own if origin[2] != "role"}  # type: ignore[misc]

    def _shows(self, index: int, origin: Origin, text: str) -> bool:
        return origin in self._lengths and not self._missing(index, origin, text)

    def _missing(self, index: int, origin: Origin, text: str) -> list[tuple[int, int]]:
        """The stretches of a field's text that stand nowhere, white space aside."""
        if self._lengths.get(origin) == len(text) or not text.strip():
            return []
        if origin not in self._lengths and UNKNOWN not in self._lengths and not _DELIMITERS.fullmatch(text):
            return [(0, len(text))]
        shown = self._texts.get(origin, [])
        if text.strip() == "".join(shown).strip():
            return []
        unknown = self._texts.get(UNKNOWN)
        if unknown and _contains("".join(unknown), text.strip()):
            return []
        gaps = _gaps(text, shown)
        written = self._scaffold.get(index, "") + "\0" + self._scaffold.get(-1, "") if gaps else ""
        return [(start, stop) for start, stop in gaps if not _is_written(text[start:stop], written)]

    def _lose(self, index: int, path: Sequence[Any], text: str, gaps: Sequence[tuple[int, int]]) -> None:
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

    def _drop(self, index: int, path: Sequence[Any], text: str) -> None:
        why = "the template shows the reasoning of the last turn only"
        self._dropped.append(Lost(index, ".".join(map(str, path)), why, text, PAST_REASONING))


def _number(value: float) -> str:
    try:
        return json.dumps(value)
    except ValueError:  # more digits than Python writes
        return ""


def _shown_arguments(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)


def _gaps(text: str, shown: Sequence[str]) -> list[tuple[int, int]]:
    """The stretches of a text that none of the shown pieces is, without those that are white space only."""
    covered: list[tuple[int, int]] = []
    cursor = 0
    for piece in shown:
        for form in _forms_of(piece):
            at = text.find(form, cursor)
            at = text.find(form) if at < 0 else at
            if at >= 0:
                covered.append((at, at + len(form)))
                cursor = at + len(form)
                break
        else:
            if _letters(text) <= _letters("".join(shown)):
                return []  # written in another way: in capitals, with other escapes
    gaps: list[tuple[int, int]] = []
    end = 0
    for start, stop in [*sorted(covered), (len(text), len(text))]:
        if start > end and text[end:start].strip():
            gaps.append((end, start))
        end = max(end, stop)
    return gaps


def _forms_of(piece: str) -> Iterator[str]:
    """The texts that a shown piece may stand for: itself, or what it is JSON of."""
    yield piece
    bare = piece[1:-1] if len(piece) > 1 and piece[0] == piece[-1] and piece[0] in "\"'" else piece
    if bare:
        yield bare
    value = _as_json(f'"{bare}"')
    if isinstance(value, str) and value:
        yield value
    if piece.strip():
        yield piece.strip()


def _letters(text: str) -> Counter[str]:
    return Counter(char for char in text.casefold() if char.isalnum())


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
