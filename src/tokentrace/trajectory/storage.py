"""Trajectories in files: saved at once, or as they grow."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from types import TracebackType

from ..errors import TrajectoryError
from ..files import owned
from .records import VERSION, Ending, Loaded, from_bytes, preamble, write_records
from .trajectory import Trajectory


def save_trajectory(trajectory: Trajectory, path: str | os.PathLike[str]) -> None:
    """Write the whole trajectory. The file is there whole or not at all, and replaces one of that name.

    Only its owner may read it: it holds whole conversations.
    """
    target = Path(path)
    temporary = target.with_name(f"{target.name}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "xb", opener=owned) as file:
            file.write(preamble(trajectory))
            for record in write_records(trajectory):
                file.write(record)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target)


def load_trajectory(path: str | os.PathLike[str]) -> Loaded:
    """Read a trajectory up to the last whole record; `Loaded.truncated` says whether that is all.

    Raises `TrajectoryError` for a file of another kind or version, or with a record that is whole and wrong.
    """
    try:
        return from_bytes(Path(path).read_bytes())
    except TrajectoryError as error:
        raise TrajectoryError(f"{os.fspath(path)}: {error}") from error


class TrajectoryFile:
    """A file that follows a growing trajectory: each `write` appends the records that are not in it yet.

    What `write` returned from is on the disk. One that failed half-way leaves a tail that the next one replaces,
    and that loading ignores. One writer at a time.
    """

    def __init__(self, path: str | os.PathLike[str], trajectory: Trajectory, *, written: int, size: int) -> None:
        self.path = Path(path)
        self.trajectory = trajectory
        self._written = written
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

    @classmethod
    def resume(cls, path: str | os.PathLike[str]) -> TrajectoryFile:
        """Load a file and go on with it. The rest of a record that was cut off is removed by the next write.

        A file of an older version is written anew in this one. A file that is damaged, rather than cut off, is
        refused: whole records may follow the damage.
        """
        loaded = load_trajectory(path)
        if loaded.ending is Ending.DAMAGED or not loaded.good_bytes:
            raise TrajectoryError(
                f"{os.fspath(path)} cannot be gone on with: {loaded.problem or 'it has no header'}; load_trajectory() "
                "gives what comes before, to be saved under another name"
            )
        if loaded.version != VERSION:  # a file has one version: what is added must be of the one it says
            save_trajectory(loaded.trajectory, path)
            return cls(path, loaded.trajectory, written=loaded.writes, size=Path(path).stat().st_size)
        return cls(path, loaded.trajectory, written=loaded.writes, size=loaded.good_bytes)

    def write(self) -> int:
        """Append what is not in the file yet; returns how many writes of the trajectory that were."""
        count = self.trajectory.num_writes - self._written
        if not count:
            return 0
        self._file.seek(self._size)
        self._file.truncate()
        size = self._size
        for record in write_records(self.trajectory, self._written):
            rest = memoryview(record)
            while rest:
                rest = rest[self._file.write(rest) :]
            size += len(record)
        os.fsync(self._file.fileno())
        self._size = size
        self._written += count
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


def _sync_folder(path: Path) -> None:
    """Make a rename last through a power cut, where folders can be synced."""
    if os.name != "posix":
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
