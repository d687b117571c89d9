"""Frames: what a template writes after a turn, kept as its own text with holes, so that a bridge need not run it.

A frame is learned from one bridge. `study.holes` says which texts of the new messages the template printed there, how
it made them (as they are, stripped, as JSON), and what it asked of them on its way. Other new messages of the same form
whose texts give the same answers are then written by filling the holes. All else that decides about a bridge is the
same by the key (`rendering.forms`): the roles, the fields, the words that make a shape, and the tools.

Whoever uses a frame compares it with a run of the template the first `CHECKED` times; one that differs in an id, a kind
or a message is given up, with all others of its form. After that it is believed.

What a frame writes between control tokens of its own always has the same ids. So only what stands around a hole, from
one control token to the next, is encoded: text is encoded between control tokens, each stretch by itself.
"""

from __future__ import annotations

import operator
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..conversation.messages import Messages
from ..errors import TokentraceError
from ..study.holes import NOW, Given, Made, Observed, Recipe, Watched, given_in, observe, tojson
from ..study.seams import Continuation, call_ids
from ..study.study import TemplateStudy
from ..template.chat_template import REASONING_FIELDS, ChatTemplate
from ..template.origin import Origin
from ..template.trace import Rendering
from ..tokens.encoded import Encoded
from ..tokens.kinds import Kind
from ..tokens.tokenizer import Ids, Tokenizer
from .bridged import Run
from .closing import Tail, after, kind_of_text, runs_of
from .lost import BOOKKEEPING
from .rendered import roles_of, span_messages

CHECKED: Final = 3
"""So many uses of a frame are compared with a run of the template."""

_STRIPPING: Final = (str.strip, str.lstrip, str.rstrip)

Encode = Callable[[Rendering, Messages], Encoded]
"""The ids of a text whose spans came from these messages."""


class FrameEncoder(NamedTuple):
    """What turns text into ids."""

    tokenizer: Tokenizer
    encode: Encode


Names = Callable[[], tuple[list[str], int]]
"""The names of the functions that were called, and how many of them are known, from the first on."""

Owner = tuple[int, int]
"""A kind, and a new message (-1: none)."""


# -- frames


class Fixed(NamedTuple):
    """The template's own text from one control token to another: always the same ids."""

    ids: Ids
    runs: list[Run]


class Open(NamedTuple):
    """What stands between two control tokens of the template's own, with a hole in it or several."""

    pieces: tuple[str | Recipe, ...]
    owners: tuple[Owner, ...]
    sides: tuple[list[int], list[int]] | None
    """How many bytes the pieces before a single hole have, and those after it, the last first."""

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, Owner]]) -> Open:
        pieces, owners = zip(*rows, strict=True)
        sizes = [len(piece.encode("utf-8")) if isinstance(piece, str) else -1 for piece in pieces]
        hole = sizes.index(-1)
        return cls(pieces, owners, (sizes[:hole], sizes[:hole:-1]) if sizes.count(-1) == 1 else None)

    def encoded(self, texts: Sequence[str], tokenizer: Tokenizer) -> Fixed | None:
        """Its ids with these texts; None where a control token has a part in them, or tokens do not spell them."""
        written = [piece if type(piece) is str else piece.of(texts) for piece in self.pieces]  # type: ignore[union-attr]
        text = "".join(written)
        vocabulary = tokenizer.vocabulary
        if not text.isascii() and vocabulary.nfc and not unicodedata.is_normalized("NFC", text):
            return None
        ids = tokenizer.encode(text)
        if vocabulary.has_control(ids):
            return None
        bounds = self._bounds(written, ids, vocabulary.byte_lengths)
        counts = map(operator.sub, bounds, (0, *bounds))
        return Fixed(ids, [(count, *owner) for count, owner in zip(counts, self.owners, strict=True)])

    def _bounds(self, written: Sequence[str], ids: Ids, lengths: npt.NDArray[np.int32]) -> list[int]:
        """How many tokens begin before each piece ends."""
        if self.sides is None:
            sizes = lengths.take(ids)
            stops = list(accumulate(len(piece.encode("utf-8")) for piece in written))
            if sizes.sum() != stops[-1]:
                raise ValueError("tokens do not spell the text")
            return (np.add.accumulate(sizes) - sizes).searchsorted(stops).tolist()  # type: ignore[no-any-return]
        before, behind = [], [len(ids)]  # the pieces beside a hole are short
        at = reached = edge = 0
        for size in self.sides[0]:
            edge += size
            while reached < edge:
                reached += lengths.item(ids.item(at))
                at += 1
            before.append(at)
        stop, reached, edge = len(ids), 0, 0
        for size in self.sides[1]:
            edge += size
            while stop > at and (more := reached + lengths.item(ids.item(stop - 1))) <= edge:
                stop, reached = stop - 1, more
            behind.append(stop)
        return [*before, *behind[::-1]]


@dataclass(slots=True)
class BridgeFrame:
    """What is written after a turn, with holes. The first piece is the token that ends the turn, not part of it."""

    asked: tuple[tuple[Recipe, Any], ...]
    """What the template asked of the texts, and the answers with which it wrote this."""
    pieces: tuple[str | Recipe, ...]
    origins: list[Origin | None]
    owners: list[Owner]
    roles: Messages
    """The messages of the conversation, as far as they say whose text is trusted."""
    new_count: int
    stop_token: int
    takes_ids: bool
    """Whether it prints or asks for ids of calls."""
    names: int | None
    """How many names of called functions have to be known, if it prints or asks for any."""
    verdict: Any
    """With what, and for which streams, it was proven that this is what is written."""
    parts: tuple[Fixed | Open, ...]
    """The same as ids; nothing where what it writes has to be encoded as a whole."""
    unchecked: int = CHECKED
    """How many more uses have to be compared with a run of the template."""

    def write(self, texts: Sequence[str], encoder: FrameEncoder) -> Tail | None:
        """What is written with these texts; None where it takes a run of the template to know."""
        try:
            for recipe, answer in self.asked:
                if recipe.of(texts) != answer:
                    return None
            return self._plainly(texts, encoder.tokenizer) or self._carefully(texts, encoder.encode)
        except (LookupError, ValueError, TypeError):
            return None  # a question that cannot be put to these texts

    def _plainly(self, texts: Sequence[str], tokenizer: Tokenizer) -> Tail | None:
        """Where the control tokens are the frame's own, no other text has a part in one."""
        ids: list[Ids] = []
        runs: list[Run] = []
        for part in self.parts:
            written = part if type(part) is Fixed else part.encoded(texts, tokenizer)  # type: ignore[union-attr]
            if written is None:
                return None
            ids.append(written.ids)
            runs += written.runs
        return Tail(np.concatenate(ids), runs, self.new_count, self.stop_token) if ids else None

    def _carefully(self, texts: Sequence[str], encode: Encode) -> Tail | None:
        written = [piece if isinstance(piece, str) else piece.of(texts) for piece in self.pieces]
        ends = list(accumulate(map(len, written)))
        try:
            encoded = encode(Rendering("".join(written), ends, [-1] * len(ends), self.origins), self.roles)
        except TokentraceError:
            return None  # refused: the run of the template says where
        ids, spans = encoded.ids, encoded.spans
        if ids[0] != self.stop_token or spans[:2].tolist() != [0, 1][: len(ids)]:
            return None
        return Tail(ids[1:].copy(), runs_of(spans[1:], self.owners), self.new_count, self.stop_token)


def _parts(
    pieces: Sequence[str | Recipe], owners: Sequence[Owner], stop_token: int, tokenizer: Tokenizer
) -> tuple[Fixed | Open, ...]:
    """What a frame writes after a stop token, as ids.

    Nothing where the tokenizer finds control tokens by more than their own text, or where text beside them could make
    others of them.
    """
    parts: list[Fixed | Open] = []
    stretch: list[tuple[Any, Owner]] = []
    rows = list(zip(pieces, owners, strict=True))
    blocks = [(own, list(block)) for own, block in groupby(rows, lambda row: isinstance(row[0], str))]
    for at, (own, block) in enumerate(blocks):
        text = "".join(piece for piece, _ in block if isinstance(piece, str))
        piece = tokenizer.scaffold.piece(text)
        if piece is None:
            return ()
        if not own or not piece.found:
            stretch += block
            continue
        first, last = piece.found[0][0], piece.found[-1][1]
        core = tokenizer.scaffold.piece(text[first:last])
        if core is None or core.before or core.after or len(core.found) != len(piece.found):
            return ()
        stretch += _between(block, 0, first)
        parts += [Open.of(stretch)] if stretch else []
        last = last if at < len(blocks) - 1 else len(text)
        parts.append(_fixed(_between(block, first, last), tokenizer))
        stretch = _between(block, last, len(text))
    parts += [Open.of(stretch)] if stretch else []
    begin = parts[0]
    if isinstance(begin, Open) or begin.ids[0] != stop_token:
        return ()
    return (Fixed(begin.ids[1:], after(begin.runs, 1)), *parts[1:])


def _between(block: Sequence[tuple[Any, Owner]], start: int, stop: int) -> list[tuple[Any, Owner]]:
    """What stands in a block of texts from one place to another."""
    ends = list(accumulate(len(text) for text, _ in block))
    cut = (
        (text[max(start - end + len(text), 0) : stop - end + len(text)], owner, end)
        for (text, owner), end in zip(block, ends, strict=True)
        if end - len(text) < stop
    )
    return [(text, owner) for text, owner, end in cut if text and end > start]


def _fixed(block: Sequence[tuple[Any, Owner]], tokenizer: Tokenizer) -> Fixed:
    ids = tokenizer.encode("".join(text for text, _ in block)).copy()
    lengths = tokenizer.vocabulary.byte_lengths[ids]
    stops = list(accumulate(len(text.encode("utf-8")) for text, _ in block))
    spans = np.searchsorted(stops, np.cumsum(lengths) - lengths, "right").astype(np.int32)
    return Fixed(ids, runs_of(spans, [owner for _, owner in block]))


# -- learning


class Example(NamedTuple):
    """A bridge that was made by a run of the template."""

    new: Messages
    reply: Mapping[str, Any]
    """The stand-in for the assistant's turn."""
    known: int
    """How many names of the functions that it calls are known."""
    tools: Any
    found: Continuation
    verdict: Any
    """With what it was made."""

    def held(
        self,
        count: int,
        watched: Sequence[tuple[int, str]],
        read: set[tuple[int, str]],
        hold: Callable[[int, str], Any],
    ) -> list[Mapping[str, Any]]:
        """The conversation with the texts of the new messages held, `count` of them, and the ids and names of calls.

        What is looked up in the new messages is put into `read`.
        """
        numbers = iter(range(count))
        new = [_held(message, numbers, hold) for message in self.new]
        for at, name in watched:
            if name in new[at]:
                new[at][name] = hold(next(numbers), new[at][name])
        reply, named = dict(self.reply), count + len(call_ids(self.new))
        if calls := reply.get("tool_calls"):
            functions = [
                {**call["function"], "name": hold(named + at, call["function"]["name"])}
                for at, call in enumerate(calls)
            ]
            reply["tool_calls"] = [
                {**call, "id": hold(count + at, call["id"]), "function": function}
                for at, (call, function) in enumerate(zip(calls, functions, strict=True))
            ]
        context = self.found.conversation[: self.found.first_new - 1]
        watching = [Watched(message, at, read) for at, message in enumerate(new)]
        return [*map(_offered, context), _offered(reply), *watching]


def _held(message: Mapping[str, Any], numbers: Iterator[int], hold: Callable[[int, str], Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for name, value in message.items():
        if name in BOOKKEEPING:
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


def learn(
    study: TemplateStudy,
    example: Example,
    texts: Sequence[str],
    watched: Sequence[tuple[int, str]],
    encoder: FrameEncoder,
) -> BridgeFrame | frozenset[tuple[int, str]] | None:
    """A frame, where all that the template does with the texts can be followed, and none of them is lost.

    Or fields of messages that it looks at as well, and that are to be watched.
    """
    found = example.found
    rendering, stop, cut = found.encoded.rendering, found.turn.stop_token, found.cut
    template = study.template
    if stop is None or not isinstance(template, ChatTemplate):
        return None
    given = {**study.plain_variables, "tools": example.tools, "documents": None, "add_generation_prompt": True}
    read: set[tuple[int, str]] = set()
    observed = observe(template.source, lambda hold: example.held(len(texts), watched, read, hold), given)
    if observed is None or "".join(text for text, _ in observed.pieces) != rendering.text:
        return None
    more = {(at, name) for at, name in read if name in BOOKKEEPING and name != "role"}.difference(watched)
    if more:
        return frozenset(more)
    spans = _tail_spans(observed, rendering, span_messages(rendering, roles_of(found.conversation)), cut)
    if spans is None:
        return None
    used = set[int]().union(*(given_in(span.piece) for span in spans), *(given_in(one) for one, _ in observed.asked))
    if NOW in used:
        return None
    pieces = (rendering.text[found.encoded.position(found.turn.stop - 1) : cut], *(span.piece for span in spans))
    owners: list[Owner] = [(Kind.SCAFFOLD, -1)]
    owners += [(kind_of_text(span.origin), max(span.owner - found.first_new, -1)) for span in spans]
    first_name = len(texts) + len(call_ids(example.new))
    takes_names = example.verdict.repeats_call or max(used, default=-1) >= first_name
    return BridgeFrame(
        observed.asked,
        pieces,
        [None, *(span.origin for span in spans)],
        owners,
        [{"role": message["role"]} for message in found.conversation],
        len(example.new),
        stop,
        any(len(texts) <= number < first_name for number in used),
        example.known if takes_names else None,
        example.verdict,
        _parts(pieces, owners, stop, encoder.tokenizer),
    )


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
