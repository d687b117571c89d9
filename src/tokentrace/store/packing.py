"""What a store keeps of a turn, as bytes: small where that is cheap, and the same bytes for the same turn. Pure."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .sql import StoreError

_PLAIN, _DEFLATED = b"\0", b"\1"
_WORTHWHILE: Final = 64
"""Fewer bytes than this are kept as they are."""
_COUNT = struct.Struct("<I")


def as_json(value: Any) -> str:
    """JSON in ASCII, which every database takes, whatever characters there are in the value."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def pack(data: bytes) -> bytes:
    """The bytes, deflated where that makes them fewer; no bytes stay none."""
    if not data:
        return b""
    if len(data) >= _WORTHWHILE:
        small = zlib.compress(data, 1)
        if len(small) < len(data):
            return _DEFLATED + small
    return _PLAIN + data


def unpack(packed: bytes) -> bytes:
    """What `pack` was given."""
    if not packed:
        return b""
    if packed[:1] == _PLAIN:
        return bytes(packed[1:])
    try:
        if packed[:1] == _DEFLATED:
            return zlib.decompress(memoryview(packed)[1:])
    except zlib.error as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error
    raise StoreError(f"a stored turn is damaged: it begins with {packed[:1]!r}")


def pack_records(records: Sequence[bytes]) -> bytes:
    """Several records as one piece."""
    lengths = b"".join(_COUNT.pack(len(record)) for record in records)
    return pack(b"".join((_COUNT.pack(len(records)), lengths, *records)))


def unpack_records(packed: bytes) -> tuple[bytes, ...]:
    """What `pack_records` was given."""
    data = unpack(packed)
    try:
        count = _COUNT.unpack_from(data)[0]
        lengths = struct.unpack_from(f"<{count}I", data, _COUNT.size)
    except struct.error as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error
    at = _COUNT.size * (1 + count)
    if at + sum(lengths) != len(data):
        raise StoreError("a stored turn is damaged: its records do not have the lengths that it says")
    records = []
    for length in lengths:
        records.append(data[at : at + length])
        at += length
    return tuple(records)


def pack_channels(channels: Mapping[str, Sequence[Any]]) -> bytes:
    """What an engine said of each token beside its logprob, as bytes; nothing is no bytes."""
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
