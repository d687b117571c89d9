"""The seam: what has to stand between a completion and the next turn, and the two joined.

A completion may end with its stop token, with another one, in the middle of the separator that follows, or cut off
anywhere. Nothing of it is changed: what is missing is added. Ids that close a turn which was cut off are synthetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

import numpy as np

from ..parsing.response import ParsedResponse
from ..study.endings import TurnEndings
from ..study.forms import TemplateForms
from ..study.seams import BridgeRefusal, Continuation, RefusalReason
from ..study.study import TemplateStudy
from ..study.turns import common_prefix
from ..template.origin import Origin
from ..tokens.kinds import Kind
from ..tokens.table import TokenTable, join
from ..tokens.tokenizer import Ids
from .bridged import BridgedTokens
from .lost import Lost, find_lost
from .rendered import roles_of, span_messages

_CUT_OFF: Final = "the completion was cut off before it ended its turn"


class Truncation(StrEnum):
    """What becomes of a completion that was cut off."""

    CLOSE = "close"
    """It is closed with tokens that carry no loss."""
    REFUSE = "refuse"
    """There is no bridge."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tail:
    """What a template writes after an assistant's turn. Its tokens name new messages, counted from 0."""

    tokens: TokenTable
    new_count: int
    stop_token: int | None
    closing: str = ""
    """What the template writes between the turn's last text and its end, if no token ends it."""
    lost: tuple[Lost, ...] = ()

    @classmethod
    def of(cls, found: Continuation, forms: TemplateForms) -> Tail:
        """What follows the turn of a rendered conversation."""
        encoded, rendering, first = found.encoded, found.encoded.rendering, found.first_new
        owners = span_messages(rendering, roles_of(found.conversation), rendering.closed)
        messages = np.maximum(np.asarray(owners, np.int32) - np.int32(first), -1)
        kinds = np.asarray([kind_of_text(origin) for origin in rendering.closed.origins], np.uint8)
        lost = find_lost(rendering, found.conversation, forms, first=first).lost
        columns = (encoded.per_token(column)[found.turn.stop :] for column in (kinds, messages))
        return cls(
            TokenTable.of(found.ids.copy(), *columns),
            len(found.conversation) - first,
            found.turn.stop_token,
            rendering.text[found.span.body_end : found.cut],
            tuple(dataclasses.replace(one, message=(one.message or 0) - first) for one in lost),
        )


def kind_of_text(origin: Origin | None) -> Kind:
    """Text of a message is context, and all that the template adds to it scaffold, its role as well."""
    return Kind.CONTEXT if origin is not None and origin.source == "messages" and not origin.is_role else Kind.SCAFFOLD


ReadTurn = Callable[[Sequence[int] | Ids, Ids], ParsedResponse]
"""Parses a completion after a prompt."""


class _Seam(NamedTuple):
    """Ids to add after the completion, and how many ids of what follows the stop token the completion has already."""

    pieces: list[tuple[Sequence[int], Kind]]
    overlap: int = 0


_NOTHING: Final = _Seam([])


@dataclasses.dataclass(frozen=True, slots=True)
class SeamFinder:
    """Finds the seam between a stream and what follows it."""

    study: TemplateStudy
    endings: TurnEndings
    truncation: Truncation
    read: ReadTurn

    def join(
        self, prompt: Sequence[int] | Ids, completion: Ids, given: Any, tail: Tail
    ) -> BridgedTokens | BridgeRefusal:
        """The stream, its seam, and what was written after the turn; `given` is the completion as it was passed."""
        seam = self._seam(prompt, completion, tail)
        if isinstance(seam, BridgeRefusal):
            return seam
        pieces = [TokenTable.of(np.asarray(ids, np.int32), kind) for ids, kind in seam.pieces if len(ids)]
        following = tail.tokens.slice(seam.overlap, len(tail.tokens)) if seam.overlap else tail.tokens
        return BridgedTokens(prompt, given, join([*pieces, following]), tail.new_count, tail.lost)

    def _seam(self, prompt: Sequence[int] | Ids, completion: Ids, tail: Tail) -> _Seam | BridgeRefusal:
        last = int(completion[-1]) if len(completion) else -1
        stop = tail.stop_token
        if stop is None:
            return self._open_seam(prompt, completion, tail, last)
        if last == stop:
            return _NOTHING
        is_head = stop in self.endings.heads and stop not in self.endings.closers
        head: list[tuple[Sequence[int], Kind]] = [([stop], Kind.SCAFFOLD)] if is_head else []
        if self._is_stop(last):
            return _Seam(head)
        overlap = self._overlap(completion, stop, tail.tokens.ids)
        if overlap is not None:
            return _Seam([], overlap)
        if self.truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        marked = self.study.markers().marked
        missing = self.read(prompt, completion).closing or self._space_before(stop, completion)
        closing = marked.ids(marked.of_text(missing.rstrip() if is_head else missing))
        if stop in closing:  # where the template does not show whose turn it writes, its end may be part of the grammar
            closing = closing[: closing.index(stop) + 1]
        elif not is_head and not (closing and closing[-1] in self.endings.closers):
            closing = [*closing, stop]
        return _Seam([(closing, Kind.SYNTHETIC), *head])

    def _space_before(self, stop: int, completion: Ids) -> str:
        """White space that the template writes between a past answer and its stop token, as far as it is missing.

        The last answer, which the grammar is read off, may end without either.
        """
        markers = self.study.markers()
        space, token, _ = markers.plain_close.partition(markers.marked.char(stop) or "\0")
        text = markers.marked.of_ids(completion.tolist())
        if not token or space.strip() or markers.has_call(text):
            return ""
        return space[next((n for n in range(len(space), 0, -1) if text.endswith(space[:n])), 0) :]

    def _is_stop(self, token: int) -> bool:
        """Whether generation ends at a token: a known stop, or a special token that no turn of the template holds."""
        if token in self.endings.stops | self.endings.closers | self.study.eos:
            return True
        added = self.study.tokenizer.vocabulary.added.get(token)
        return added is not None and added.special and not self.study.markers().knows(token)

    def _overlap(self, completion: Ids, stop: int, ids: Ids) -> int | None:
        """How much of what follows the stop token the completion has already: a separator, or the next head."""
        for length in range(min(len(ids), len(completion) - 1, 8), 0, -1):
            if completion[-length - 1] == stop and np.array_equal(completion[-length:], ids[:length]):
                return length
        is_control = self.study.tokenizer.vocabulary.is_control
        for at, index in enumerate(ids[:8].tolist()):
            if is_control[index]:
                return at + 1 if len(completion) and completion[-1] == index else None
            if self.study.tokenizer.decode([index]).strip():
                return None
        return None

    def _open_seam(self, prompt: Sequence[int] | Ids, completion: Ids, tail: Tail, last: int) -> _Seam | BridgeRefusal:
        """The seam of a template that ends the turn with text, or with nothing."""
        markers = self.study.markers()
        marked = markers.marked
        whole = marked.of_text(tail.closing)
        closing = whole[len(whole) - common_prefix(whole[::-1], markers.plain_close[::-1]) :]
        ended = self._is_stop(last)
        said = marked.of_ids(completion[-256 : -1 if ended else None].tolist())
        if marked.ends_with_token(whole) and said.endswith(whole):
            return _NOTHING  # the template ends such a turn here: DeepSeek V3, after a single call
        there = next((n for n in range(len(closing), 0, -1) if said.endswith(closing[:n])), 0)
        if ended or (closing and there == len(closing)):
            return _Seam([(marked.ids(closing[there:]), Kind.SCAFFOLD)])
        rest = closing[there:]
        if not there:
            inner = marked.of_text(self.read(prompt, completion).closing)
            done = next((n for n in range(len(closing), 0, -1) if inner.endswith(closing[:n])), 0)
            rest = inner + closing[done:]
        if rest and self.truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        return _Seam([(marked.ids(rest), Kind.SYNTHETIC)])
