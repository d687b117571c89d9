"""BridgedTokens: the next prompt, and which of its ids are new."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ..computed import computed
from ..conversation.forms import Change
from ..showing import ShowsItself
from ..tokens.ids import check_ids
from ..tokens.kinds import Kind, Kinds
from ..tokens.tokenizer import Ids
from .lost import Lost

Run = tuple[int, int, int]
"""So many ids of one kind and one message: -1 for none."""


class BridgedTokens(ShowsItself, Sequence[int]):
    """The next prompt: the stream so far, id for id, and what comes after it.

    `prompt` and `completion` are the caller's own objects, `new_ids` (int32) is what was added; `kinds` (uint8, see
    `Kind`) and `messages` (int32, indices into the new messages, -1 for none) have one entry for each new id. As a
    sequence it is the whole next prompt; `token_ids` and `ids` are the same as a list and as an array. All but
    `new_ids` are made when asked for, and that is when all ids of the prompt are checked: a bridge itself looks at the
    turn that is open, whatever came before it.
    """

    def __init__(
        self,
        prompt: Sequence[int] | Ids,
        completion: Sequence[int] | Ids,
        new_ids: Ids,
        runs: Sequence[Run],
        new_count: int,
        lost: Sequence[Lost] = (),
    ) -> None:
        self.prompt = prompt
        self.completion = completion
        self.new_ids = new_ids
        self._runs = runs
        self.new_count = new_count
        self.lost = list(lost)
        """Fields of the new messages of which some text, or all, reached no token. Their messages count from 0."""
        self.changes: list[Change] = []
        """What was changed in the new messages so that the template reads them."""
        self.notes = [f"new {one}" for one in lost]

    @computed
    def kinds(self) -> Kinds:
        """What each new id is."""
        return np.repeat(np.array([kind for _, kind, _ in self._runs], np.uint8), self._counts)

    @computed
    def messages(self) -> npt.NDArray[np.int32]:
        """The new message that each new id belongs to."""
        return np.repeat(np.array([message for _, _, message in self._runs], np.int32), self._counts)

    @property
    def message_spans(self) -> list[tuple[int, int, int]]:
        """The same as rows: where the ids of a message begin and end, and its number."""
        spans: list[tuple[int, int, int]] = []
        start = last = 0
        for count, _, message in self._runs:
            stop = start + count
            if message >= 0 and count:
                if spans and last == start and spans[-1][2] == message:
                    spans[-1] = (spans[-1][0], stop, message)
                else:
                    spans.append((start, stop, message))
                last = stop
            start = stop
        return spans

    @property
    def _counts(self) -> npt.NDArray[np.intp]:
        return np.array([count for count, _, _ in self._runs], np.intp)

    @property
    def stream_length(self) -> int:
        """How long the stream was: everything before `new_ids`."""
        return len(self.prompt) + len(self.completion)

    @property
    def closed(self) -> bool:
        """Whether the completion was cut off and had to be closed."""
        return any(kind == Kind.SYNTHETIC for count, kind, _ in self._runs if count)

    @computed
    def ids(self) -> Ids:
        """The whole next prompt. Raises InputError if the prompt or the completion holds something else than ids."""
        prompt = check_ids(self.prompt, "prev_prompt_ids")
        return np.concatenate([prompt, check_ids(self.completion, "prev_completion_ids"), self.new_ids])

    @property
    def token_ids(self) -> list[int]:
        """The whole next prompt, as a list."""
        return cast(list[int], self.ids.tolist())

    def __len__(self) -> int:
        return self.stream_length + len(self.new_ids)

    def __getitem__(self, at: Any) -> Any:
        found = self.ids[at]
        return int(found) if isinstance(at, (int, np.integer)) else found.tolist()

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
