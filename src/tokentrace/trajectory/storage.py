"""A trajectory as bytes and in files: a form that can be appended to, and read up to where it was cut off.

docs/trajectory.md is the specification.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError, brief
from ..files import write_whole
from .channels import Packed
from .inputs import as_count, from_json
from .trajectory import Trajectory
from .turns import Turn

MAGIC: Final = b"\x89TTRJ\r\n\n"
"""No text begins like this, and a transfer that changes line ends damages it."""
VERSION: Final = 3
"""The version that is written and read."""

_VERSION = struct.Struct("<I")
_HEAD = struct.Struct("<QB")  # length of the payload, type
_CRC = struct.Struct("<I")
_FRONT: Final = _HEAD.size + _CRC.size  # the head has its own checksum: a length is either trusted or not
_JSON_LENGTH = struct.Struct("<I")
_IDS, _KINDS, _LOGPROBS = np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")


class RecordType(IntEnum):
    """What a record holds."""

    HEADER = 1
    OPEN = 2
    CONTEXT = 3
    COMPLETION = 4
    REWARD = 5


_FIELDS: Final = {
    RecordType.HEADER: {"name", "vocab_size", "logprobs", "metadata"},
    RecordType.OPEN: {"branch", "start", "tokens", "messages", "spans", "parent", "cause"},
    RecordType.CONTEXT: {"branch", "start", "tokens", "messages", "spans"},
    RecordType.COMPLETION: {
        *("branch", "start", "tokens", "finish_reason", "version", "continues"),
        *("sampling", "logprobs_kind", "cached_tokens"),
    },
    RecordType.REWARD: {"write", "reward"},
}
"""The fields of the JSON of each record. A completion may have `channels` too."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trajectory with all writes up to the first record that is not whole."""

    trajectory: Trajectory
    good_bytes: int
    """Where the last whole record ends."""
    problem: str | None = None
    """Why there is more after `good_bytes` that was not read."""

    @property
    def truncated(self) -> bool:
        """Whether anything was left out."""
        return self.problem is not None


# -- writing


def to_bytes(trajectory: Trajectory) -> bytes:
    """The whole trajectory."""
    return b"".join(_records(trajectory))


def _records(trajectory: Trajectory) -> Iterator[bytes]:
    yield preamble(trajectory)
    yield from write_records(trajectory)
    for write, reward in trajectory.rewarded:  # each follows the record of its turn
        yield _record(RecordType.REWARD, {"write": write, "reward": reward})


def preamble(trajectory: Trajectory) -> bytes:
    """What comes before the writes: magic, version, and the header record."""
    header = {
        "name": trajectory.name,
        "vocab_size": trajectory.vocab_size,
        "logprobs": trajectory.has_logprobs,
        "metadata": trajectory.metadata,
    }
    return MAGIC + _VERSION.pack(VERSION) + _record(RecordType.HEADER, header)


def write_records(trajectory: Trajectory, start: int = 0) -> Iterator[bytes]:
    """One record per write, from number `start` on."""
    for write in trajectory.writes(start):
        tokens = write.tokens
        fields: dict[str, Any] = {"branch": write.branch, "start": write.start, "tokens": len(tokens)}
        arrays = [np.asarray(tokens.ids, _IDS).tobytes()]
        if isinstance(write, Turn):
            kind = RecordType.COMPLETION
            fields |= {
                "finish_reason": write.finish_reason,
                "version": write.version if len(write.versions) < 2 else write.versions,
                "continues": write.continues,
                "sampling": write.sampling,
                "logprobs_kind": write.logprobs_kind,
                "cached_tokens": write.cached_tokens,
            }
            if write.channels:
                fields["channels"] = [
                    {"name": name, "bytes": len(packed.data), "dtype": packed.dtype, "shape": list(packed.shape)}
                    for name, packed in write.channels
                ]
            if tokens.logprobs is not None:
                arrays.append(np.asarray(tokens.logprobs, _LOGPROBS).tobytes())
            arrays += [packed.data for _, packed in write.channels]
        else:
            kind = RecordType.CONTEXT
            spans = [(first + write.start, last + write.start, at) for first, last, at in tokens.message_spans()]
            fields |= {"messages": write.messages, "spans": spans}
            if write.parent is not None:
                kind = RecordType.OPEN
                fields |= {"parent": write.parent, "cause": write.cause}
            arrays.append(np.asarray(tokens.kinds, _KINDS).tobytes())
        yield _record(kind, fields, *arrays)


def _record(kind: RecordType, fields: dict[str, Any], *arrays: bytes) -> bytes:
    text = json.dumps(fields, allow_nan=False, separators=(",", ":")).encode("ascii")
    payload = b"".join((_JSON_LENGTH.pack(len(text)), text, *arrays))
    head = _HEAD.pack(len(payload), kind)
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload, _CRC.pack(zlib.crc32(payload))))


# -- reading


def from_bytes(data: bytes | bytearray | memoryview) -> Loaded:
    """Read a trajectory up to its last whole record; `Loaded.truncated` says whether that is all.

    Raises `TrajectoryError` for bytes of another kind or another version, and for a whole record that no
    trajectory could have written. Bytes that end before the header is whole give an empty trajectory.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise TrajectoryError(f"a trajectory is read from bytes, not from {brief(data)}") from error
    position = len(MAGIC) + _VERSION.size
    if bytes(view[: len(MAGIC)]) != MAGIC[: len(view)]:
        raise TrajectoryError(
            f"not a trajectory: it begins with {bytes(view[: len(MAGIC)])!r}, and a trajectory with {MAGIC!r}"
        )
    if len(view) < position:
        return Loaded(Trajectory(), 0, "it ends before its version")
    version = _VERSION.unpack_from(view, len(MAGIC))[0]
    if version != VERSION:
        raise TrajectoryError(
            f"a trajectory of version {version}; this tokentrace reads version {VERSION}: load the file with the "
            "tokentrace that wrote it"
        )
    trajectory: Trajectory | None = None
    number = 0
    while trajectory is None or position < len(view):
        stop, problem = _record_end(view, position)
        if problem is not None:
            return Loaded(Trajectory(), 0, problem) if trajectory is None else Loaded(trajectory, position, problem)
        try:
            trajectory = _read(view[position:stop], trajectory)
        except TrajectoryError as error:
            raise TrajectoryError(f"record {number} at byte {position} is whole but wrong: {error}") from error
        position, number = stop, number + 1
    return Loaded(trajectory, position)


def replay_records(trajectory: Trajectory, records: Iterable[bytes]) -> int:
    """Add records of `write_records`, in their order, to a trajectory that has all those before them.

    Returns how many there were. Raises `TrajectoryError` for a record that is not whole or does not follow on the
    trajectory; the records before it have been added then.
    """
    before = trajectory.num_writes
    for record in records:
        view = memoryview(record)
        stop, problem = _record_end(view, 0)
        if problem is not None or stop < len(view):
            problem = problem or "more bytes follow it"
            raise TrajectoryError(f"record {trajectory.num_writes} is not one whole record: {problem}")
        try:
            _read(view, trajectory)
        except TrajectoryError as error:
            raise TrajectoryError(f"record {trajectory.num_writes}: {error}") from error
    return trajectory.num_writes - before


def restore(data: bytes) -> Trajectory:
    """The trajectory of bytes that are whole; what unpickling calls."""
    loaded = from_bytes(data)
    if loaded.truncated:
        raise TrajectoryError(f"the trajectory is not whole: {loaded.problem}")
    return loaded.trajectory


def _record_end(view: memoryview, position: int) -> tuple[int, str | None]:
    """Where the record at `position` ends, and what is wrong with it, if anything."""
    remaining = len(view) - position
    inside = f"it ends inside the record that begins at byte {position}"
    if remaining < _FRONT:
        return position, inside if remaining else "it ends before its header"
    length = _HEAD.unpack_from(view, position)[0]
    if not _fits(view, position, position + _HEAD.size):
        if not bytes(view[position:]).strip(b"\0"):
            return position, f"from byte {position} on there are only zeros"
        return position, f"the head of the record at byte {position} does not fit its checksum"
    if length > remaining - _FRONT - _CRC.size:
        return position, inside
    stop: int = position + _FRONT + length + _CRC.size
    if not _fits(view, position + _FRONT, stop - _CRC.size):
        return position, f"the record at byte {position} does not fit its checksum"
    return stop, None


def _fits(view: memoryview, start: int, stop: int) -> bool:
    return bool(zlib.crc32(view[start:stop]) == _CRC.unpack_from(view, stop)[0])


def _read(record: memoryview, trajectory: Trajectory | None) -> Trajectory:
    """Add one whole record to a trajectory; the header makes a new one."""
    kind = _HEAD.unpack_from(record)[1]
    if kind not in _FIELDS or (kind == RecordType.HEADER) != (trajectory is None):
        raise TrajectoryError(f"a record of type {kind} cannot stand here")
    payload = record[_FRONT : -_CRC.size]
    if len(payload) < _JSON_LENGTH.size:
        raise TrajectoryError("it is too short for the length of its JSON")
    end = _JSON_LENGTH.size + _JSON_LENGTH.unpack_from(payload)[0]
    if end > len(payload):
        raise TrajectoryError("its JSON is longer than the record")
    try:
        fields = from_json(bytes(payload[_JSON_LENGTH.size : end]))
    except (ValueError, RecursionError) as error:
        raise TrajectoryError(f"its JSON is not valid: {error}") from error
    _check_fields(fields, _FIELDS[kind], {"channels"} if kind == RecordType.COMPLETION else set())
    arrays = payload[end:]
    if trajectory is not None and kind != RecordType.REWARD:
        _read_write(kind, fields, arrays, trajectory)
        return trajectory
    if len(arrays):
        raise TrajectoryError(f"{len(arrays)} bytes after its JSON")
    if trajectory is None:
        return Trajectory(**fields)
    if type(fields["write"]) is not int:
        raise TrajectoryError("a reward is the number of a write, or -1, and a number or null")
    trajectory.replay_reward(fields["write"], fields["reward"])
    return trajectory


def _read_write(kind: int, fields: dict[str, Any], arrays: memoryview, trajectory: Trajectory) -> None:
    branch, start, tokens = (as_count(fields[name], name) for name in ("branch", "start", "tokens"))
    width = _KINDS.itemsize if kind != RecordType.COMPLETION else _LOGPROBS.itemsize * trajectory.has_logprobs
    middle = tokens * _IDS.itemsize
    end = middle + tokens * width
    channels = _read_channels(fields.get("channels", []), arrays[end:], tokens)
    if end + sum(len(packed.data) for packed in channels.values()) != len(arrays):
        raise TrajectoryError(f"{len(arrays)} bytes of arrays do not hold {tokens} tokens")
    ids = np.frombuffer(arrays[:middle], _IDS).astype(np.int32)
    if kind == RecordType.COMPLETION:
        trajectory.check_follows(branch, start)
        trajectory.append_completion(
            ids,
            np.frombuffer(arrays[middle:end], _LOGPROBS) if trajectory.has_logprobs else None,
            finish_reason=fields["finish_reason"],
            version=fields["version"],
            sampling=fields["sampling"],
            continues=fields["continues"],
            logprobs_kind=fields["logprobs_kind"],
            cached_tokens=fields["cached_tokens"],
            channels=channels,
            branch=branch,
        )
        return
    spans, messages, opens = fields["spans"], as_count(fields["messages"], "messages"), None
    if not isinstance(spans, list):
        raise TrajectoryError("spans must be a list")
    if kind == RecordType.OPEN:
        parent = -1 if fields["parent"] == -1 else as_count(fields["parent"], "parent")
        opens = (parent, fields["cause"])
    trajectory.replay_context(branch, start, ids, np.frombuffer(arrays[middle:end], _KINDS), spans, messages, opens)


def _read_channels(table: Any, data: memoryview, tokens: int) -> dict[str, Packed]:
    """The channels of a completion, from the bytes that hold them one after another."""
    channels: dict[str, Packed] = {}
    if not isinstance(table, list):
        raise TrajectoryError("channels must be a list")
    for row in table:
        _check_fields(row, {"name", "bytes", "dtype", "shape"})
        name, size, dtype, shape = row["name"], as_count(row["bytes"], "bytes"), row["dtype"], row["shape"]
        if not isinstance(name, str) or name in channels or not isinstance(dtype, str | None):
            raise TrajectoryError(f"channel {brief(name)} is there twice, or has no type")
        if not isinstance(shape, list) or size > len(data):
            raise TrajectoryError(f"channel {brief(name)} is longer than the record, or has no shape")
        channels[name] = Packed(tokens, bytes(data[:size]), dtype, tuple(shape))
        data = data[size:]
    return channels


def _check_fields(fields: Any, required: set[str], optional: set[str] | None = None) -> None:
    if not isinstance(fields, dict):
        raise TrajectoryError("its JSON is not an object")
    if set(fields) - (optional or set()) != required:
        raise TrajectoryError(f"its JSON must have {sorted(required)}, not {sorted(fields)}")


# -- files


def save_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write the whole trajectory. The file is there whole or not at all, and replaces one of that name.

    Only its owner may read it, since it holds whole conversations.
    """
    write_whole(Path(path), _records(trajectory), private=True)
    if os.name == "posix":  # makes the rename last through a power cut
        folder = os.open(Path(path).parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load_trajectory(path: str | os.PathLike[str]) -> Loaded:
    """Read a trajectory up to the last whole record; `Loaded.truncated` says whether that is all.

    Raises `TrajectoryError` for a file of another kind or version, or with a record that is whole and wrong.
    """
    try:
        return from_bytes(Path(path).read_bytes())
    except TrajectoryError as error:
        raise TrajectoryError(f"{os.fspath(path)}: {error}") from error
