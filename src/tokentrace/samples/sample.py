"""Samples: rows for a trainer, from trajectories and from conversations alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import numpy.typing as npt

from ..errors import SampleError
from ..tokens.kinds import Kinds
from ..tokens.tokenizer import Ids
from ..trajectory.turns import VersionSpan

IGNORE: Final = -100
"""The label of a token that carries no loss."""

_PER_TOKEN: Final = ("mask", "messages", "kinds", "parts", "logprobs", "advantages")


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One row: ids, which of them carry loss, and where each came from. All arrays have one entry per token.

    `logprobs` are those of the engine and NaN where nothing was sampled; `advantages` are 0 where there is no loss.
    `token_ids` and `loss_mask` are lists of the same, and ``ids, mask = sample`` unpacks into these two.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    """True where a token carries loss."""
    messages: npt.NDArray[np.int32]
    """The message of each token, -1 for none."""
    kinds: Kinds
    """The `Kind` of each token."""
    parts: npt.NDArray[np.uint8] | None = None
    """The `Part` of each token, where the row comes from a conversation."""
    logprobs: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    reward: float | None = None
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens; positions are those of the row."""
    name: str = ""
    """What it was made from: the name of a trajectory, the file of a conversation."""
    branch: int = -1
    """The branch of the trajectory; -1 where there is none."""
    notes: tuple[str, ...] = ()
    """What is to be known about it before it is trained on."""

    def __post_init__(self) -> None:
        for name in _PER_TOKEN:
            array = getattr(self, name)
            if array is not None and array.shape != self.ids.shape:
                raise SampleError(f"{name} has {len(array)} entries, and there are {len(self.ids)} ids")

    @property
    def token_ids(self) -> list[int]:
        return cast(list[int], self.ids.tolist())

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token carries loss, else 0."""
        return cast(list[int], self.mask.astype(np.int8).tolist())

    @property
    def input_ids(self) -> Ids:
        return self.ids

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The ids where they carry loss, -100 elsewhere. Not shifted: that is what models do."""
        return np.where(self.mask, self.ids, IGNORE).astype(np.int64)

    @property
    def attention_mask(self) -> npt.NDArray[np.int64]:
        return np.ones(len(self.ids), np.int64)

    @property
    def position_ids(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.ids), dtype=np.int64)

    @property
    def trained(self) -> int:
        """How many tokens carry loss."""
        return int(np.count_nonzero(self.mask))

    def slice(self, start: int, stop: int) -> Sample:
        """The tokens `start` to `stop` as a sample of their own."""
        arrays: dict[str, Any] = {
            name: getattr(self, name)[start:stop] for name in _PER_TOKEN if getattr(self, name) is not None
        }
        versions = tuple(
            VersionSpan(version, max(first, start) - start, min(last, stop) - start)
            for version, first, last in self.versions
            if max(first, start) < min(last, stop)
        )
        return dataclasses.replace(self, ids=self.ids[start:stop], versions=versions, **arrays)

    def replace(self, **changes: Any) -> Sample:
        return dataclasses.replace(self, **changes)

    def __iter__(self) -> Iterator[list[int]]:
        yield self.token_ids
        yield self.loss_mask

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        return f"Sample({label}{len(self.ids)} tokens, {self.trained} trained)"
