"""The seam: what has to stand between a completion and the next turn, and the two joined.

A completion may end with its stop token, with another one, in the middle of the separator that follows, or cut off
anywhere. Nothing of it is changed: what is missing is added. Ids that close a turn which was cut off are synthetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from ..parsing.compiled import Compiled
from ..parsing.marked import mark
from ..parsing.parser import read_turn
from ..parsing.response import ParsedResponse
from ..study.endings import TurnEndings
from ..study.forms import TemplateForms
from ..study.seams import BridgeRefusal, Continuation, RefusalReason
from ..study.study import TemplateStudy
from ..template.origin import Origin
from ..tokens.kinds import Kind
from ..tokens.table import TokenTable, join
from ..tokens.tokenizer import Ids
from .bridged import BridgedTokens
from .lost import Lost, find_lost
from .rendered import span_messages

_CONTEXT, _SCAFFOLD = int(Kind.CONTEXT), int(Kind.SCAFFOLD)  # numpy is slow with members of an enum
_CUT_OFF: Final = "the completion was cut off before it ended its turn"


class Truncation(StrEnum):
    """What becomes of a completion that was cut off."""

    CLOSE = "close"
    """It is closed with tokens that carry no loss."""
    REFUSE = "refuse"
    """There is no bridge."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stream:
    """A prompt and its completion, as ids."""

    prompt: Sequence[int] | Ids
    completion: Ids
    passed: Any
    """The completion as the caller passed it."""


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
    def of(cls, continuation: Continuation, forms: TemplateForms) -> Tail:
        """What follows the turn of a rendered conversation."""
        encoded, rendering, first = continuation.encoded, continuation.encoded.rendering, continuation.first_new
        owners = [max(owner - first, -1) for owner in span_messages(rendering, continuation.conversation)]
        kinds = np.asarray([_CONTEXT if is_context(origin) else _SCAFFOLD for origin in rendering.origins], np.uint8)
        lost = find_lost(rendering, continuation.conversation, forms, first=first).lost
        stop = continuation.turn.stop
        messages = encoded.per_token(np.asarray(owners, np.int32))[stop:]
        return cls(
            TokenTable.of(continuation.ids.copy(), encoded.per_token(kinds)[stop:], messages),
            len(continuation.conversation) - first,
            continuation.turn.stop_token,
            rendering.text[continuation.span.body_end : continuation.cut],
            tuple(dataclasses.replace(one, message=(one.message or 0) - first) for one in lost),
        )


def is_context(origin: Origin | None) -> bool:
    """Whether text is a message's own. All that the template adds to it is scaffold, its role as well."""
    return origin is not None and origin[0] == "messages" and not origin.is_role


GetCompiled = Callable[[], Compiled]
"""The grammar that completions are parsed with; compiling it takes a while, and most bridges do without."""


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
    compiled: GetCompiled

    def join(self, stream: Stream, tail: Tail) -> BridgedTokens | BridgeRefusal:
        """The stream, its seam, and what follows the turn."""
        seam = self._seam(stream, tail)
        if isinstance(seam, BridgeRefusal):
            return seam
        pieces = [TokenTable.of(np.asarray(ids, np.int32), kind) for ids, kind in seam.pieces if len(ids)]
        following = tail.tokens.slice(seam.overlap, len(tail.tokens)) if seam.overlap else tail.tokens
        return BridgedTokens(stream.prompt, stream.passed, join([*pieces, following]), tail.new_count, tail.lost)

    def _seam(self, stream: Stream, tail: Tail) -> _Seam | BridgeRefusal:
        completion, stop = stream.completion, tail.stop_token
        last = int(completion[-1]) if len(completion) else -1
        if stop is None:
            return self._open_seam(stream, tail, last)
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
        parsed = read_turn(self.compiled(), completion, stream.prompt)
        missing = parsed.closing or self._space_before(stop, completion, parsed)
        closing = self._ids(self._marked(missing.rstrip() if is_head else missing))
        if stop in closing:  # where the template does not show whose turn it writes, its end may be part of the grammar
            closing = closing[: closing.index(stop) + 1]
        elif not is_head and not (closing and closing[-1] in self.endings.closers):
            closing = [*closing, stop]
        return _Seam([(closing, Kind.SYNTHETIC), *head])

    def _marked(self, text: str) -> bytes:
        return self.compiled().marked.scaffold(text)

    def _ids(self, marked: bytes) -> list[int]:
        return self.compiled().marked.ids(marked, self.study.tokenizer)

    def _space_before(self, stop: int, completion: Ids, parsed: ParsedResponse) -> str:
        """White space that the template writes between a past answer and its stop token, as far as it is missing.

        The last answer, which the grammar is read off, may end without either.
        """
        space, token, _ = self._marked(self.study.past_close()).partition(mark(stop))
        if not token or space.strip() or parsed.tool_calls:
            return ""
        data, _ = self.compiled().marked.spelled(completion, 0)
        return space[_overlap(data, space) :].decode()

    def _is_stop(self, token: int) -> bool:
        """Whether generation ends at a token: a known stop, or a special token that no turn of the template holds."""
        if token in self.endings.stops | self.endings.closers | self.study.eos:
            return True
        added = self.study.tokenizer.vocabulary.added.get(token)
        return added is not None and added.special and token not in self.study.turn_tokens()

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

    def _open_seam(self, stream: Stream, tail: Tail, last: int) -> _Seam | BridgeRefusal:
        """The seam of a template that ends the turn with text, or with nothing."""
        completion = stream.completion
        whole = self._marked(tail.closing)
        past_close = self._marked(self.study.past_close())
        shared = zip(reversed(whole), reversed(past_close), strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))
        closing = whole[len(whole) - count :]
        ended = self._is_stop(last)
        data, _ = self.compiled().marked.spelled(completion[-256 : -1 if ended else None], 0)
        if whole[-5:-4] == b"\xff" and data.endswith(whole):
            return _NOTHING  # the template ends such a turn here: DeepSeek V3, after a single call
        there = _overlap(data, closing)
        if ended or (closing and there == len(closing)):
            return _Seam([(self._ids(closing[there:]), Kind.SCAFFOLD)])
        remaining = closing[there:]
        if not there:
            inner = self._marked(read_turn(self.compiled(), completion, stream.prompt).closing)
            remaining = inner + closing[_overlap(inner, closing) :]
        if remaining and self.truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        return _Seam([(self._ids(remaining), Kind.SYNTHETIC)])


def _overlap(data: bytes, closing: bytes) -> int:
    """How many bytes of a closing the data ends with already."""
    return next((length for length in range(len(closing), 0, -1) if data.endswith(closing[:length])), 0)
