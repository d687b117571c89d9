"""Frames: what a template writes after a turn, kept as its own text with holes, so that a bridge need not run it.

A frame is learned from one bridge. `study.holes` says which texts of the new messages the template printed there, how
it made them (as they are, stripped, as JSON), and what it asked of them on its way. Other new messages of the same form
whose texts give the same answers are then written by filling the holes. All else that decides about a bridge is the
same by the key: the roles, the fields, the words that make a shape, and the tools.

Whoever uses a frame compares it with a run of the template the first `CHECKED` times; one that differs in an id, a kind
or a message is given up, with all others of its form. After that it is believed.
"""

from __future__ import annotations

import bisect
import unicodedata
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.holes import NOW, Given, Made, Observed, Recipe, given_in, observe, tojson
from ..study.prompts import words_in
from ..study.seams import Continuation
from ..study.study import TemplateStudy
from ..template.chat_template import REASONING_FIELDS, ChatTemplate
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.encoded import Encoded
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Tokenizer
from .closing import Tail, kind_of_text
from .rendered import roles_of, span_messages

CHECKED: Final = 3
"""So many uses of a frame are compared with a run of the template."""
MOST_FRAMES: Final = 4
"""So many frames are learned for one form: where there are more ways than that, the words themselves decide."""
MOST_FORMS: Final = 1024

_STRIPPING: Final = (str.strip, str.lstrip, str.rstrip)

Encode = Callable[[Rendering, Messages], Encoded]
"""The ids of a text whose spans came from these messages."""


class FrameEncoder(NamedTuple):
    """What turns text into ids."""

    tokenizer: Tokenizer
    encode: Encode


Names = Callable[[], tuple[list[str], int]]
"""The names of the functions that were called, and how many of them are known, from the first on."""


@dataclass(slots=True)
class Frame:
    """What is written after a turn, with holes. The first piece is the token that ends the turn, not part of it."""

    asked: tuple[tuple[Recipe, Any], ...]
    """What the template asked of the texts, and the answers with which it wrote this."""
    pieces: tuple[str | Recipe, ...]
    origins: list[Origin | None]
    kinds: Kinds
    messages: npt.NDArray[np.int32]
    roles: Messages
    """The messages of the conversation, as far as they say whose text is trusted."""
    new_count: int
    stop_token: int
    names: int | None
    """How many names of called functions have to be known, if it prints or asks for any."""
    controls: tuple[list[int], list[tuple[int, int]]] | None = None
    """The control tokens of its own text, and where each ends: in which piece, and how far into it."""
    rewrites: tuple[Any, ...] = ()
    """What the template would write anew in production: no bridge over a stream that holds it."""
    unchecked: int = CHECKED
    """How many more uses have to be compared with a run of the template."""

    def write(self, texts: Sequence[str], encoder: FrameEncoder) -> Tail | None:
        """What is written with these texts; None where it takes a run of the template to know."""
        try:
            for recipe, answer in self.asked:
                if recipe.of(texts) != answer:
                    return None
            written = [piece if type(piece) is str else piece.of(texts) for piece in self.pieces]  # type: ignore[union-attr]
        except (LookupError, ValueError, TypeError):
            return None  # a question that cannot be put to these texts
        return self._plainly(written, encoder.tokenizer) or self._carefully(written, encoder.encode)

    def _plainly(self, written: list[str], tokenizer: Tokenizer) -> Tail | None:
        """Where the control tokens are the frame's own, each in its place, no other text has a part in one."""
        if self.controls is None:
            return None
        vocabulary = tokenizer.vocabulary
        text = "".join(written)
        sizes = list(map(len, written))
        if not text.isascii():
            if vocabulary.nfc and not unicodedata.is_normalized("NFC", text):
                return None
            try:
                sizes = [len(piece.encode("utf-8")) for piece in written]
            except UnicodeEncodeError:
                return None
        ids = tokenizer.encode(text)
        control = vocabulary.is_control.take(ids).nonzero()[0]
        tokens, places = self.controls
        if ids.take(control).tolist() != tokens:
            return None
        ends = np.add.accumulate(vocabulary.byte_lengths.take(ids))
        stops = list(accumulate(sizes))
        if ends[-1] != stops[-1] or ends.take(control).tolist() != [
            stops[span] - sizes[span] + offset for span, offset in places
        ]:
            return None
        del stops[-1]
        begun = [first + 1 for first in ends.searchsorted(np.asarray(stops, np.int32)).tolist()]  # before a piece ends
        counts = [after - before for before, after in pairwise((*begun, len(ids)))]
        kinds, messages = self.kinds[1:].repeat(counts), self.messages[1:].repeat(counts)
        return Tail(ids[1:].copy(), kinds, messages, self.new_count, self.stop_token)

    def _carefully(self, written: list[str], encode: Encode) -> Tail | None:
        ends = list(accumulate(map(len, written)))
        try:
            encoded = encode(Rendering("".join(written), ends, [-1] * len(ends), self.origins), self.roles)
        except TokentraceError:
            return None  # refused: the run of the template says where
        ids, spans = encoded.ids, encoded.spans
        if ids[0] != self.stop_token or spans[:2].tolist() != [0, 1][: len(ids)]:
            return None
        spans = spans[1:]
        return Tail(ids[1:].copy(), self.kinds[spans], self.messages[spans], self.new_count, self.stop_token)

    def find_controls(self, texts: Sequence[str], encoder: FrameEncoder) -> None:
        """Find the control tokens of its own text, if there are no others and tokens spell text byte for byte."""
        vocabulary = encoder.tokenizer.vocabulary
        written = [piece if isinstance(piece, str) else piece.of(texts) for piece in self.pieces]
        text = "".join(written)
        if not vocabulary.exact or (vocabulary.nfc and not unicodedata.is_normalized("NFC", text)):
            return
        ids = encoder.tokenizer.encode(text)
        starts = list(accumulate((len(piece.encode("utf-8")) for piece in written), initial=0))
        ends = np.cumsum(vocabulary.byte_lengths[ids])
        tokens: list[int] = []
        places: list[tuple[int, int]] = []
        for at in np.flatnonzero(vocabulary.is_control[ids]).tolist():
            end, size = int(ends[at]), int(vocabulary.byte_lengths[ids[at]])
            span = bisect.bisect_left(starts, end) - 1
            if not isinstance(self.pieces[span], str) or end - size < starts[span]:
                return
            tokens.append(int(ids[at]))
            places.append((span, end - starts[span]))
        self.controls = tokens, places


# -- forms


def form_of(messages: Messages, words: Sequence[str]) -> tuple[Hashable, list[str]] | None:
    """New messages without their texts, and those: equal forms have equal shapes (`study.seams.shape`).

    None for messages that hold other things than texts, or that an assistant said.
    """
    form: list[Hashable] = []
    texts: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            return None
        for name, value in message.items():
            if name == "role":
                form += (name, value)
            elif type(value) is str:
                form += (name, _look(value))
                texts.append(value)
                if words and name == "content":
                    form.append(words_in(value, words))
            elif name == "content" and type(value) is list and all(map(_is_text, value)):
                form += (name, tuple(_look(part["text"]) for part in value))
                texts += (part["text"] for part in value)
            else:
                return None
        form.append(None)
    return tuple(form), texts


def _look(text: str) -> int:
    """Whether a text says something, is blank, or empty."""
    return 0 if not text else 1 if text.isspace() else 2


def _is_text(part: Any) -> bool:
    return (
        type(part) is dict and list(part) == ["type", "text"] and part["type"] == "text" and type(part["text"]) is str
    )


@dataclass(slots=True)
class Shelf:
    """The frames of one form with the same tools."""

    tools: Any
    """Kept, as it is known by who it is."""
    frames: tuple[Frame, ...] = ()
    seen: int = 0

    def write(self, texts: list[str], names: Names, encoder: FrameEncoder) -> tuple[Frame, Tail] | None:
        """What the first frame that fits writes."""
        for frame in self.frames:
            given = texts
            if frame.names is not None:
                called, known = names()
                if known != frame.names:
                    continue
                given = [*texts, *called]
            tail = frame.write(given, encoder)
            if tail is not None:
                return frame, tail
        return None

    @property
    def wants_more(self) -> bool:
        """Whether a frame is worth learning: not for messages that come once, nor where others did not do."""
        self.seen += 1
        return self.seen > 1 and len(self.frames) < MOST_FRAMES

    def add(self, frame: Frame | None) -> None:
        if frame is None:
            self.give_up()
        elif self.seen < MOST_FORMS:
            self.frames = (*self.frames, frame)

    def check(self, frame: Frame, written: Tail, tail: Tail) -> None:
        """Compare what a frame wrote with what the template wrote."""
        if written.equals(tail):
            frame.unchecked = max(frame.unchecked - 1, 0)
        else:
            self.give_up()

    def give_up(self) -> None:
        """No frame serves this form."""
        self.frames, self.seen = (), -(2**62)


class Frames:
    """The frames of one template under the settings of one renderer."""

    def __init__(self, study: TemplateStudy, words: Sequence[str]) -> None:
        self._study = study
        self._words = words
        self._shelves: dict[Hashable, Shelf] = {}

    def shelf(self, new: Messages, tools: Any) -> tuple[Shelf, list[str]] | None:
        """The frames for new messages, and their texts; None where there can be none.

        `tools` are as they are wrapped for the template: equal ones are the same object.
        """
        form = form_of(new, self._words) if type(self._study.template) is ChatTemplate else None
        if form is None:
            return None
        key = (form[0], id(tools))
        shelf = self._shelves.get(key)
        if shelf is None:
            if len(self._shelves) >= MOST_FORMS:
                self._shelves.clear()
            shelf = self._shelves[key] = Shelf(tools)
        return shelf, form[1]


# -- learning


class Example(NamedTuple):
    """A bridge that was made by a run of the template."""

    new: Messages
    texts: Sequence[str]
    reply: Mapping[str, Any]
    """The stand-in for the assistant's turn."""
    names: Sequence[str]
    """The names of called functions, where the results do not bring them."""
    tools: Any
    found: Continuation

    def held(self, hold: Callable[[int, str], Any]) -> list[Mapping[str, Any]]:
        """The conversation with the texts of the new messages held, and with them the names and ids of the calls."""
        numbers = iter(range(len(self.texts)))
        new = [_held(message, numbers, hold) for message in self.new]
        reply = dict(self.reply)
        calls = []
        for at, call in enumerate(reply.get("tool_calls", ())):
            name, own = call["function"]["name"], call["id"]
            given, result = (self.new[at], new[at]) if at < len(new) else ({}, {})
            if at < len(self.names):
                name = hold(len(self.texts) + at, name)
            elif given.get("name") == name:
                name = result["name"]
            own = result["tool_call_id"] if given.get("tool_call_id") == own else own
            calls.append({**call, "id": own, "function": {**call["function"], "name": name}})
        if calls:
            reply["tool_calls"] = calls
        context = self.found.conversation[: self.found.first_new - 1]
        return [*map(_offered, context), _offered(reply), *new]


def _held(message: Mapping[str, Any], numbers: Iterator[int], hold: Callable[[int, str], Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in message.items():
        if name == "role":
            made[name] = value
        elif isinstance(value, str):
            made[name] = hold(next(numbers), value)
        else:
            made[name] = [{"type": "text", "text": hold(next(numbers), part["text"])} for part in value]
    return made


def _offered(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning under the names that `wrap_messages` offers it under."""
    value = next((message[name] for name in REASONING_FIELDS if message.get(name) is not None), None)
    return message if value is None else {"thinking": value, **message, "reasoning_content": value}


def learn(study: TemplateStudy, example: Example, encoder: FrameEncoder) -> Frame | None:
    """A frame, where all that the template does with the texts can be followed, and none of them is lost."""
    found = example.found
    rendering, stop, cut = found.encoded.rendering, found.turn.stop_token, found.cut
    template = study.template
    if stop is None or not isinstance(template, ChatTemplate):
        return None
    given = {**study.plain_variables, "tools": example.tools, "documents": None, "add_generation_prompt": True}
    observed = observe(template.source, example.held, given)
    if observed is None or "".join(text for text, _ in observed.pieces) != rendering.text:
        return None
    spans = _tail_spans(observed, rendering, span_messages(rendering, roles_of(found.conversation)), cut)
    if spans is None:
        return None
    used = set[int]().union(*(given_in(span.piece) for span in spans), *(given_in(one) for one, _ in observed.asked))
    if NOW in used:
        return None
    stopping = rendering.text[found.encoded.position(found.turn.stop - 1) : cut]
    frame = Frame(
        observed.asked,
        (stopping, *(span.piece for span in spans)),
        [None, *(span.origin for span in spans)],
        np.asarray([Kind.SCAFFOLD, *(kind_of_text(span.origin) for span in spans)], np.uint8),
        np.asarray([-1, *(max(span.owner - found.first_new, -1) for span in spans)], np.int32),
        [{"role": message["role"]} for message in found.conversation],
        len(example.new),
        stop,
        0 if max(used, default=0) >= len(example.texts) else None,
    )
    frame.find_controls([*example.texts, *example.names], encoder)
    return frame


class _Span(NamedTuple):
    piece: str | Recipe
    origin: Origin | None
    owner: int


def _tail_spans(observed: Observed, rendering: Rendering, owners: Sequence[int], cut: int) -> list[_Span] | None:
    """The spans after the turn, each hole one of them; None where that is not how it was written."""
    out: list[_Span] = []
    at = end = 0
    for text, recipe in observed.pieces:
        start, end = end, end + len(text)
        if end <= cut or not text:
            continue
        start = max(start, cut) if recipe is None else start
        if recipe is not None and (start < cut or not _keeps_all(recipe)):
            return None
        while rendering.ends[at] <= start:
            at += 1
        first = at
        while rendering.ends[at] < end:
            at += 1
        if recipe is not None:
            if len({(rendering.origins[k], owners[k]) for k in range(first, at + 1)}) != 1:
                return None
            out.append(_Span(recipe, rendering.origins[first], owners[first]))
        else:
            for k in range(first, at + 1):
                stop = min(end, rendering.ends[k])
                out.append(_Span(rendering.text[start:stop], rendering.origins[k], owners[k]))
                start = stop
    return out


def _keeps_all(recipe: Recipe) -> bool:
    """Whether all of a given text is written, but for white space around it."""
    if isinstance(recipe, Given):
        return True
    text, *rest = recipe.arguments
    if not isinstance(text, (Given, Made)) or not _keeps_all(text):
        return False
    if recipe.function is tojson:
        return not rest
    return recipe.function in _STRIPPING and all(chars is None or chars.isspace() for chars in rest)
