"""A trajectory as bytes and in files: a versioned form that can be appended to, and read up to where it was cut off.

docs/trajectory.md is the specification.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import numpy as np

from ..errors import TrajectoryError, shown
from ..files import owned, write_whole
from .channels import Packed
from .inputs import as_count, from_json
from .trajectory import Trajectory
from .turns import CompletionWrite, ContextWrite, Write

MAGIC: Final = b"\x89TTRJ\r\n\n"
"""No text begins like this, and a transfer that changes line ends damages it."""
VERSION: Final = 3
"""The version that is written and read."""

_VERSION = struct.Struct("<I")
_HEAD = struct.Struct("<QB")  # length of the payload, type
_CRC = struct.Struct("<I")
_FRONT: Final = _HEAD.size + _CRC.size  # the head has a checksum of its own: a length is believed or not
_JSON_LENGTH = struct.Struct("<I")
_IDS, _KINDS, _LOGPROBS = np.dtype("<i4"), np.dtype("u1"), np.dtype("<f4")


class RecordType(IntEnum):
    """What a record holds."""

    HEADER = 1
    OPEN = 2
    CONTEXT = 3
    COMPLETION = 4
    REWARD = 5


class Ending(Enum):
    """How the bytes of a trajectory end."""

    WHOLE = "whole"
    CUT_OFF = "cut off"
    """In the middle of a record, or in zeros that were never written over."""
    DAMAGED = "damaged"
    """With a record that does not fit its checksum; there may be whole ones after it."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A trajectory with all writes up to the first record that is not whole, and what was found there."""

    trajectory: Trajectory
    ending: Ending
    writes: int
    """How many writes were read."""
    good_bytes: int
    """Where the last whole record ends."""
    total_bytes: int
    problem: str | None = None
    """What is wrong after `good_bytes`, in words."""

    @property
    def truncated(self) -> bool:
        """Whether anything was left out."""
        return self.ending is not Ending.WHOLE


def to_bytes(trajectory: Trajectory) -> bytes:
    """The whole trajectory."""
    return b"".join(_whole(trajectory))


def _whole(trajectory: Trajectory) -> Iterator[bytes]:
    return itertools.chain([preamble(trajectory)], write_records(trajectory), reward_records(trajectory))


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
    """One record a write, from number `start` on."""
    for write in trajectory.writes(start):
        small: dict[str, Any] = {"branch": write.branch, "start": write.start, "tokens": len(write.ids)}
        ids = np.asarray(write.ids, _IDS).tobytes()
        if isinstance(write, CompletionWrite):
            small |= {"finish_reason": write.finish_reason, "version": write.version, "continues": write.continues}
            small["sampling"] = None if write.sampling_json is None else from_json(write.sampling_json)
            small |= {"logprobs_kind": write.logprobs_kind, "cached_tokens": write.cached_tokens}
            logprobs = b"" if write.logprobs is None else np.asarray(write.logprobs, _LOGPROBS).tobytes()
            if write.channels:
                small["channels"] = [
                    {"name": name, "bytes": len(one.data), "dtype": one.dtype, "shape": list(one.shape)}
                    for name, one in write.channels.items()
                ]
            told = (one.data for one in write.channels.values())
            yield _record(RecordType.COMPLETION, small, ids, logprobs, *told)
            continue
        small |= {"messages": write.messages, "spans": write.spans.tolist()}
        kind = RecordType.CONTEXT
        if write.parent is not None:
            kind = RecordType.OPEN
            small |= {"parent": write.parent, "cause": write.cause}
        yield _record(kind, small, ids, np.asarray(write.kinds, _KINDS).tobytes())


def reward_records(trajectory: Trajectory, start: int = 0) -> Iterator[bytes]:
    """One record for each reward that was said, from number `start` on; it stands after the turn that it is of."""
    for write, reward in trajectory.rewarded[start:]:
        yield _record(RecordType.REWARD, {"write": write, "reward": reward})


def _record(kind: RecordType, small: dict[str, Any], *arrays: bytes) -> bytes:
    text = json.dumps(small, allow_nan=False, separators=(",", ":")).encode("ascii")
    payload = b"".join((_JSON_LENGTH.pack(len(text)), text, *arrays))
    head = _HEAD.pack(len(payload), kind)
    return b"".join((head, _CRC.pack(zlib.crc32(head)), payload, _CRC.pack(zlib.crc32(payload))))


def from_bytes(data: bytes | bytearray | memoryview) -> Loaded:
    """Read a trajectory up to its last whole record; `Loaded.truncated` says whether that is all.

    Raises `TrajectoryError` for bytes of another kind or another version, and for a whole record that no
    trajectory could have written. Bytes that end before the header is whole give an empty trajectory.
    """
    try:
        view = memoryview(data).cast("B")
    except TypeError as error:
        raise TrajectoryError(f"a trajectory is read from bytes, not from {shown(data)}") from error
    total = len(view)
    start = len(MAGIC) + _VERSION.size
    if bytes(view[: len(MAGIC)]) != MAGIC[:total]:
        raise TrajectoryError(
            f"not a trajectory: it begins with {bytes(view[: len(MAGIC)])!r}, and a trajectory with {MAGIC!r}"
        )
    if total < start:
        return Loaded(Trajectory(), Ending.CUT_OFF, 0, 0, total, "it ends before its version")
    version = _VERSION.unpack_from(view, len(MAGIC))[0]
    if version != VERSION:
        raise TrajectoryError(
            f"a trajectory of version {version}; this tokentrace reads version {VERSION}: load the file with the "
            "tokentrace that wrote it"
        )
    trajectory: Trajectory | None = None
    position, number = start, 0
    ending, problem = Ending.WHOLE, None
    while position < total or trajectory is None:
        stop, ending, problem = _record_end(view, position)
        if stop is None:
            break
        place = f"record {number} at byte {position}"
        try:
            kind = _HEAD.unpack_from(view, position)[1]
            payload = view[position + _FRONT : stop - _CRC.size]
            if trajectory is None:
                trajectory = _header(kind, payload)
            elif kind == RecordType.REWARD:
                _read_reward(trajectory, payload)
            else:
                trajectory.replay(_read_write(kind, payload, trajectory.has_logprobs))
        except TrajectoryError as error:
            raise TrajectoryError(f"{place} is whole but wrong: {error}") from error
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"{place} is whole but its JSON is not valid: {error}") from error
        position, number = stop, number + 1
    if trajectory is None:
        return Loaded(Trajectory(), ending, 0, 0, total, problem)
    return Loaded(trajectory, ending, trajectory.num_writes, position, total, problem)


def replay_records(trajectory: Trajectory, records: Iterable[bytes]) -> int:
    """Add records that `write_records` gave, in their order, to a trajectory that has all those before them.

    Returns how many there were. Raises `TrajectoryError` for a record that is not whole, or that does not follow on
    what the trajectory has: the records before it have been added then.
    """
    before = trajectory.num_writes
    for record in records:
        view = memoryview(record)
        stop, _, problem = _record_end(view, 0)
        if stop is None or stop < len(view):
            problem = problem or "more bytes follow it"
            raise TrajectoryError(f"record {trajectory.num_writes} is not one whole record: {problem}")
        kind = _HEAD.unpack_from(view)[1]
        try:
            trajectory.replay(_read_write(kind, view[_FRONT : stop - _CRC.size], trajectory.has_logprobs))
        except (ValueError, RecursionError) as error:
            raise TrajectoryError(f"record {trajectory.num_writes}: its JSON is not valid: {error}") from error
    return trajectory.num_writes - before


def restore(data: bytes) -> Trajectory:
    """The trajectory of bytes that are whole; what unpickling calls."""
    loaded = from_bytes(data)
    if loaded.truncated:
        raise TrajectoryError(f"the trajectory is {loaded.ending.value}: {loaded.problem}")
    return loaded.trajectory


def _record_end(view: memoryview, position: int) -> tuple[int | None, Ending, str | None]:
    """Where the record at `position` ends, or why it does not."""
    left = len(view) - position
    if left < _FRONT:
        where = f"inside the record that begins at byte {position}" if left else "before its header"
        return None, Ending.CUT_OFF, f"it ends {where}"
    length = _HEAD.unpack_from(view, position)[0]
    if not _fits(view, position, position + _HEAD.size):
        if not bytes(view[position:]).strip(b"\0"):
            return None, Ending.CUT_OFF, f"from byte {position} on there are only zeros"
        return None, Ending.DAMAGED, f"the head of the record at byte {position} does not fit its checksum"
    if length > left - _FRONT - _CRC.size:
        return None, Ending.CUT_OFF, f"it ends inside the record that begins at byte {position}"
    stop: int = position + _FRONT + length + _CRC.size
    if not _fits(view, position + _FRONT, stop - _CRC.size):
        return None, Ending.DAMAGED, f"the record at byte {position} does not fit its checksum"
    return stop, Ending.WHOLE, None


def _fits(view: memoryview, start: int, stop: int) -> bool:
    return bool(zlib.crc32(view[start:stop]) == _CRC.unpack_from(view, stop)[0])


def _split(payload: memoryview) -> tuple[dict[str, Any], memoryview]:
    if len(payload) < _JSON_LENGTH.size:
        raise TrajectoryError("it is too short for the length of its JSON")
    length = _JSON_LENGTH.unpack_from(payload)[0]
    if length > len(payload) - _JSON_LENGTH.size:
        raise TrajectoryError(f"its JSON of {length} bytes is longer than the record")
    small = from_json(bytes(payload[_JSON_LENGTH.size : _JSON_LENGTH.size + length]))
    if not isinstance(small, dict):
        raise TrajectoryError("its JSON is not an object")
    return small, payload[_JSON_LENGTH.size + length :]


def _header(kind: int, payload: memoryview) -> Trajectory:
    if kind != RecordType.HEADER:
        raise TrajectoryError(f"the first record must be the header, type {RecordType.HEADER}, not {kind}")
    small, rest = _split(payload)
    if len(rest):
        raise TrajectoryError(f"{len(rest)} bytes after the header's JSON")
    _exactly(small, {"name", "vocab_size", "logprobs", "metadata"})
    return Trajectory(**small)


def _read_reward(trajectory: Trajectory, payload: memoryview) -> None:
    small, rest = _split(payload)
    _exactly(small, {"write", "reward"})
    if len(rest) or type(small["write"]) is not int:
        raise TrajectoryError("a reward is the number of a write, or -1, and a number or null")
    trajectory.replay_reward(small["write"], small["reward"])


def _read_write(kind: int, payload: memoryview, has_logprobs: bool) -> Write:
    if kind not in {RecordType.OPEN, RecordType.CONTEXT, RecordType.COMPLETION}:
        raise TrajectoryError(f"a record of type {kind} cannot stand here")
    small, rest = _split(payload)
    fields = {"branch", "start", "tokens"}
    if kind == RecordType.COMPLETION:
        fields |= {"finish_reason", "version", "continues", "sampling", "logprobs_kind", "cached_tokens"}
        _exactly(small, fields | ({"channels"} & set(small)))
        second: np.dtype[Any] | None = _LOGPROBS if has_logprobs else None
    else:
        fields |= {"messages", "spans"}
        _exactly(small, fields | {"parent", "cause"} if kind == RecordType.OPEN else fields)
        second = _KINDS
    branch, start, tokens = (as_count(small[name], name) for name in ("branch", "start", "tokens"))
    cut = tokens * _IDS.itemsize
    end = cut + tokens * (second.itemsize if second else 0)
    channels = _read_channels(small.get("channels", []), rest[end:], tokens)
    if end + sum(len(one.data) for one in channels.values()) != len(rest):
        raise TrajectoryError(f"{len(rest)} bytes of arrays do not hold {tokens} tokens")
    ids = np.frombuffer(rest[:cut], _IDS).astype(np.int32)
    if kind == RecordType.COMPLETION:
        sampling = small["sampling"]
        if sampling is not None and not isinstance(sampling, dict):
            raise TrajectoryError("sampling is not an object")
        return CompletionWrite(
            branch=branch,
            start=start,
            ids=ids,
            logprobs=None if second is None else np.frombuffer(rest[cut:end], second).astype(np.float32),
            finish_reason=small["finish_reason"],
            version=small["version"],
            sampling_json=None if sampling is None else json.dumps(sampling, allow_nan=False, separators=(",", ":")),
            continues=small["continues"],
            logprobs_kind=small["logprobs_kind"],
            cached_tokens=small["cached_tokens"],
            channels=channels,
        )
    spans = small["spans"]
    if not isinstance(spans, list) or not all(isinstance(row, list) and len(row) == 3 for row in spans):
        raise TrajectoryError("spans must be rows of three")
    table = [[as_count(one, "a span") for one in row] for row in spans]
    parent = small.get("parent")
    return ContextWrite(
        branch=branch,
        start=start,
        ids=ids,
        kinds=np.frombuffer(rest[cut:end], _KINDS),
        spans=np.array(table, np.int32).reshape(-1, 3),
        messages=as_count(small["messages"], "messages"),
        parent=None if kind != RecordType.OPEN else -1 if parent == -1 else as_count(parent, "parent"),
        cause=small.get("cause", ""),
    )


def _read_channels(table: Any, rest: memoryview, tokens: int) -> dict[str, Packed]:
    """The channels of a completion, out of the bytes that hold them one after another."""
    found: dict[str, Packed] = {}
    if not isinstance(table, list) or not all(isinstance(row, dict) for row in table):
        raise TrajectoryError("channels must be rows that say what each is")
    for row in table:
        _exactly(row, {"name", "bytes", "dtype", "shape"})
        name, size, dtype, shape = row["name"], as_count(row["bytes"], "bytes"), row["dtype"], row["shape"]
        if not isinstance(name, str) or name in found or not isinstance(dtype, str | None):
            raise TrajectoryError(f"channel {shown(name)} is there twice, or has no type")
        if not isinstance(shape, list) or size > len(rest):
            raise TrajectoryError(f"channel {shown(name)} is longer than the record, or has no shape")
        found[name] = Packed(tokens, bytes(rest[:size]), dtype, tuple(shape))
        rest = rest[size:]
    return found


def _exactly(small: dict[str, Any], fields: set[str]) -> None:
    if set(small) != fields:
        raise TrajectoryError(f"its JSON must have {sorted(fields)}, not {sorted(small)}")


# -- files


def save_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write the whole trajectory. The file is there whole or not at all, and replaces one of that name.

    Only its owner may read it: it holds whole conversations.
    """
    write_whole(Path(path), _whole(trajectory), private=True)
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


class TrajectoryFile:
    """A file that follows a growing trajectory: each `write` appends what is not in it yet, rewards included.

    What `write` returned from is on the disk. One that failed half-way leaves a tail that the next one replaces,
    and that loading ignores. One writer at a time.
    """

    def __init__(self, path: str | os.PathLike[str], trajectory: Trajectory, *, written: int, size: int) -> None:
        self.path = Path(path)
        self.trajectory = trajectory
        self._written = written
        self._rewarded = len(trajectory.rewarded)
        self._size = size
        self._file = self.path.open("r+b", buffering=0)

    @classmethod
    def create(cls, path: str | os.PathLike[str], trajectory: Trajectory) -> TrajectoryFile:
        """Save the trajectory to a new file, and follow it from there. An existing file is not touched."""
        with open(path, "xb", opener=owned):  # claims the name
            pass
        try:
            save_trajectory(trajectory, path)
        except BaseException:
            Path(path).unlink(missing_ok=True)
            raise
        return cls(path, trajectory, written=trajectory.num_writes, size=Path(path).stat().st_size)

    def write(self) -> int:
        """Append what is not in the file yet; returns how many writes of the trajectory that were."""
        count = self.trajectory.num_writes - self._written
        rewarded = len(self.trajectory.rewarded)
        if not count and rewarded == self._rewarded:
            return 0
        self._file.seek(self._size)
        self._file.truncate()
        size = self._size
        added = itertools.chain(
            write_records(self.trajectory, self._written), reward_records(self.trajectory, self._rewarded)
        )
        for record in added:
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
            size += len(record)
        os.fsync(self._file.fileno())
        self._size = size
        self._written += count
        self._rewarded = rewarded
        return count

    def close(self) -> None:
        """Close the file; what was not written is not in it."""
        self._file.close()

    def __enter__(self) -> TrajectoryFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.write()
        finally:
            self.close()
