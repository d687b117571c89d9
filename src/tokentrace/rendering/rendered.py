"""RenderedTokens: ids that know where they came from."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..conversation.forms import Change
from ..conversation.messages import ROLES
from ..errors import RendererError, SampleError, brief
from ..settings import flag, whole
from ..showing import ShowsItself
from ..study.sampling import SampledTurn
from ..template.chat_template import REASONING_FIELDS
from ..template.origin import UNKNOWN, Origin
from ..template.spans import Rendering
from ..tokens.encoded import Encoded, Number
from ..tokens.tokenizer import Ids, Tokenizer
from .lost import LeftOut, Lost


class Token(NamedTuple):
    """One token: its id, where it came from, and whether the model samples it."""

    id: int
    text: str
    """What it says on its own, for people: bytes that are not UTF-8 become U+FFFD."""
    message: int
    """The message it belongs to (-1: none)."""
    role: str | None
    field: str
    """``"content"``, ``"tool_calls.0.function.name"``, ``"scaffold"``, ``"generation_prompt"``…"""
    origin: Origin | None
    sampled: bool


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens ``start`` to ``stop`` (exclusive) that came from one field of one message."""

    start: int
    stop: int
    message: int
    role: str | None
    field: str


class RenderedTokens(ShowsItself):
    """A rendered conversation.

    Arrays with one entry per token: `ids`, `messages` (-1 for none), `mask` (True where the model samples). Lists of
    the same: `token_ids`, `message_indices`, `sampled`, `fields`, `origins`. ``rendered[3]`` is one `Token`.

    `turns` are the sampled turns with their stop tokens. `changes` lists changes to the messages that made them fit
    the template, and turns that differ from the shipped template's (`past`). `notes` lists what could not be proven or
    does not agree. `mask_means` is ``"sampled"``, or ``"trained"`` if the mask is that of a training row.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        encoded: Encoded,
        conversation: Sequence[Mapping[str, Any]],
        turns: Sequence[SampledTurn],
        mask: npt.NDArray[np.bool_],
        prompted: bool,
        changes: Sequence[Change] = (),
        find_notes: Callable[[], Iterable[str]] = tuple,
        find_lost: Callable[[], LeftOut] | None = None,
    ) -> None:
        self.ids: Ids = encoded.ids
        self.turns = list(turns)
        self.mask = mask
        self.mask_means = "sampled"
        self.changes = list(changes)
        self._find_lost = find_lost
        self._find_notes = find_notes
        self._tokenizer = tokenizer
        self._encoded = encoded
        self._conversation = conversation
        self._roles = roles_of(conversation)
        self._prompted = prompted

    # -- per token

    @property
    def rendering(self) -> Rendering:
        """The text as spans, before it became tokens."""
        return self._encoded.rendering

    @property
    def tokenizer(self) -> Tokenizer:
        """What it was encoded with."""
        return self._tokenizer

    @property
    def text(self) -> str:
        """The rendered text."""
        return self._encoded.rendering.text

    @property
    def span_indices(self) -> npt.NDArray[np.int32]:
        """Which span of `rendering` each token begins in."""
        return self._encoded.spans

    def per_token(self, of_spans: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """A value of each closed span of `rendering`, for each token that begins in it."""
        return self._encoded.per_token(of_spans)

    @computed
    def _left_out(self) -> LeftOut:
        return self._find_lost() if self._find_lost is not None else LeftOut([], [], [])

    @computed
    def _remarks(self) -> list[str]:
        return list(self._find_notes())

    @property
    def notes(self) -> list[str]:
        """What could not be proven or does not agree, and fields that are not written as in the message."""
        return list(dict.fromkeys([*self._remarks, *self._left_out.altered]))

    @property
    def lost(self) -> list[Lost]:
        """Fields of which some text, or all, reached no token: message, field, why, and the text."""
        return self._left_out.lost

    @property
    def dropped(self) -> list[Lost]:
        """What the template drops from the past by design, with the name of that policy."""
        return self._left_out.dropped

    @computed
    def messages(self) -> npt.NDArray[np.int32]:
        rendering = self.rendering
        owners = np.asarray(span_messages(rendering, self._roles), np.int32)
        messages = self._encoded.per_token(owners)
        for turn in self.turns:  # a stop token that is the head of the next turn belongs to who sampled it
            messages[turn.start : turn.stop] = turn.message
        return messages

    @computed
    def token_ids(self) -> list[int]:
        return cast(list[int], self.ids.tolist())

    @computed
    def message_indices(self) -> list[int]:
        return cast(list[int], self.messages.tolist())

    @computed
    def sampled(self) -> list[bool]:
        return cast(list[bool], self.mask.tolist())

    @computed
    def origins(self) -> list[Origin | None]:
        """The origin of each token: a path such as ``("messages", 2, "content")``, or None for scaffold."""
        origins = self.rendering.origins
        return [origins[span] for span in self._encoded.spans.tolist()]

    @computed
    def fields(self) -> list[str]:
        """The field of each token: ``"content"``, ``"tool_calls.0.function.name"``, ``"scaffold"``…"""
        names = self._span_fields
        return [names[span] for span in self._encoded.spans.tolist()]

    @computed
    def _span_fields(self) -> list[str]:
        rendering = self.rendering
        return [
            "generation_prompt" if origin is None and self._prompted and start >= rendering.tail else field_name(origin)
            for start, origin in zip([0, *rendering.ends], rendering.origins, strict=False)  # one start too many
        ]

    @computed
    def control(self) -> npt.NDArray[np.bool_]:
        """True where a token is a control token."""
        return self._encoded.control

    def tokens(self) -> list[str]:
        """The text of each token on its own, for people: bytes that are no UTF-8 become U+FFFD."""
        return [self._tokenizer.decode((index,)) for index in self.ids.tolist()]

    # -- selecting

    def role(self, message: int) -> str | None:
        return self._roles[message] if message >= 0 else None

    def spans(self) -> Iterator[TokenSpan]:
        """All tokens, as spans of one message and one field, in order."""
        if not len(self.ids):
            return
        key = self._encoded.spans
        cuts = np.flatnonzero(np.diff(key)) + 1
        for start, stop in zip([0, *cuts.tolist()], [*cuts.tolist(), len(key)], strict=True):
            message = int(self.messages[start])
            yield TokenSpan(start, stop, message, self.role(message), self._span_fields[int(key[start])])

    def select(
        self,
        *,
        message: int | None = None,
        role: str | None = None,
        field: str | None = None,
        sampled: bool | None = None,
    ) -> npt.NDArray[np.bool_]:
        """A mask of the tokens that fit all arguments. ``message=-1`` is tokens of no message.

        Raises RendererError for a message that does not exist, and for a role or a field that no message can have.
        """
        self._check_selection(message, role, field)
        chosen = np.ones(len(self.ids), np.bool_)
        if message is not None:
            chosen &= self.messages == message
        if role is not None:
            of_role = [at for at, other in enumerate(self._roles) if other == role]
            chosen &= np.isin(self.messages, of_role)
        if field is not None:
            fits = [_is_field(name, field) for name in self._span_fields]
            chosen &= np.asarray(fits, np.bool_)[self._encoded.spans] if fits else False
        if sampled is not None:
            chosen &= self.mask == flag("sampled", sampled)
        return chosen

    def _check_selection(self, message: Any, role: Any, field: Any) -> None:
        count = len(self._conversation)
        if message is not None and not -1 <= whole("message", message) < count:
            raise RendererError(f"there is no message {message}; there are {count}, from 0 to {count - 1}")
        if role is not None:
            _check_name("role", role, {*ROLES, *self._roles})
        if field is not None:
            names = {str(key) for row in self._conversation for key in row} | set(self._span_fields)
            _check_name("field", field, _FIELDS.union(name.split(".")[0] for name in names))

    def decode(self, chosen: npt.NDArray[np.bool_] | slice | None = None) -> str:
        """The text of the chosen tokens, for people to read."""
        try:
            ids = self.ids if chosen is None else np.atleast_1d(self.ids[chosen])
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            raise RendererError(f"chosen is a mask, a slice or positions of these tokens: {error}") from None
        if ids.ndim != 1:
            raise RendererError("chosen is one row: a mask, a slice or positions of these tokens")
        return self._tokenizer.decode(ids.tolist())

    def with_mask(self, mask: npt.NDArray[np.bool_]) -> RenderedTokens:
        """The same tokens with the loss mask of a training row as their mask."""
        if not isinstance(mask, np.ndarray) or mask.dtype != np.bool_:
            raise SampleError(f"the mask is an array of bools, not {brief(mask)}")
        if mask.shape != self.ids.shape:
            raise SampleError(f"a mask of shape {mask.shape} does not fit {len(self.ids)} tokens")
        other = copy.copy(self)
        other.__dict__.pop("sampled", None)
        other.mask = mask
        other.mask_means = "trained"
        other.turns = [turn for turn in self.turns if mask[turn.start : turn.stop].any()]
        return other

    @overload
    def __getitem__(self, at: int) -> Token: ...
    @overload
    def __getitem__(self, at: slice) -> list[Token]: ...

    def __getitem__(self, at: int | slice) -> Token | list[Token]:
        """One token with all that is known of it, or a list of them."""
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[at]  # IndexError where there is none
        span, message = int(self._encoded.spans[index]), int(self.messages[index])
        number = int(self.ids[index])
        return Token(
            number,
            self._tokenizer.decode((number,)),
            message,
            self.role(message),
            self._span_fields[span],
            self.rendering.origins[span],
            bool(self.mask[index]),
        )

    def __iter__(self) -> Iterator[Token]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"RenderedTokens({len(self.ids)} tokens, {int(self.mask.sum())} sampled)"


_FIELDS: Final = frozenset(
    {"content", *REASONING_FIELDS, "tool_calls", "name", "tool_call_id", "role", "scaffold", "generation_prompt"}
    | {"tools", "kwargs", "unknown"}
)
"""Fields that a token may be of, whether or not this conversation has one."""


def _check_name(kind: str, name: Any, names: Collection[str]) -> None:
    """Raise RendererError for a name that does not begin with one of these."""
    if not isinstance(name, str) or name.split(".")[0] not in names:
        raise RendererError(f"there is no {kind} {brief(name)}; there are {', '.join(sorted(names))}")


def _is_field(name: str, chosen: str) -> bool:
    """Whether a field is the chosen one, or lies below it. Reasoning is one field by whatever name it came."""
    if chosen in REASONING_FIELDS:
        return name in REASONING_FIELDS
    return name == chosen or name.startswith(chosen + ".")


def field_name(origin: Origin | None) -> str:
    """An origin as people write it."""
    if origin is None:
        return "scaffold"
    if origin == UNKNOWN:
        return "unknown"
    return ".".join(map(str, origin.path if origin.source == "messages" else origin))


def roles_of(conversation: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(message["role"]) for message in conversation]


def span_messages(rendering: Rendering, roles: Sequence[str]) -> list[int]:
    """The message of each span. `roles` are by message.

    Text belongs to the message it came from, scaffold to the one in whose turn it was written. Text of an assistant
    that another's turn repeats (a function's name above its result) belongs to that other turn: it was not sampled
    there. Scaffold before all turns, and what template variables say in it (a date), belongs to the message that is
    quoted in it, if it quotes one only. What comes before the quote may be a system block of the template: it belongs
    to the message if that is a system message.
    """
    ends, turns, origins = rendering.ends, rendering.turns, rendering.origins
    owners = list(turns)
    for span, origin in enumerate(origins):
        source = None if origin is None else origin.message
        if source is not None and (owners[span] < 0 or roles[source] != "assistant"):
            owners[span] = source
    first = next((k for k, turn in enumerate(turns) if turn >= 0), len(owners))
    quoted = list(dict.fromkeys(owner for owner in owners[:first] if owner >= 0))
    if not quoted:
        return owners
    begins = owners.index(quoted[0])
    start = 0 if roles[quoted[0]] in ("system", "developer") else begins
    stop = first if len(quoted) == 1 else begins  # Llama's, with tools, quotes the first user's message as well
    for k in range(start, stop):
        before_prompt = rendering.tail == 0 or ends[k] <= rendering.tail
        origin = origins[k]
        if owners[k] < 0 and (origin is None or origin.source == "kwargs") and before_prompt:
            owners[k] = quoted[0]
    return owners
