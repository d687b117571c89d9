"""A trajectory as bytes and in files, readable up to a cut (docs/trajectory.md)."""

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from ..errors import TrajectoryError, brief
from ..values.plain import json_bytes
from .channels import Packed
from .checks import as_ids, as_owners, from_json, remembered_json
from .trajectory import Trajectory
from .turns import Turn, Write

MAGIC = b"\x89TTRJ\r\n\n"
"""No text begins like this, and a transfer that changes line endings damages it."""
VERSION = 3

_HEAD = struct.Struct("<QB")  # length of the payload, type
_U32 = struct.Struct("<I")
_FRONT = _HEAD.size + _U32.size  # the head has its own checksum: a length is either trusted or not
_IDS, _KINDS, _LOGPROBS = np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")

_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
_Index = Annotated[int, msgspec.Meta(ge=-1, lt=2**31)]  # -1: none


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    pass


class _Header(_Record):
    name: str
    vocab_size: int | None
    logprobs: bool
    metadata: dict[str, Any]


class _Tokens(_Record):
    branch: _Count
    start: _Count
    tokens: _Count


class _Context(_Tokens):
    messages: _Count
    spans: list[Any]


class _Open(_Context):
    parent: _Index
    cause: str


class _Channel(_Record):
    name: str
    bytes: _Count
    dtype: str | None
    shape: list[_Count]


class _Completion(_Tokens):
    finish_reason: str
    version: Any
    continues: bool
    sampling: dict[str, Any] | None
    logprobs_kind: str
    cached_tokens: _Count | None
    channels: list[_Channel] = []


class _Reward(_Record):
    write: _Index
    reward: Any


_TYPES = (_Header, _Open, _Context, _Completion, _Reward)
"""A record's type is its number here, counted from 1."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trajectory with all writes up to the first record that is not whole."""

    trajectory: Trajectory
    good_bytes: int
    """Where the last whole record ends."""
    problem: str | None = None
    """Why the bytes after it were not read."""

    @property
    def truncated(self) -> bool:
        return self.problem is not None


def to_bytes(trajectory: Trajectory) -> bytes:
    header = _Header(trajectory.name, trajectory.vocab_size, trajectory.has_logprobs, trajectory.metadata)
    turns = (write for write in trajectory.writes() if isinstance(write, Turn))
    rewards = (*((turn.write, turn.reward) for turn in turns), (-1, trajectory.reward))
    records = (_record(_Reward(write, reward)) for write, reward in rewards if reward is not None)
    preamble = (MAGIC, _U32.pack(VERSION), _record(header))
    return b"".join((*preamble, *write_records(trajectory), *records))


def write_records(trajectory: Trajectory, start: int = 0) -> Iterator[bytes]:
    """One record per write, from number `start` on."""
    return map(_write_record, trajectory.writes(start))


def _write_record(write: Write) -> bytes:
    tokens = write.tokens
    place = (write.branch, write.start, len(tokens))
    ids = np.asarray(tokens.ids, _IDS).tobytes()
    if isinstance(write, Turn):
        channels = [_Channel(name, len(c.data), c.dtype, list(c.shape)) for name, c in write.channels]
        version = write.version if len(write.versions) < 2 else write.versions
        sampling = None if write.sampling_json is None else remembered_json(write.sampling_json)
        how = (sampling, write.logprobs_kind, write.cached_tokens)
        logprobs = [] if tokens.logprobs is None else [np.asarray(tokens.logprobs, _LOGPROBS).tobytes()]
        completion = _Completion(*place, write.finish_reason, version, write.continues, *how, channels)
        return _record(completion, ids, *logprobs, *(packed.data for _, packed in write.channels))
    start = write.start
    spans = [(first + start, last + start, message) for first, last, message in tokens.message_spans()]
    context = _Context(*place, write.messages, spans)
    if write.parent is not None:
        context = _Open(*place, write.messages, spans, write.parent, write.cause)
    return _record(context, ids, np.asarray(tokens.kinds, _KINDS).tobytes())


def _record(fields: _Record, *arrays: bytes) -> bytes:
    text = json_bytes(fields)
    payload = b"".join((_U32.pack(len(text)), text, *arrays))
    head = _HEAD.pack(len(payload), _TYPES.index(type(fields)) + 1)
    return b"".join((head, _U32.pack(zlib.crc32(head)), payload, _U32.pack(zlib.crc32(payload))))


def from_bytes(data: bytes | bytearray | memoryview) -> Loaded:
    """Read a trajectory up to its last whole record; it may be empty.

    Raises `TrajectoryError` for another format or version, and for whole but invalid records.
    """
    if not isinstance(data, bytes | bytearray | memoryview):
        raise TrajectoryError(f"a trajectory is read from bytes, not from {brief(data)}")
    view = memoryview(data).cast("B")
    position = len(MAGIC) + _U32.size
    magic = bytes(view[: len(MAGIC)])
    if magic != MAGIC[: len(view)]:
        raise TrajectoryError(f"not a trajectory: it begins with {magic!r} instead of {MAGIC!r}")
    version = int.from_bytes(view[len(MAGIC) : position], "little")
    if version != VERSION and len(view) >= position:
        versions = f"a trajectory of version {version}; this tokentrace reads version {VERSION}"
        raise TrajectoryError(f"{versions}: load it with the tokentrace that wrote it")
    ends, problem = _scan(view, position)
    trajectory: Trajectory | None = None
    for number, (start, stop) in enumerate(pairwise([position, *ends])):
        try:
            trajectory = _read(view[start:stop], trajectory)
        except TrajectoryError as error:
            raise TrajectoryError(f"record {number} at byte {start} is invalid: {error}") from error
    if trajectory is None:
        return Loaded(Trajectory(), 0, problem or "it ends before its header")
    return Loaded(trajectory, ends[-1], problem)


def replay_records(trajectory: Trajectory, records: Iterable[bytes]) -> None:
    """Add records of `write_records` to a trajectory that has all earlier ones.

    Raises `TrajectoryError` if one is not whole or does not follow; those before it stay.
    """
    for record in records:
        view = memoryview(record)
        ends, problem = _scan(view, 0)
        if ends != [len(view)]:
            problem = problem or "it is empty, or more bytes follow it"
            raise TrajectoryError(f"record {trajectory.num_writes} is not one whole record: {problem}")
        try:
            _read(view, trajectory)
        except TrajectoryError as error:
            raise TrajectoryError(f"record {trajectory.num_writes}: {error}") from error


def restore(data: bytes) -> Trajectory:
    """Read a trajectory from bytes that must be whole: for unpickling."""
    loaded = from_bytes(data)
    if loaded.truncated:
        raise TrajectoryError(f"the trajectory is not whole: {loaded.problem}")
    return loaded.trajectory


def _scan(view: memoryview, position: int) -> tuple[list[int], str | None]:
    """Where each record from `position` on ends, and why the bytes after are none."""
    ends: list[int] = []
    while position < len(view):
        payload, problem = position + _FRONT, f"it ends inside the record that begins at byte {position}"
        if payload > len(view):
            return ends, problem
        if not _fits(view, position, position + _HEAD.size):
            return ends, f"the head of the record at byte {position} does not match its checksum"
        stop = payload + _HEAD.unpack_from(view, position)[0]
        if stop + _U32.size > len(view):
            return ends, problem
        if not _fits(view, payload, stop):
            return ends, f"the record at byte {position} does not match its checksum"
        position = stop + _U32.size
        ends.append(position)
    return ends, None


def _fits(view: memoryview, start: int, stop: int) -> bool:
    return bool(zlib.crc32(view[start:stop]) == _U32.unpack_from(view, stop)[0])


def _read(record: memoryview, trajectory: Trajectory | None) -> Trajectory:
    kind = _HEAD.unpack_from(record)[1]
    if not 0 < kind <= len(_TYPES) or (_TYPES[kind - 1] is _Header) != (trajectory is None):
        raise TrajectoryError(f"a record of type {kind} cannot appear here")
    payload = record[_FRONT : -_U32.size]
    size = _U32.unpack_from(payload)[0] if len(payload) >= _U32.size else len(payload)
    end = _U32.size + size
    if end > len(payload):
        raise TrajectoryError("its JSON is longer than the record")
    try:
        fields = msgspec.convert(from_json(bytes(payload[_U32.size : end])), _TYPES[kind - 1])
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise TrajectoryError(f"its JSON is not valid: {error}") from error
    arrays = payload[end:]
    if not isinstance(fields, _Tokens) and len(arrays):
        raise TrajectoryError(f"{len(arrays)} unexpected bytes after its JSON")
    if trajectory is None:
        return Trajectory(**msgspec.structs.asdict(fields))
    if isinstance(fields, _Tokens):
        _add(fields, arrays, trajectory)
    elif isinstance(fields, _Reward):
        writes: list[Any] = trajectory.writes()
        if fields.write >= len(writes):
            raise TrajectoryError(f"there is no write {fields.write} to reward")
        trajectory.set_reward(fields.reward, writes[fields.write] if fields.write >= 0 else None)
    return trajectory


def _add(fields: _Tokens, arrays: memoryview, trajectory: Trajectory) -> None:
    turn = fields if isinstance(fields, _Completion) else None
    width = _KINDS.itemsize if turn is None else _LOGPROBS.itemsize * trajectory.has_logprobs
    middle = fields.tokens * _IDS.itemsize
    at = end = middle + fields.tokens * width
    channels: dict[str, Packed] = {}
    for one in () if turn is None else turn.channels:
        if one.name in channels:
            raise TrajectoryError(f"channel {brief(one.name)} appears twice")
        data = bytes(arrays[at : at + one.bytes])
        channels[one.name] = Packed(fields.tokens, data, one.dtype, tuple(one.shape))
        at += one.bytes
    if at != len(arrays):
        raise TrajectoryError(f"{len(arrays)} bytes of arrays do not hold {fields.tokens} tokens")
    ids = as_ids(np.frombuffer(arrays[:middle], _IDS), "ids", trajectory.vocab_size)
    if turn is not None:
        trajectory.check_follows(turn.branch, turn.start)
        names = [name for name in turn.__struct_fields__ if name not in ("start", "tokens")]
        how = {name: getattr(turn, name) for name in names}
        logprobs = np.frombuffer(arrays[middle:end], _LOGPROBS) if trajectory.has_logprobs else None
        trajectory.append_completion(ids, logprobs, **(how | {"channels": channels}))
        return
    assert isinstance(fields, _Context)
    opens = (fields.parent, fields.cause) if isinstance(fields, _Open) else ()
    owners = as_owners(fields.spans, fields.tokens, fields.messages, start=fields.start)
    kinds = np.frombuffer(arrays[middle:end], _KINDS)
    trajectory.record_context(fields.branch, fields.start, ids, kinds, owners, fields.messages, *opens)


def load_trajectory(path: str | os.PathLike[str]) -> Loaded:
    """Read a trajectory from a file, as `from_bytes` does. Errors name the file."""
    try:
        return from_bytes(Path(path).read_bytes())
    except (OSError, TypeError, TrajectoryError) as error:
        raise TrajectoryError(f"{path}: {error}") from error
