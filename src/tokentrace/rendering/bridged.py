"""The next prompt: a stream, the seam after it, and what the template writes then.

Nothing of a completion is changed, however it ended: what is missing is added. Ids that close a cut-off turn are
synthetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from itertools import takewhile
from typing import Any, Final, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..conversation.forms import Change
from ..parsing.compiled import Compiled
from ..parsing.marked import mark
from ..parsing.parser import read_turn
from ..parsing.response import ParsedResponse
from ..showing import ShowsItself
from ..study.endings import TurnEndings
from ..study.seams import BridgeRefusal, Continuation, RefusalReason
from ..study.study import TemplateStudy
from ..tokens.ids import check_ids
from ..tokens.kinds import Kind, Kinds
from ..tokens.table import TokenTable, join
from ..tokens.tokenizer import Ids
from .lost import Lost, find_lost
from .rendered import span_messages

_CUT_OFF: Final = "the completion was cut off before it ended its turn"


@dataclasses.dataclass(eq=False, repr=False)
class BridgedTokens(ShowsItself, Sequence[int]):
    """The next prompt: the stream so far, id for id, and what comes after it.

    As a sequence it is the whole next prompt. Reading it checks the ids of the prompt, which the bridge does not.
    """

    prompt: Sequence[int] | Ids
    completion: Ids
    new: TokenTable
    """The added tokens. Their messages are indices into the new messages."""
    new_count: int
    """How many messages are new."""
    lost: Sequence[Lost] = ()
    """Fields of the new messages of which some text reached no token. Their messages count from 0."""
    changes: list[Change] = dataclasses.field(default_factory=list)
    """Changes to the new messages that made them fit the template."""

    @property
    def notes(self) -> list[str]:
        return [f"new {one}" for one in self.lost]

    @property
    def new_ids(self) -> Ids:
        """The added ids."""
        return self.new.ids

    @property
    def kinds(self) -> Kinds:
        """The `Kind` of each new id."""
        return self.new.kinds

    @property
    def messages(self) -> npt.NDArray[np.int32]:
        """The new message of each new id, -1 for none."""
        return self.new.messages

    @property
    def stream_length(self) -> int:
        """The length of the stream: everything before the new ids."""
        return len(self.prompt) + len(self.completion)

    @property
    def closed(self) -> bool:
        """Whether the completion was cut off and had to be closed."""
        return bool((self.new.kinds == Kind.SYNTHETIC).any())

    @computed
    def ids(self) -> Ids:
        """The whole next prompt. Raises InputError if the prompt is not ids."""
        prompt = check_ids(self.prompt, "prev_prompt_ids")
        return np.concatenate([prompt, self.completion, self.new_ids])

    @property
    def token_ids(self) -> list[int]:
        """The whole next prompt, as a list."""
        return cast(list[int], self.ids.tolist())

    def __len__(self) -> int:
        return self.stream_length + len(self.new_ids)

    def __getitem__(self, at: Any) -> Any:
        return self.token_ids[at] if isinstance(at, slice) else int(self.ids[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (Sequence, np.ndarray)):
            return len(self) == len(other) and bool((self.ids == np.asarray(other)).all())
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.ids if dtype is None else self.ids.astype(dtype)

    def __repr__(self) -> str:
        closed = ", turn closed" if self.closed else ""
        return f"BridgedTokens({self.stream_length} tokens + {len(self.new_ids)} new{closed})"


class Truncation(StrEnum):
    """What becomes of a completion that was cut off."""

    CLOSE = "close"
    """It is closed with tokens that carry no loss."""
    REFUSE = "refuse"
    """There is no bridge."""


class Stream(NamedTuple):
    """A prompt and its completion, as ids."""

    prompt: Sequence[int] | Ids
    completion: Ids


class _Seam(NamedTuple):
    """Ids to add after the completion, and how many ids of what follows the stop token the completion has already."""

    pieces: Sequence[tuple[Sequence[int], Kind]] = ()
    overlap: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class SeamFinder:
    """Finds the seam between a stream and what follows it."""

    study: TemplateStudy
    endings: TurnEndings
    truncation: Truncation
    compiled: Callable[[], Compiled]
    """The grammar that completions are parsed with; compiling it takes a while, and most bridges do without."""

    def join(self, stream: Stream, continuation: Continuation) -> BridgedTokens | BridgeRefusal:
        """The stream, its seam, and what the template writes after the turn, for new messages counted from 0."""
        seam = self._seam(stream, continuation)
        if isinstance(seam, BridgeRefusal):
            return seam
        encoded, conversation, first = continuation.encoded, continuation.conversation, continuation.first_new
        rendering, after = encoded.rendering, slice(continuation.turn.stop + seam.overlap, None)
        owners = [max(owner - first, -1) for owner in span_messages(rendering, conversation)]
        is_context = [  # all that the template adds to a message's text is scaffold, its role as well
            origin is not None and origin[0] == "messages" and not origin.is_role for origin in rendering.origins
        ]
        kinds = encoded.per_token(np.where(is_context, np.uint8(Kind.CONTEXT), np.uint8(Kind.SCAFFOLD)))[after]
        messages = encoded.per_token(np.asarray(owners, np.int32))[after]
        pieces = [TokenTable.of(np.asarray(ids, np.int32), kind) for ids, kind in seam.pieces if len(ids)]
        table = join([*pieces, TokenTable.of(encoded.ids[after].copy(), kinds, messages)])
        left_out = find_lost(rendering, conversation, self.study.forms, first=first)
        lost = [dataclasses.replace(one, message=(one.message or 0) - first) for one in left_out.lost]
        return BridgedTokens(*stream, table, len(conversation) - first, lost)

    def _seam(self, stream: Stream, continuation: Continuation) -> _Seam | BridgeRefusal:
        completion, stop = stream.completion, continuation.turn.stop_token
        last = int(completion[-1]) if len(completion) else -1
        if stop is None:
            return self._open_seam(stream, continuation, last)
        if last == stop:
            return _Seam()
        is_head = stop in self.endings.heads and stop not in self.endings.closers
        head: list[tuple[Sequence[int], Kind]] = [([stop], Kind.SCAFFOLD)] if is_head else []
        if self._is_stop(last):
            return _Seam(head)
        overlap = self._overlap(completion, stop, continuation.ids)
        if overlap is not None:
            return _Seam(overlap=overlap)
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
        """White space that the template writes before the stop token of past answers, as far as it is missing."""
        space, token, _ = self._marked(self.study.past_close()).partition(mark(stop))
        if not token or space.strip() or parsed.tool_calls:
            return ""
        data, _ = self.compiled().marked.spelled(completion, 0)
        return space[_shared_end(data, space) :].decode()

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

    def _open_seam(self, stream: Stream, continuation: Continuation, last: int) -> _Seam | BridgeRefusal:
        """The seam of a template that ends the turn with text, or with nothing."""
        completion = stream.completion
        whole = self._marked(continuation.encoded.rendering.text[continuation.span.body_end : continuation.cut])
        past_close = self._marked(self.study.past_close())
        shared = zip(reversed(whole), reversed(past_close), strict=False)
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], shared))
        closing = whole[len(whole) - count :]
        ended = self._is_stop(last)
        data, _ = self.compiled().marked.spelled(completion[-256 : -1 if ended else None], 0)
        ends_with_control_token = whole[-5:-4] == b"\xff"  # as `Marked` spells one
        if ends_with_control_token and data.endswith(whole):
            return _Seam()  # the template ends such a turn here: DeepSeek V3, after a single call
        there = _shared_end(data, closing)
        if ended or (closing and there == len(closing)):
            return _Seam([(self._ids(closing[there:]), Kind.SCAFFOLD)])
        remaining = closing[there:]
        if not there:
            inner = self._marked(read_turn(self.compiled(), completion, stream.prompt).closing)
            remaining = inner + closing[_shared_end(inner, closing) :]
        if remaining and self.truncation is Truncation.REFUSE:
            return BridgeRefusal(RefusalReason.TRUNCATED, _CUT_OFF)
        return _Seam([(self._ids(remaining), Kind.SYNTHETIC)])


def _shared_end(data: bytes, closing: bytes) -> int:
    """How many bytes of a closing the data ends with already."""
    return next((length for length in range(len(closing), 0, -1) if data.endswith(closing[:length])), 0)
