"""Where rollouts go: a folder with one trajectory a file, a journal of what was started and finished, and the rows.

A rollout is in the journal as finished only after its trajectory is on the disk. One that was started and has no such
line was under way when the process ended.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import statistics
import threading
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, TrajectoryError
from ..files import lock
from ..samples.sample import Sample
from ..samples.trajectories import trajectory_samples
from ..trajectory.storage import load_trajectory, save_trajectory
from ..trajectory.trajectory import Trajectory
from .loop import Rollout

JOURNAL: Final = "rollouts.jsonl"
TRAJECTORIES: Final = "trajectories"
RUN: Final = "run.json"
ROWS: Final = "rows.parquet"
METRICS: Final = "metrics.json"
_BUSY: Final = "another process writes rollouts to {}"
_UNSAFE: Final = re.compile(r"[^\w.-]+", re.ASCII)


class RolloutStore:
    """A folder of rollouts. One process writes to it at a time; a second one is refused where the system has locks."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        (self.folder / TRAJECTORIES).mkdir(parents=True, exist_ok=True)
        self._started: dict[str, dict[str, Any]] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._writing = threading.Lock()
        self._journal = (self.folder / JOURNAL).open("ab", buffering=0)
        try:
            lock(self._journal, _BUSY.format(self.folder))
            self._read()
        except BaseException:
            self._journal.close()
            raise

    def _read(self) -> None:
        path = self.folder / JOURNAL
        raw = path.read_bytes()
        whole = raw[: raw.rfind(b"\n") + 1]  # a line that was cut off was never finished
        for number, line in enumerate(whole.split(b"\n")[:-1], 1):
            try:
                row = json.loads(line)
                name = row["name"]
                if row["event"] == "again":
                    self._finished.pop(name, None)
                else:
                    {"started": self._started, "finished": self._finished}[row["event"]][name] = row
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{path}, line {number}: not a line of a journal of rollouts") from error
        if len(whole) < len(raw):
            self._journal.truncate(len(whole))

    def is_finished(self, name: str) -> bool:
        return name in self._finished

    @property
    def finished(self) -> list[dict[str, Any]]:
        """What the journal says of finished rollouts, in the order in which they were."""
        return list(self._finished.values())

    @property
    def unfinished(self) -> list[str]:
        """Rollouts that were started and never finished."""
        return [name for name in list(self._started) if name not in self._finished]

    def start(self, name: str) -> None:
        self._write({"event": "started", "name": name}, self._started)

    def finish(self, rollout: Rollout) -> None:
        """Have a rollout on the disk, then say so. It may hold up the caller for as long as the disk takes."""
        name = rollout.task.name
        file = f"{TRAJECTORIES}/{_file_name(name)}.tt"
        save_trajectory(rollout.trajectory, self.folder / file)
        row: dict[str, Any] = {"event": "finished", "name": name, "file": file, "metrics": rollout.metrics()}
        row |= {"metadata": dict(rollout.task.metadata), "messages": list(rollout.messages), "notes": rollout.notes}
        self._write(row, self._finished)
        os.fsync(self._journal.fileno())

    def run_again(self, ends: Collection[str]) -> list[str]:
        """Count rollouts that ended so as not finished: they are run again, and replaced. Their names."""
        names = [name for name, row in self._finished.items() if row["metrics"]["end"] in ends]
        for name in names:
            self._write({"event": "again", "name": name}, None)
            del self._finished[name]
            self._started.pop(name, None)
        return names

    def _write(self, row: dict[str, Any], known: dict[str, dict[str, Any]] | None) -> None:
        text = json.dumps(row, ensure_ascii=False, default=str).encode("utf-8", "replace") + b"\n"
        with self._writing:
            while text:  # a raw file may take less than it is given
                text = text[self._journal.write(text) or 0 :]
        if known is not None:
            known[row["name"]] = row

    def trajectories(self) -> Iterator[tuple[dict[str, Any], Trajectory]]:
        """Finished rollouts with what the journal says of them."""
        for row in self.finished:
            loaded = load_trajectory(self.folder / row["file"])
            if loaded.truncated:
                raise TrajectoryError(f"{row['file']}: {loaded.problem}")
            yield row, loaded.trajectory

    def samples(self, *, advantages: str | None = None) -> Iterator[Sample]:
        """The training rows of all finished rollouts.

        With ``advantages="group"`` the rows of rollouts that have a reward carry advantages: see `group_advantages`.
        """
        values = group_advantages(self.finished) if advantages == "group" else {}
        for row, trajectory in self.trajectories():
            yield from trajectory_samples(
                trajectory, reward=row["metrics"]["reward"], advantage=values.get(row["name"])
            )

    def write_rows(self, *, advantages: str | None = None, metadata: Mapping[str, Any] | None = None) -> Path:
        """Write the training rows to ``rows.parquet``, a few at a time; its metadata says which group each is of."""
        from ..data.tables import Layout, Place, SampleWriter, samples_table

        layout = Layout(parts=False, logprobs=True, advantages=advantages is not None, rollout=True)
        groups: dict[str, list[str]] = defaultdict(list)
        for row in self.finished:
            groups[_group(row)].append(row["name"])
        path = self.folder / ROWS
        writer = SampleWriter(path, layout, {**(metadata or {}), "advantages": advantages, "groups": groups})
        try:
            numbers = itertools.count(1)
            samples = self.samples(advantages=advantages)
            while some := list(itertools.islice(samples, 256)):
                counts = [int(sample.messages.max(initial=-1)) + 1 for sample in some]
                places = [Place(one.name, next(numbers), 0, n) for one, n in zip(some, counts, strict=True)]
                writer.write(samples_table(some, places, layout))
        except BaseException:
            writer.abandon()
            raise
        writer.close()
        return path

    def close(self) -> None:
        self._journal.close()


def group_advantages(rows: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """For each finished rollout by its name: its reward less its group's mean, by the group's deviation.

    The deviation is that of a sample (n - 1), plus 1e-6. Rollouts without a reward are in no group and have no
    advantage; a group of one has 0.
    """
    groups: dict[str, dict[str, float]] = defaultdict(dict)
    for row in rows:
        reward = row["metrics"]["reward"]
        if reward is not None and math.isfinite(reward):
            groups[_group(row)][row["name"]] = float(reward)
    out: dict[str, float] = {}
    for members in groups.values():
        mean = statistics.fmean(members.values())
        deviation = statistics.stdev(members.values()) if len(members) > 1 else 0.0
        out |= {name: (reward - mean) / (deviation + 1e-6) for name, reward in members.items()}
    return out


def check_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down the settings of a run, or hold them against those of the run that has begun in the folder.

    InputError names the first setting that differs.
    """
    path, journal = folder / RUN, folder / JOURNAL
    now = _flat(json.loads(json.dumps(settings, default=str)))
    if not journal.is_file() or not journal.stat().st_size:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, ensure_ascii=False, default=str) + "\n"
        unfinished = path.with_name(f"{RUN}.unfinished")
        unfinished.write_text(text, encoding="utf-8", errors="replace")
        unfinished.replace(path)
        return
    if not path.is_file():
        raise InputError(f"{folder} holds rollouts, but no {RUN} that says of which run")
    try:
        before = _flat(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise InputError(f"{path} is not what a run wrote: {error}") from error
    for key in [*now, *before]:
        if now.get(key) != before.get(key):
            was, is_now = (json.dumps(one.get(key), ensure_ascii=False) for one in (before, now))
            raise InputError(f"{folder} holds a run with other settings: {key} was {was} and is {is_now} now")


def discard_run(folder: Path) -> None:
    """Remove what a run wrote into a folder, and nothing else. InputError while another process writes there."""
    if not (folder / JOURNAL).is_file():
        return
    with (folder / JOURNAL).open("ab") as journal:
        lock(journal, _BUSY.format(folder))
        shutil.rmtree(folder / TRAJECTORIES, ignore_errors=True)
        for name in (ROWS, METRICS, RUN, JOURNAL):
            (folder / name).unlink(missing_ok=True)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    """Settings by their dotted names."""
    if not isinstance(value, dict):
        return {place: value}
    out: dict[str, Any] = {}
    for key, inner in value.items():
        out |= _flat(inner, f"{place}.{key}" if place else str(key))
    return out


def _group(row: Mapping[str, Any]) -> str:
    return str(row["metadata"].get("group", row["name"]))


def _file_name(name: str) -> str:
    """A name that every file system takes, and that no two rollouts share."""
    safe = _UNSAFE.sub("_", name)[:80]
    return safe if safe == name else f"{safe}.{hashlib.sha256(name.encode('utf-8', 'replace')).hexdigest()[:12]}"
