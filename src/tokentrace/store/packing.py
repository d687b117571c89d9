"""Stored turns as compressed bytes. Pure."""

import contextlib
import functools
import importlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from .sql import StoreError

_PLAIN, _COMPRESSED = b"\0", b"\2"
_FRONT = struct.Struct("<II")  # length and checksum of the data
_arrow = functools.partial(importlib.import_module, "pyarrow")  # slow to import
as_json = functools.partial(json.dumps, separators=(",", ":"))
"""JSON in ASCII, which all databases store."""


def pack(data: bytes) -> bytes:
    if not data:
        return b""
    best = _PLAIN + data
    with contextlib.suppress(ImportError):  # without pyarrow, plain
        front = _COMPRESSED + _FRONT.pack(len(data), zlib.crc32(data))
        best = min(best, front + _arrow().compress(data, "zstd", asbytes=True), key=len)
    return best


def _unpack(packed: bytes) -> bytes:
    if packed[:1] in (b"", _PLAIN):
        return bytes(packed[1:])
    size, checksum = _FRONT.unpack_from(packed, 1)
    small = packed[1 + _FRONT.size :]
    data: bytes = _arrow().decompress(small, size, "zstd", asbytes=True)
    if zlib.crc32(data) != checksum or packed[:1] != _COMPRESSED:
        raise ValueError("its checksum differs")
    return data


def pack_records(records: Sequence[bytes]) -> bytes:
    return pack(msgspec.msgpack.encode(records))


def unpack_turn(records: bytes, info: bytes, channels: bytes) -> tuple[tuple[bytes, ...], Any, bytes]:
    """Unpack a turn. Raises StoreError for damaged data."""
    try:
        read = msgspec.msgpack.decode(_unpack(records), type=tuple[bytes, ...])
        return read, json.loads(_unpack(info)), _unpack(channels)
    except (OSError, TypeError, ValueError, struct.error) as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error


def pack_channels(channels: Mapping[str, Sequence[Any]]) -> bytes:
    text = json.dumps(dict(channels), separators=(",", ":"), default=lambda value: value.tolist())
    return text.encode("ascii") if channels else b""


def unpack_channels(packed: bytes) -> dict[str, list[Any]]:
    """One list per channel, with a value per token."""
    return dict(json.loads(packed)) if packed else {}
