"""Stored turns as compressed bytes. Pure."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from .sql import StoreError

_PLAIN, _COMPRESSED = b"\0", b"\2"
_WORTHWHILE = 64
_COUNT = struct.Struct("<I")
_FRONT = struct.Struct("<II")  # length and checksum of the data


def as_json(value: Any) -> str:
    """JSON in ASCII, which all databases store."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def _codec() -> Any:
    import pyarrow  # slow to import

    return pyarrow.Codec("zstd", compression_level=1)


def pack(data: bytes) -> bytes:
    if len(data) >= _WORTHWHILE:
        small = _FRONT.pack(len(data), zlib.crc32(data)) + _codec().compress(data, asbytes=True)
        if len(small) < len(data):
            return _COMPRESSED + small
    return _PLAIN + data if data else b""


def unpack(packed: bytes) -> bytes:
    """Undo `pack`. Raises StoreError for damaged data."""
    if packed[:1] in (b"", _PLAIN):
        return bytes(packed[1:])
    try:
        size, checksum = _FRONT.unpack_from(packed, 1)
        data = bytes(_codec().decompress(memoryview(packed)[1 + _FRONT.size :], size, asbytes=True))
    except (OSError, ValueError, struct.error) as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error
    if zlib.crc32(data) != checksum:
        raise StoreError("a stored turn is damaged: it does not match its checksum")
    return data


def pack_records(records: Sequence[bytes]) -> bytes:
    lengths = b"".join(_COUNT.pack(len(record)) for record in records)
    return pack(b"".join((_COUNT.pack(len(records)), lengths, *records)))


def unpack_records(packed: bytes) -> tuple[bytes, ...]:
    """Undo `pack_records`. Raises StoreError for damaged data."""
    data = unpack(packed)
    try:
        count = _COUNT.unpack_from(data)[0]
        lengths = struct.unpack_from(f"<{count}I", data, _COUNT.size)
    except struct.error as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error
    places = list(accumulate(lengths, initial=_COUNT.size * (1 + count)))
    if places[-1] != len(data):
        raise StoreError("a stored turn is damaged: the lengths of its records do not add up")
    return tuple(data[start:end] for start, end in pairwise(places))


def pack_channels(channels: Mapping[str, Sequence[Any]]) -> bytes:
    if not channels:
        return b""
    plain = json.dumps(dict(channels), separators=(",", ":"), default=lambda value: value.tolist())
    return plain.encode("ascii")


def unpack_channels(packed: bytes) -> dict[str, list[Any]]:
    """One list per channel, with a value per token."""
    channels: dict[str, list[Any]] = json.loads(packed) if packed else {}
    return channels
