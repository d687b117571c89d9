"""RenderedTokens: ids that know where they came from."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast, overload

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..conversation.forms import Change
from ..conversation.messages import REASONING_FIELDS, ROLES, conversation_remarks
from ..errors import RendererError, brief, place
from ..settings import flag, whole
from ..showing import ShowsItself
from ..study.sampling import SampledTurn
from ..template.origin import UNKNOWN, Origin
from ..template.trace import Rendering
from ..tokens.encoding import Encoded
from ..tokens.ids import segments
from ..tokens.tokenizer import Ids, Tokenizer
from .lost import LeftOut, Lost


class Token(NamedTuple):
    """One token: its id, where it came from, and whether the model samples it."""

    id: int
    text: str
    """Its text on its own; invalid UTF-8 becomes U+FFFD."""
    message: int
    """The message it belongs to (-1: none)."""
    role: str | None
    field: str
    """``"content"``, ``"tool_calls.0.function.name"``, ``"scaffold"``, ``"generation_prompt"``…"""
    origin: Origin | None
    sampled: bool


@dataclass(eq=False, repr=False)
class RenderedTokens(ShowsItself):
    """A rendered conversation.

    Arrays with an entry per token: `ids`, `messages` (-1 for none), `mask` (True where the
    model samples). Lists: `token_ids`, `message_indices`, `sampled`, `fields`, `origins`.
    ``rendered[3]`` is a `Token`.
    """

    tokenizer: Tokenizer
    encoded: Encoded
    conversation: Sequence[Mapping[str, Any]]
    turns: list[SampledTurn]
    """The sampled turns with their stop tokens."""
    mask: npt.NDArray[np.bool_]
    prompted: bool = False
    """Whether it ends with a generation prompt."""
    continued: bool = False
    """Whether its last message is left open."""
    changes: list[Change] = field(default_factory=list)
    """Messages that were changed to fit the template, and turns that `past` changed."""
    problems: Sequence[str] = ()
    """What could not be proven."""
    find_lost: Callable[[], LeftOut] = lambda: LeftOut([], [], [])

    @property
    def ids(self) -> Ids:
        return self.encoded.ids

    @property
    def rendering(self) -> Rendering:
        """The text as spans, before it became tokens."""
        return self.encoded.rendering

    @property
    def text(self) -> str:
        return self.rendering.text

    @computed
    def _left_out(self) -> LeftOut:
        return self.find_lost()

    @computed
    def notes(self) -> list[str]:
        """What is not proven, looks inconsistent, or is written differently."""
        remarks = conversation_remarks(self.conversation, continued=self.continued)
        notes = [
            *self.problems,
            *self._tag_notes(),
            *self._control_notes(),
            *remarks,
            *self._left_out.altered,
        ]
        return list(dict.fromkeys(notes))

    @property
    def lost(self) -> list[Lost]:
        """Fields with text that reached no token."""
        return self._left_out.lost

    @property
    def dropped(self) -> list[Lost]:
        """Past reasoning, which the template drops by design."""
        return self._left_out.dropped

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "find_lost": partial(LeftOut, *self._left_out)}

    @computed
    def messages(self) -> npt.NDArray[np.int32]:
        owners = span_messages(self.rendering, self.conversation)
        messages = self.encoded.per_token(np.asarray(owners, np.int32))
        for turn in self.turns:  # a turn has its stop token, also if that is the next turn's head
            messages[turn.start : turn.stop] = turn.message
        return messages

    @computed
    def token_ids(self) -> list[int]:
        return cast(list[int], self.ids.tolist())

    @computed
    def message_indices(self) -> list[int]:
        return cast(list[int], self.messages.tolist())

    @property
    def sampled(self) -> list[bool]:
        return cast(list[bool], self.mask.tolist())

    @computed
    def origins(self) -> list[Origin | None]:
        """A path such as ``("messages", 2, "content")``, or None for scaffold."""
        return list(map(self.rendering.origins.__getitem__, self.encoded.spans))

    @computed
    def fields(self) -> list[str]:
        """The field of each token, as in `Token.field`."""
        return list(map(self._span_fields.__getitem__, self.encoded.spans))

    @computed
    def _span_fields(self) -> list[str]:
        rendering = self.rendering
        names = list(map(field_name, rendering.origins))
        for span, start in enumerate([0, *rendering.ends[:-1]] if self.prompted else ()):
            if start >= rendering.tail and rendering.origins[span] is None:
                names[span] = "generation_prompt"
        return names

    @property
    def control(self) -> npt.NDArray[np.bool_]:
        """True where a token is a control token."""
        return self.encoded.control

    def tokens(self) -> list[str]:
        """The text of each token on its own; invalid UTF-8 becomes U+FFFD."""
        return [self.tokenizer.decode((index,)) for index in self.token_ids]

    def role(self, message: int) -> str | None:
        return str(self.conversation[message]["role"]) if message >= 0 else None

    def spans(self) -> Iterator[tuple[int, int, Token]]:
        """Ranges of one message and field: start, stop and the first token."""
        return ((start, stop, self[start]) for start, stop in segments(self.encoded.spans))

    def select(
        self,
        *,
        message: int | None = None,
        role: str | None = None,
        field: str | None = None,
        sampled: bool | None = None,
    ) -> npt.NDArray[np.bool_]:
        """A mask of the tokens that match all arguments. Raises RendererError."""
        chosen = np.ones(len(self.ids), np.bool_)
        roles = [row["role"] for row in self.conversation]
        if message is not None:
            last = len(roles) - 1
            if not -1 <= whole("message", message) <= last:
                raise RendererError(f"there is no message {message}, only {len(roles)}, from 0 to {last}")
            chosen &= self.messages == message
        if role is not None:
            _check_name("role", role, {*ROLES, *roles})
            chosen &= np.isin(self.messages, [at for at, other in enumerate(roles) if other == role])
        if field is not None:
            names = {str(key) for row in self.conversation for key in row} | set(self._span_fields)
            _check_name("field", field, _FIELDS.union(name.split(".")[0] for name in names))
            # reasoning is one field with many names
            same = REASONING_FIELDS if field in REASONING_FIELDS else (field,)
            fits = [name in same or name.startswith(field + ".") for name in self._span_fields]
            chosen &= self.encoded.per_token(np.asarray(fits, np.bool_))
        if sampled is not None:
            chosen &= self.mask == flag("sampled", sampled)
        return chosen

    def decode(self, chosen: npt.NDArray[np.bool_] | slice | None = None) -> str:
        """The text of the chosen tokens, for people to read."""
        try:
            ids = self.ids if chosen is None else np.atleast_1d(self.ids[chosen])
            return self.tokenizer.decode(ids.tolist())
        except (IndexError, TypeError, ValueError, OverflowError) as error:
            raise RendererError(f"chosen must be a mask, a slice or positions of tokens: {error}") from None

    @overload
    def __getitem__(self, at: int) -> Token: ...
    @overload
    def __getitem__(self, at: slice) -> list[Token]: ...

    def __getitem__(self, at: int | slice) -> Token | list[Token]:
        if isinstance(at, slice):
            return [self[index] for index in range(*at.indices(len(self)))]
        index = range(len(self))[at]  # IndexError where there is none
        span, message, number = (
            int(column[index]) for column in (self.encoded.spans, self.messages, self.ids)
        )
        origin = self.rendering.origins[span]
        text, role, name = self.tokenizer.decode((number,)), self.role(message), self._span_fields[span]
        return Token(number, text, message, role, name, origin, bool(self.mask[index]))

    def __iter__(self) -> Iterator[Token]:
        return (self[index] for index in range(len(self)))

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"RenderedTokens({len(self.ids)} tokens, {int(self.mask.sum())} sampled)"

    def _tag_notes(self) -> Iterator[str]:
        if not self.rendering.generation:
            return
        tagged = np.zeros(len(self), np.bool_)
        begins, ends = zip(*self.rendering.generation, strict=True)
        firsts, stops = self.encoded.first_touching(begins), self.encoded.first_after(ends)
        for first, stop in zip(firsts, stops, strict=True):
            tagged[first:stop] = True
        differ = tagged != self.mask
        if differ.any():
            only_tagged, only_sampled = (int(np.count_nonzero(differ & one)) for one in (tagged, self.mask))
            counts = (
                f"{only_tagged} tokens are tagged but not sampled, {only_sampled} sampled but not tagged"
            )
            first_at = f"the first at token {int(differ.argmax())}"
            yield f"the template's generation tags disagree with what is sampled: {counts}; {first_at}"

    def _control_notes(self) -> Iterator[str]:
        forged = ((self.rendering.origins[span], token) for span, token in self.encoded.forged)
        for origin, token in dict.fromkeys(forged):
            where = place(None if origin is None else origin.message, field_name(origin))
            yield f"{where}spells the control token {token!r}, which stays text (control_tokens='literal')"


_OTHER = ("scaffold", "generation_prompt", "tools", "kwargs", "unknown")
_FIELDS = frozenset((*REASONING_FIELDS, *_OTHER, "role", "content", "name", "tool_calls", "tool_call_id"))


def _check_name(kind: str, name: Any, names: Collection[str]) -> None:
    if not isinstance(name, str) or name.split(".")[0] not in names:
        raise RendererError(f"there is no {kind} {brief(name)}; there are {', '.join(sorted(names))}")


def field_name(origin: Origin | None) -> str:
    """An origin as people write it."""
    if origin is None:
        return "scaffold"
    if origin == UNKNOWN:
        return "unknown"
    return ".".join(map(str, origin.path if origin.source == "messages" else origin))


def span_messages(rendering: Rendering, messages: Sequence[Mapping[str, Any]]) -> list[int]:
    """The message of each span.

    Text belongs to its message, scaffold to its turn, and so does an assistant's text in
    another turn (a function's name above its result). Scaffold before all turns belongs to the
    first message quoted there.
    """
    ends, turns, origins = rendering.ends, rendering.turns, rendering.origins
    owners = list(turns)
    for span, origin in enumerate(origins):
        source = None if origin is None else origin.message
        if source is not None and (owners[span] < 0 or messages[source]["role"] != "assistant"):
            owners[span] = source
    first = next((k for k, turn in enumerate(turns) if turn >= 0), len(owners))
    quoted = list(dict.fromkeys(owner for owner in owners[:first] if owner >= 0))
    if not quoted:
        return owners
    begins = owners.index(quoted[0])
    start = 0 if messages[quoted[0]]["role"] in ("system", "developer") else begins
    stop = first if len(quoted) == 1 else begins  # Llama's template also quotes the first user message
    for k in range(start, stop):
        before_prompt = rendering.tail == 0 or ends[k] <= rendering.tail
        origin = origins[k]
        if owners[k] < 0 and (origin is None or origin.source == "kwargs") and before_prompt:
            owners[k] = quoted[0]
    return owners
