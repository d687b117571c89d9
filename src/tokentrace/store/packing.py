"""Stored turns as compressed bytes. Pure."""

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import msgspec

from .sql import StoreError

_PLAIN, _DEFLATED = b"\0", b"\1"
_WORTHWHILE = 64
_COUNT = struct.Struct("<I")


def as_json(value: Any) -> str:
    """JSON in ASCII, which all databases store."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def json_bytes(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair
        return as_json(msgspec.to_builtins(value)).encode("ascii")


def pack(data: bytes) -> bytes:
    small = data
    if len(data) >= _WORTHWHILE:
        deflate = zlib.compressobj(1, wbits=13, memLevel=6)  # 64 KB of memory to clear instead of 256
        small = deflate.compress(data) + deflate.flush()
    return _DEFLATED + small if len(small) < len(data) else _PLAIN + data if data else b""


def unpack(packed: bytes) -> bytes:
    """Undo `pack`. Raises StoreError for damaged data."""
    if packed[:1] in (b"", _PLAIN):
        return bytes(packed[1:])
    try:
        return zlib.decompress(memoryview(packed)[1:])
    except zlib.error as error:
        raise StoreError(f"a stored turn is damaged: {error}") from error


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
    return zlib.compress(plain.encode("ascii"), 1)


def unpack_channels(packed: bytes) -> dict[str, list[Any]]:
    """One list per channel, with a value per token."""
    channels: dict[str, list[Any]] = json.loads(zlib.decompress(packed)) if packed else {}
    return channels
