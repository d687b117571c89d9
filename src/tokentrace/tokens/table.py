"""TokenTable: one entry per token in every column, for bridged, recorded and sampled tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from .ids import segments
from .kinds import Kind, Kinds
from .tokenizer import Ids

COLUMNS = ("ids", "mask", "messages", "kinds", "parts", "logprobs", "advantages")
_OPTIONAL = {"parts": 0, "logprobs": np.nan, "advantages": 0.0}
"""Columns that a table may lack, and what `join` writes there if another table has them."""
_CHECKS = tuple(zip(COLUMNS, ("iu", "b", "iu", "iu", "iu", "f", "f"), strict=True))
_WORDS = {"iu": "integers", "b": "booleans", "f": "floats"}

Deferred = Callable[[], Mapping[str, Any]]
"""Computes columns by name, when one of them is first read."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class TokenTable:
    """Columns of tokens. `Deferred` ones are computed when first read."""

    ids: Ids
    mask: npt.NDArray[np.bool_]
    """True where a token carries loss."""
    messages: npt.NDArray[np.int32]
    """The message of each token, -1 for none."""
    kinds: Kinds
    """The `Kind` of each token."""
    parts: npt.NDArray[np.uint8] | None = None
    """The `Part` of each token, if they come from a conversation."""
    logprobs: npt.NDArray[np.float32] | None = None
    """The engine's; NaN where nothing was sampled."""
    advantages: npt.NDArray[np.float32] | None = None
    """0 where there is no loss."""
    _deferred: dict[str, Deferred] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @staticmethod
    def of(
        ids: Ids, kinds: Kinds | Kind, messages: npt.NDArray[np.int32] | int = -1, logprobs: Any = None
    ) -> TokenTable:
        """A table whose mask follows from its kinds. One kind or message applies to all tokens."""
        codes = np.full(len(ids), int(kinds), np.uint8) if isinstance(kinds, int) else kinds
        owners = np.full(len(ids), messages, np.int32) if isinstance(messages, int) else messages
        return TokenTable(ids, codes == int(Kind.SAMPLED), owners, codes, logprobs=logprobs)

    def __post_init__(self) -> None:
        for name, codes in _CHECKS:
            column: Any = getattr(self, name)
            if column is None and name in _OPTIONAL:
                continue
            if column.__class__ is not np.ndarray and callable(column):
                self._defer(name, column)
            elif not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind not in codes:
                kind = _WORDS[codes]
                raise SampleError(f"{name} must be a flat numpy array of {kind}, not {brief(column)}")
            elif column.shape != self.ids.shape:
                raise SampleError(f"{name} has {len(column)} entries, but there are {len(self.ids)} ids")
        ids = self.ids
        if len(ids) and (np.minimum.reduce(ids) < 0 or (ids.dtype != np.int32 and ids.max() > 2**31 - 1)):
            raise SampleError("ids must be 0 to 2**31 - 1")

    def _defer(self, name: str, compute: Deferred) -> None:
        self._deferred[name] = compute
        object.__delattr__(self, name)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Compute a deferred column. Called only for attributes without a value."""
            compute = self._deferred.get(name) if name != "_deferred" else None
            if compute is not None:  # None: another thread has computed them
                for key, value in compute().items():
                    object.__setattr__(self, key, value)
                    self._deferred.pop(key, None)
            return object.__getattribute__(self, name)

    def columns(self) -> dict[str, Any]:
        return {name: column for name in COLUMNS if (column := getattr(self, name)) is not None}

    def slice(self, start: int, stop: int) -> Self:
        """The tokens from `start` to `stop`, as a table of the same type."""
        columns = {name: column[start:stop] for name, column in self.columns().items()}
        return dataclasses.replace(self, **columns)

    def message_spans(self) -> list[tuple[int, int, int]]:
        return message_spans(self.messages)

    def __len__(self) -> int:
        return len(self.ids)


def join(tables: Sequence[TokenTable]) -> TokenTable:
    """Tables one after another. A column that only some have is filled for the others."""
    if len(tables) == 1 and type(tables[0]) is TokenTable:
        return tables[0]
    parts = [table.columns() for table in tables]
    for name, filler in _OPTIONAL.items():
        for part in parts if any(name in part for part in parts) else ():
            if name not in part:
                part[name] = np.full(len(part["ids"]), filler, np.uint8 if name == "parts" else np.float32)
    return TokenTable(**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


def message_spans(owners: npt.NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """Runs of tokens of one message, ``(start, stop, message)``, from each token's (-1: none)."""
    return [(start, stop, int(owners[start])) for start, stop in segments(owners) if owners[start] >= 0]
