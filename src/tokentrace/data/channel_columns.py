"""Columns of side channels: values per token that engines return beside logprobs.

Top logprobs and routed experts have a column each; channels of other names or shapes are JSON in one column. Tokens
without a value are null.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from ..errors import SampleError, brief
from ..trajectory.channels import Channel, Entries
from .sources import pyarrow

TOP_LOGPROBS: Final = "top_logprobs"
ROUTED_EXPERTS: Final = "routed_experts"
UNTYPED: Final = "channels"
"""The column of all other channels, as JSON."""


def _types() -> dict[str, Any]:
    """The Arrow type of a token's value in each typed column."""
    pa = pyarrow()
    alternative = pa.struct([("id", pa.int32()), ("logprob", pa.float32())])
    return {TOP_LOGPROBS: pa.list_(alternative), ROUTED_EXPERTS: pa.list_(pa.list_(pa.int32()))}


def channel_fields() -> list[Any]:
    """The columns, as fields of an Arrow schema."""
    pa = pyarrow()
    return [*(pa.field(name, pa.list_(type_)) for name, type_ in _types().items()), pa.field(UNTYPED, pa.string())]


def channel_columns(rows: Sequence[tuple[int, Mapping[str, Channel]]]) -> dict[str, Any]:
    """The columns of some rows, from the number of tokens and the channels of each."""
    pa = pyarrow()
    columns: dict[str, list[Any]] = {name: [] for name in _types()}
    texts: list[str | None] = []
    for length, channels in rows:
        untyped = dict(channels)
        for name, type_ in _types().items():
            array = _one_list(name, length, channels[name], type_) if name in channels else None
            columns[name].append(pa.nulls(1, pa.list_(type_)) if array is None else array)
            if array is not None:
                del untyped[name]
        texts.append(_json(untyped) if untyped else None)
    joined = {
        name: pa.concat_arrays(arrays) if arrays else pa.nulls(0, pa.list_(_types()[name]))
        for name, arrays in columns.items()
    }
    return {**joined, UNTYPED: pa.array(texts, pa.string())}


def _one_list(name: str, length: int, channel: Channel, type_: Any) -> Any:
    """The values of one row as a list array with one entry; None if they do not have the type."""
    pa = pyarrow()
    parts, end = [], 0
    try:
        for start, entries in channel.pieces:
            values = _array(name, entries, type_)
            parts += [pa.nulls(start - end, type_), values]
            end = start + len(values)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):  # pyarrow's errors are of these kinds
        return None
    values = pa.concat_arrays([*parts, pa.nulls(length - end, type_)])
    return pa.ListArray.from_arrays(pa.array([0, len(values)], pa.int32()), values)


def _array(name: str, entries: Entries, type_: Any) -> Any:
    pa = pyarrow()
    if isinstance(entries, np.ndarray) and (name, entries.dtype.kind in "iu") == (ROUTED_EXPERTS, True):
        tokens, layers, experts = entries.reshape(len(entries), -1, entries.shape[-1]).shape
        inner = pa.ListArray.from_arrays(_steps(tokens * layers, experts), pa.array(entries.ravel(), pa.int32()))
        return pa.ListArray.from_arrays(_steps(tokens, layers), inner)
    return pa.array([None if entry is None else _typed(name, entry) for entry in _plain(entries)], type_)


def _typed(name: str, entry: Any) -> Any:
    if name == TOP_LOGPROBS:
        return [{"id": id, "logprob": logprob} for id, logprob in entry]
    return entry if not entry or isinstance(entry[0], list) else [entry]


def _steps(count: int, size: int) -> Any:
    return pyarrow().array(np.arange(count + 1, dtype=np.int32) * size)


def _plain(entries: Any) -> list[Any]:
    values = entries.tolist() if isinstance(entries, np.ndarray) else entries
    return [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in values]


def _json(channels: Mapping[str, Channel]) -> str:
    values = {name: _plain(channel.entries()) for name, channel in channels.items()}
    try:
        return json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise SampleError(f"channels {sorted(channels)} cannot be written as JSON: {error}") from error


def row_channels(row: Mapping[str, Any]) -> dict[str, Channel]:
    """The channels of a row that has these columns, as Python reads them from Arrow."""
    untyped = json.loads(row[UNTYPED]) if row.get(UNTYPED) else {}
    if not isinstance(untyped, dict) or not all(isinstance(entries, list) for entries in untyped.values()):
        raise SampleError(f"channels must be lists of entries by name, not {brief(untyped)}")
    channels = {name: Channel.of(entries) for name, entries in untyped.items()}
    if row.get(ROUTED_EXPERTS) is not None:
        channels[ROUTED_EXPERTS] = Channel.of(row[ROUTED_EXPERTS])
    if row.get(TOP_LOGPROBS) is not None:
        pairs = ([[each["id"], each["logprob"]] for each in entry] if entry else entry for entry in row[TOP_LOGPROBS])
        channels[TOP_LOGPROBS] = Channel.of(pairs)
    return channels
