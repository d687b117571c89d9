"""The next prompt, as a bridge returns it."""

import dataclasses
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..conversation.forms import Change
from ..showing import ShowsItself
from ..tokens.ids import check_ids
from ..tokens.kinds import Kind, Kinds
from ..tokens.table import TokenTable
from ..tokens.tokenizer import Ids
from .lost import Lost


@dataclasses.dataclass(eq=False, repr=False)
class BridgedTokens(ShowsItself, Sequence[int]):
    """The next prompt, a sequence of ids: the stream so far and the new ids."""

    prompt: Sequence[int] | Ids
    completion: Ids
    new: TokenTable
    """The added tokens. Their messages are indices into the new messages."""
    new_count: int
    lost: Sequence[Lost] = ()
    """Fields with text that reached no token. The first new message is 0."""
    changes: list[Change] = dataclasses.field(default_factory=list)
    """Changes to the new messages that made them fit the template."""

    @property
    def notes(self) -> list[str]:
        return [f"new {one}" for one in self.lost]

    @property
    def new_ids(self) -> Ids:
        return self.new.ids

    @property
    def kinds(self) -> Kinds:
        """The `Kind` of each new id."""
        return self.new.kinds

    @property
    def messages(self) -> npt.NDArray[np.int32]:
        """The new message that each new id belongs to, -1 for none."""
        return self.new.messages

    @property
    def stream_length(self) -> int:
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
    """What to do with a completion that was cut off."""

    CLOSE = "close"
    """Close it with tokens that carry no loss."""
    REFUSE = "refuse"


class Stream(NamedTuple):
    prompt: Sequence[int] | Ids
    completion: Ids
