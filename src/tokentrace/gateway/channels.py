"""What an engine says of each token beside its logprob: packed for a store, and unpacked for rows. Pure."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any


def pack_channels(channels: Mapping[str, Sequence[Any]]) -> bytes:
    """Channels as bytes; none of them are no bytes."""
    if not channels:
        return b""
    plain = {name: [_plain(value) for value in values] for name, values in channels.items()}
    return zlib.compress(json.dumps(plain, separators=(",", ":")).encode("ascii"), 1)


def unpack_channels(packed: bytes) -> dict[str, list[Any]]:
    """The channels of a turn, one list each with a value for every token of its completion."""
    channels: dict[str, list[Any]] = json.loads(zlib.decompress(packed)) if packed else {}
    return channels


def _plain(value: Any) -> Any:
    """A value as JSON has it: arrays become lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
