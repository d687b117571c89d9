"""Where rollouts go: a folder with one trajectory a file, a journal of what was started and finished, and the rows.

A rollout is in the journal as finished only after its trajectory is on the disk. One that was started and has no such
line was under way when the process ended.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, TrajectoryError
from ..trajectory.rows import trajectory_samples
from ..trajectory.samples import Sample
from ..trajectory.storage import load_trajectory, save_trajectory
from ..trajectory.trajectory import Trajectory
from .loop import Rollout

JOURNAL: Final = "rollouts.jsonl"
TRAJECTORIES: Final = "trajectories"
_UNSAFE: Final = re.compile(r"[^\w.-]+")


class RolloutStore:
    """A folder of rollouts. One process writes to it at a time."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        (self.folder / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        self._started: dict[str, dict[str, Any]] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._read()
        self._journal = (self.folder / JOURNAL).open("ab", buffering=0)

    def _read(self) -> None:
        path = self.folder / JOURNAL
        if not path.is_file():
            return
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # a line that was cut off was never finished
        for number, line in enumerate(whole.splitlines(), 1):
            try:
                row = json.loads(line)
                {"started": self._started, "finished": self._finished}[row["event"]][row["name"]] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}, line {number}: not a line of a journal of rollouts") from error
        if len(whole) < len(raw):
            with path.open("r+b") as file:
                file.truncate(len(whole))

    def is_finished(self, name: str) -> bool:
        return name in self._finished

    @property
    def finished(self) -> list[dict[str, Any]]:
        """What the journal says of finished rollouts, in the order in which they were."""
        return list(self._finished.values())

    @property
    def unfinished(self) -> list[str]:
        """Rollouts that were started and never finished."""
        return [name for name in self._started if name not in self._finished]

    def start(self, name: str) -> None:
        self._write(self._started, {"event": "started", "name": name})

    def finish(self, rollout: Rollout) -> None:
        """Have a rollout on the disk, then say so. It may hold up the caller for as long as the disk takes."""
        name = rollout.task.name
        file = f"{TRAJECTORIES}/{_UNSAFE.sub('_', name)}.tt"
        save_trajectory(rollout.trajectory, self.folder / file)
        row: dict[str, Any] = {"event": "finished", "name": name, "file": file, "metrics": rollout.metrics()}
        row |= {"metadata": dict(rollout.task.metadata), "messages": list(rollout.messages), "notes": rollout.notes}
        self._write(self._finished, row)
        os.fsync(self._journal.fileno())

    def _write(self, known: dict[str, dict[str, Any]], row: dict[str, Any]) -> None:
        text = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace")
        self._journal.write(text + b"\n")
        known[row["name"]] = row

    def trajectories(self) -> Iterator[tuple[dict[str, Any], Trajectory]]:
        """Finished rollouts with what the journal says of them."""
        for row in self.finished:
            loaded = load_trajectory(self.folder / row["file"])
            if loaded.truncated:
                raise TrajectoryError(f"{row['file']}: {loaded.problem}")
            yield row, loaded.trajectory

    def samples(self) -> Iterator[Sample]:
        """The training rows of all finished rollouts."""
        for row, trajectory in self.trajectories():
            yield from trajectory_samples(trajectory, reward=row["metrics"]["reward"])

    def close(self) -> None:
        self._journal.close()
