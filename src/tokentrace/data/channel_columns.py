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
from ..trajectory.channels import Channel
from .sources import pyarrow

TOP_LOGPROBS: Final = "top_logprobs"
ROUTED_EXPERTS: Final = "routed_experts"
UNTYPED: Final = "channels"
"""The column of all other channels, as JSON."""


def channel_fields() -> list[Any]:
    """The columns, as fields of an Arrow schema."""
    pa = pyarrow()
    alternative = pa.struct([("id", pa.int32()), ("logprob", pa.float32())])
    return [
        pa.field(TOP_LOGPROBS, pa.list_(pa.list_(alternative))),
        pa.field(ROUTED_EXPERTS, pa.list_(pa.list_(pa.list_(pa.int32())))),
        pa.field(UNTYPED, pa.string()),
    ]


def channel_values(channels: Mapping[str, Channel]) -> dict[str, Any]:
    """The columns of a row, from its channels."""
    *typed, _ = channel_fields()
    untyped = {name: [_plain(entry) for entry in channel.entries()] for name, channel in channels.items()}
    columns = {field.name: _typed(field, untyped.get(field.name)) for field in typed}
    untyped = {name: entries for name, entries in untyped.items() if columns.get(name) is None}
    return {**columns, UNTYPED: _json(untyped) if untyped else None}


def _plain(entry: Any) -> Any:
    return entry.tolist() if isinstance(entry, np.ndarray) else entry


def _typed(field: Any, entries: Sequence[Any] | None) -> Any:
    """The values of a row in the form of its column; None if there are none, or if they do not have its type."""
    if entries is None:
        return None
    try:
        values = [entry and _entry(field.name, entry) for entry in entries]
        pyarrow().array(values, field.type.value_type)
    except (TypeError, ValueError, KeyError, IndexError, OverflowError):  # pyarrow's errors are of these kinds
        return None
    return values


def _entry(name: str, entry: Any) -> Any:
    if name == TOP_LOGPROBS:
        return [{"id": id, "logprob": logprob} for id, logprob in entry]
    return entry if isinstance(entry[0], list) else [entry]


def _json(channels: Mapping[str, Any]) -> str:
    try:
        return json.dumps(channels, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise SampleError(f"channels {sorted(channels)} cannot be written as JSON: {error}") from error


def row_channels(row: Mapping[str, Any]) -> dict[str, Channel]:
    """The channels of a row that has these columns, as Python reads them from Arrow."""
    channels = json.loads(row[UNTYPED]) if row.get(UNTYPED) else {}
    if not isinstance(channels, dict) or not all(isinstance(entries, list) for entries in channels.values()):
        raise SampleError(f"channels must be lists of entries by name, not {brief(channels)}")
    if row.get(ROUTED_EXPERTS) is not None:
        channels[ROUTED_EXPERTS] = row[ROUTED_EXPERTS]
    if (top := row.get(TOP_LOGPROBS)) is not None:
        channels[TOP_LOGPROBS] = [entry and [[one["id"], one["logprob"]] for one in entry] for entry in top]
    return {name: Channel.of(entries) for name, entries in channels.items()}
