"""Columns of side channels: what engines told of the tokens of rows, as Arrow holds it.

Top logprobs and routed experts have a column each; what has another name, or another shape than these, is in one column
as JSON. Tokens that nothing was told of are null.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..errors import SampleError, shown
from ..trajectory.channels import Channel, Entries
from .sources import pyarrow

UNTYPED: Final = "channels"
"""The column of channels that have no column of their own, as JSON."""


def channel_fields() -> list[Any]:
    """The columns, as fields of an Arrow schema."""
    pa = pyarrow()
    return [*(pa.field(name, pa.list_(type_())) for name, (type_, _) in _KNOWN.items()), pa.field(UNTYPED, pa.string())]


def channel_columns(rows: Sequence[tuple[int, Mapping[str, Channel]]]) -> dict[str, Any]:
    """The columns of some rows, each given by how many tokens it has and by its channels."""
    pa = pyarrow()
    typed: dict[str, list[Any]] = {name: [] for name in _KNOWN}
    texts: list[str | None] = []
    for length, channels in rows:
        untyped = {name: channel for name, channel in channels.items() if name not in _KNOWN}
        for name, (type_, _) in _KNOWN.items():
            pieces, odd = _typed(name, channels[name]) if name in channels else ([], [])
            if odd:
                untyped[name] = Channel(length, tuple(odd))
            typed[name].append(_one_list(pieces, length, type_()) if pieces else None)
        text = {name: _plain(channel.entries()) for name, channel in untyped.items()}
        texts.append(_json(text) if text else None)
    columns = {name: _joined(lists, pa.list_(_KNOWN[name][0]())) for name, lists in typed.items()}
    return {**columns, UNTYPED: pa.array(texts, pa.string())}


def _json(text: Mapping[str, Any]) -> str:
    try:
        return json.dumps(text, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise SampleError(f"channels {sorted(text)} cannot be written as JSON: {error}") from error


def row_channels(row: Mapping[str, Any]) -> dict[str, Channel]:
    """The channels of a row that has these columns, as Python reads them from Arrow."""
    channels = {
        name: Channel.of(_untyped(name, entry) for entry in row[name]) for name in _KNOWN if row.get(name) is not None
    }
    untyped = json.loads(row[UNTYPED]) if row.get(UNTYPED) else {}
    if not isinstance(untyped, dict) or not all(isinstance(entries, list) for entries in untyped.values()):
        raise SampleError(f"channels must be lists of entries by name, not {shown(untyped)}")
    for name, entries in untyped.items():
        typed = channels[name].entries() if name in channels else [None] * len(entries)
        pairs = zip(typed, entries, strict=True)
        channels[name] = Channel.of(entry if entry is not None else other for entry, other in pairs)
    return channels


def _joined(lists: Sequence[Any], type_: Any) -> Any:
    """A column: one list for each row, null where there is none."""
    pa = pyarrow()
    if all(one is None for one in lists):
        return pa.nulls(len(lists), type_)
    return pa.concat_arrays([pa.nulls(1, type_) if one is None else one for one in lists])


def _typed(name: str, channel: Channel) -> tuple[list[tuple[int, Any]], list[tuple[int, Entries]]]:
    """The pieces of a channel as Arrow arrays, and as they came those that have not the shape that they should."""
    type_, shaped = _KNOWN[name]
    pieces: list[tuple[int, Any]] = []
    odd: list[tuple[int, Entries]] = []
    for start, entries in channel.pieces:
        try:
            pieces.append((start, _array(entries, type_, shaped)))
        except (TypeError, ValueError, KeyError, IndexError, OverflowError):  # pyarrow's own are of these
            odd.append((start, entries))
    return pieces, odd


def _array(entries: Entries, type_: Callable[[], Any], shaped: Callable[[Any], Any]) -> Any:
    pa = pyarrow()
    if (
        isinstance(entries, np.ndarray)
        and type_ is _layers_type
        and entries.dtype.kind in "iu"
        and entries.ndim in (2, 3)
    ):
        grid = entries.reshape(len(entries), -1, entries.shape[-1])
        inner = pa.ListArray.from_arrays(
            _steps(grid.shape[0] * grid.shape[1], grid.shape[2]), pa.array(grid.ravel(), pa.int32())
        )
        return pa.ListArray.from_arrays(_steps(grid.shape[0], grid.shape[1]), inner)
    listed = entries.tolist() if isinstance(entries, np.ndarray) else entries
    return pa.array([None if entry is None else shaped(entry) for entry in listed], type_())


def _steps(count: int, size: int) -> Any:
    return pyarrow().array(np.arange(count + 1, dtype=np.int32) * size)


def _one_list(pieces: list[tuple[int, Any]], length: int, type_: Any) -> Any:
    """Pieces as a list array with one entry: the values of one row."""
    pa = pyarrow()
    parts, reached = [], 0
    for start, values in pieces:
        parts += [pa.nulls(start - reached, type_), values]
        reached = start + len(values)
    values = pa.concat_arrays([*parts, pa.nulls(length - reached, type_)])
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _alternatives(value: Any) -> list[dict[str, Any]]:
    return [{"id": id, "logprob": logprob} for id, logprob in value]


def _layers(value: Any) -> Any:
    return value if not value or isinstance(value[0], list) else [value]


def _alternatives_type() -> Any:
    pa = pyarrow()
    return pa.list_(pa.struct([("id", pa.int32()), ("logprob", pa.float32())]))


def _layers_type() -> Any:
    pa = pyarrow()
    return pa.list_(pa.list_(pa.int32()))


def _untyped(name: str, entry: Any) -> Any:
    return entry if entry is None or _KNOWN[name][0] is _layers_type else [[one["id"], one["logprob"]] for one in entry]


def _plain(entries: list[Any]) -> list[Any]:
    return [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in entries]


_KNOWN: Final[Mapping[str, tuple[Callable[[], Any], Callable[[Any], Any]]]] = {
    "top_logprobs": (_alternatives_type, _alternatives),
    "routed_experts": (_layers_type, _layers),
}
"""The channels that have a column of their own: the type of a token's entry, and the entry as that type has it."""
