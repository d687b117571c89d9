"""Where rollouts go: a folder with one trajectory a file, a journal of what was started and finished, and the rows.

A rollout is in the journal as finished only after its trajectory is on the disk. One that was started and has no such
line was under way when the process ended. A line that a full disk or a crash has torn is reported; all others are read.
All files are for their owner alone: they hold whole conversations.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
import shutil
import threading
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..data.sources import pyarrow
from ..errors import ContinuationError, InputError, TrajectoryError, shown
from ..files import lock, owned, write_whole
from ..samples.advantages import Relative, relative_to_group
from ..samples.sample import Sample
from ..samples.trajectories import owned_turns, trajectory_samples
from ..settings import flat
from ..trajectory.storage import load_trajectory, save_trajectory
from ..trajectory.trajectory import Trajectory
from .ends import FAILED_ENDS, End
from .record import Rollout

JOURNAL: Final = "rollouts.jsonl"
TRAJECTORIES: Final = "trajectories"
RUN: Final = "run.json"
ROWS: Final = "rows.parquet"
METRICS: Final = "metrics.json"
_BUSY: Final = "another process writes rollouts to {}"
_PLAIN: Final = re.compile(r"[a-z0-9][a-z0-9_-]{0,79}")
_UNSAFE: Final = re.compile(r"[^a-z0-9_-]+")
_OWN_FILE: Final = re.compile(rf"{TRAJECTORIES}/[^/\\:\0]*\.tt", re.DOTALL)
_DEVICES: Final = re.compile(r"con|prn|aux|nul|com[0-9]|lpt[0-9]")
"""Names that Windows keeps for devices, whatever comes after a dot."""


class JournalWarning(UserWarning):
    """Lines of a journal could not be read. `RolloutStore.unreadable` has them."""


class UnreadableLine(NamedTuple):
    """A line of a journal that is not a record."""

    line: int
    """Its number, from 1 on."""
    problem: str


class RolloutStore:
    """A folder of rollouts. One process writes to it at a time; a second one is refused where the system has locks."""

    def __init__(self, folder: str | Path) -> None:
        if not isinstance(folder, str | os.PathLike) or "\0" in os.fspath(folder):
            raise InputError(f"a store needs the path of a folder, not {shown(folder)}")
        self.folder = Path(folder)
        self.folder.mkdir(0o700, parents=True, exist_ok=True)
        trajectories = self.folder / TRAJECTORIES
        if trajectories.is_symlink():
            raise InputError(f"{trajectories} is a link, and not followed: put the folder itself there, or remove it")
        trajectories.mkdir(0o700, exist_ok=True)
        self._started: dict[str, dict[str, Any]] = {}
        self._finished: dict[str, dict[str, Any]] = {}
        self._again: dict[str, dict[str, Any]] = {}
        """What was said of rollouts that had ended and are run again."""
        self.unreadable: list[UnreadableLine] = []
        """Lines of the journal that hold no record: torn ones, which a full disk or a crash leaves behind."""
        self._torn = False
        """The journal ends within a line, so the next record has to begin a new one."""
        self._writing = threading.Lock()
        self._journal = open(self.folder / JOURNAL, "ab", buffering=0, opener=owned)  # noqa: SIM115
        try:
            lock(self._journal, _BUSY.format(self.folder))
            self._read()
        except BaseException:
            self._journal.close()
            raise

    def _read(self) -> None:
        path = self.folder / JOURNAL
        raw = path.read_bytes()
        for number, line in enumerate(raw.split(b"\n"), 1):
            if not line:
                continue
            try:
                self._count(_record(line))
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                self.unreadable.append(UnreadableLine(number, f"{type(error).__name__}: {shown(str(error))}"))
        self._torn = not raw.endswith(b"\n") and raw != b""
        if self.unreadable:
            warnings.warn(f"{path}: {unreadable_lines(self.unreadable)}", JournalWarning, stacklevel=3)

    def is_finished(self, name: str) -> bool:
        return name in self._finished

    @property
    def finished(self) -> list[dict[str, Any]]:
        """What the journal says of finished rollouts, in the order in which they finished."""
        return list(self._finished.values())

    @property
    def unfinished(self) -> list[str]:
        """Rollouts that were started and never finished."""
        return [name for name in list(self._started) if name not in self._finished]

    def start(self, name: str) -> None:
        self._write({"event": "started", "name": name})

    def finish(self, rollout: Rollout) -> None:
        """Write a rollout to the disk, then say so in the journal. It blocks for as long as the disk takes."""
        name = rollout.task.name
        file = f"{TRAJECTORIES}/{file_name(name)}.tt"
        save_trajectory(rollout.trajectory, self.folder / file)
        row: dict[str, Any] = {"event": "finished", "name": name, "file": file, "metrics": rollout.metrics()}
        row |= {"turns": [asdict(turn) for turn in rollout.per_turn], "metadata": dict(rollout.task.metadata)}
        row |= {"messages": list(rollout.messages), "notes": rollout.notes}
        self._write(row, sync=True)
        self._partial(name).unlink(missing_ok=True)

    def keep(self, rollout: Rollout) -> None:
        """Write what there is of an unfinished rollout to the disk: `recorded` gives it to those who go on with it."""
        save_trajectory(rollout.trajectory, self._partial(rollout.task.name))

    def recorded(self, name: str) -> Trajectory | None:
        """What there is of a rollout that can be continued: it was under way when a run ended, or it was aborted.

        `ContinuationError` where what there is cannot be read.
        """
        paths = [self._partial(name)]
        if self._again.get(name, {}).get("metrics", {}).get("end") == End.ABORT:
            paths.append(self.folder / TRAJECTORIES / f"{file_name(name)}.tt")
        problem = ""
        for path in paths:
            if name not in self._finished and path.is_file() and not path.is_symlink():
                try:
                    return self._loaded(path, name)
                except (TrajectoryError, OSError) as error:
                    problem = str(error)
        if problem:
            raise ContinuationError(problem)
        return None

    def _partial(self, name: str) -> Path:
        return self.folder / TRAJECTORIES / f"{file_name(name)}.partial.tt"

    def run_again(self, ends: Collection[str]) -> list[str]:
        """Count rollouts with these ends as not finished, so that they are run again. Returns their names."""
        names = [name for name, row in self._finished.items() if row["metrics"]["end"] in ends]
        for name in names:
            self._write({"event": "again", "name": name})
            self._started.pop(name, None)
        return names

    def _write(self, row: dict[str, Any], *, sync: bool = False) -> None:
        """Append a record to the journal, and count it once all of it is there. After a failed write the next record
        begins a line of its own."""
        with self._writing:
            text = b"\n" * self._torn + _line(row)
            self._torn = True
            while text:  # a raw file may write less than it is given
                text = text[self._journal.write(text) or 0 :]
            self._torn = False
        if sync:
            os.fsync(self._journal.fileno())
        self._count(row)

    def _count(self, row: dict[str, Any]) -> None:
        """Take a line of the journal for what it says."""
        match row["event"]:
            case "started":
                self._started[row["name"]] = row
            case "finished":
                self._finished[row["name"]] = row
            case "again":
                self._again[row["name"]] = self._finished.pop(row["name"], {})
            case other:
                raise ValueError(other)

    def trajectories(self) -> Iterator[tuple[dict[str, Any], Trajectory]]:
        """Finished rollouts with what the journal says of them, by name: in whichever order they finished."""
        for row in sorted(self.finished, key=lambda row: str(row["name"])):
            path = self.folder / row["file"]
            if path.is_symlink():
                raise TrajectoryError(f"{path} is a link, and not followed")
            yield row, self._loaded(path, row["name"])

    def _loaded(self, path: Path, name: str) -> Trajectory:
        """A trajectory that must be whole, and that of this rollout."""
        file, loaded = path.relative_to(self.folder).as_posix(), load_trajectory(path)
        if loaded.truncated:
            raise TrajectoryError(f"{file}: {loaded.problem}")
        if loaded.trajectory.name != name:
            found = shown(loaded.trajectory.name)
            raise TrajectoryError(f"{file} holds rollout {found}, and the journal says {shown(name)}")
        return loaded.trajectory

    def samples(self, *, advantages: str | None = None) -> Iterator[Sample]:
        """The training rows of all finished rollouts.

        With ``advantages="group"`` the rows of rollouts that have a reward carry advantages: see `group_advantages`.
        Rows of rollouts that failed have neither.
        """
        for _, _, samples in self._rows(advantages):
            yield from samples

    def _rows(self, advantages: str | None) -> Iterator[tuple[dict[str, Any], Trajectory, list[Sample]]]:
        if advantages not in (None, "group"):
            raise InputError(f"advantages are 'group' or None, not {shown(advantages)}")
        values = group_advantages(self.finished) if advantages == "group" else {}
        for row, trajectory in self.trajectories():
            reward = _reward(row)
            made = trajectory_samples(trajectory, reward=reward, advantage=values.get(row["name"]))
            # a task's metadata may have a "reward" of its own, which is not what the rollout got
            yield row, trajectory, [sample.replace(reward=reward) for sample in made]

    def write_rows(self, *, advantages: str | None = None, metadata: Mapping[str, Any] | None = None) -> Path:
        """Write the training rows to ``rows.parquet``, a few at a time; its metadata says which group each is of.

        Beside the columns of all rows there are ``end``, ``metrics`` (JSON, of the rollout) and ``turns``: what is
        known of each turn that the row trains. docs/rows.md has them.
        """
        from ..data.tables import Layout, SampleOrigin, sample_writer, samples_table

        layout = Layout(parts=False, logprobs=True, advantages=advantages is not None, rollout=True, channels=True)
        groups: dict[str, list[str]] = defaultdict(list)
        for row in self.finished:
            groups[_group(row)].append(row["name"])
        path = self.folder / ROWS
        told = {**(metadata or {}), "advantages": advantages, "groups": groups}
        with sample_writer(path, layout, told, more=_rollout_fields(), private=True) as write:
            numbers = itertools.count(1)
            made = ((row, trajectory, one) for row, trajectory, all_ in self._rows(advantages) for one in all_)
            while some := list(itertools.islice(made, 256)):
                samples = [sample for _, _, sample in some]
                counts = [int(sample.messages.max(initial=-1)) + 1 for sample in samples]
                places = [SampleOrigin(one.name, next(numbers), 0, n) for one, n in zip(samples, counts, strict=True)]
                table = samples_table(samples, places, layout)
                for field, column in _rollout_columns(some):
                    table = table.append_column(field, column)
                write(table)
        return path

    def close(self) -> None:
        self._journal.close()


def _rollout_fields() -> list[Any]:
    """What rows of rollouts have beside those of all trajectories: the end, the metrics, and those of the turns."""
    pa = pyarrow()
    turn = pa.struct(
        [
            ("start", pa.int32()),
            ("stop", pa.int32()),
            ("finish_reason", pa.string()),
            ("prompt_tokens", pa.int32()),
            ("cached_tokens", pa.int32()),
            ("engine_seconds", pa.float64()),
            ("tool_calls", pa.int32()),
            ("tool_errors", pa.int32()),
            ("tool_seconds", pa.float64()),
            ("malformed", pa.bool_()),
            ("reward", pa.float64()),
            ("metrics", pa.string()),
            ("continues", pa.bool_()),
        ]
    )
    return [pa.field("end", pa.string()), pa.field("metrics", pa.string()), pa.field("turns", pa.list_(turn))]


def _rollout_columns(rows: Sequence[tuple[Mapping[str, Any], Trajectory, Sample]]) -> Iterator[tuple[Any, Any]]:
    """Those columns of some rows: what the journal says of the rollout, its trajectory, and the row."""
    pa = pyarrow()
    values = [
        [row["metrics"]["end"] for row, _, _ in rows],
        [json.dumps(row["metrics"], default=str) for row, _, _ in rows],
        [_turns(row, trajectory, sample) for row, trajectory, sample in rows],
    ]
    for field, column in zip(_rollout_fields(), values, strict=True):
        yield field, pa.array(column, field.type)


def _turns(row: Mapping[str, Any], trajectory: Trajectory, sample: Sample) -> list[dict[str, Any]] | None:
    """The turns that a row trains, with where they stand in it; None where the journal says nothing of turns."""
    told = row.get("turns")
    owned = owned_turns(trajectory)
    if told is None or len(told) != len(owned):
        return None
    found = []
    for turn, said in zip(owned, told, strict=True):
        if turn.branch == sample.branch:
            metrics = json.dumps(said.get("metrics") or [], default=str)
            known = {key: value for key, value in said.items() if key not in ("sampled", "metrics")}
            found.append({**known, "start": turn.start, "stop": turn.stop, "metrics": metrics})
    return found


def group_advantages(rows: Collection[Mapping[str, Any]]) -> dict[str, float]:
    """For each finished rollout by its name: its reward less its group's mean, by the group's deviation.

    The deviation is that of a sample (n - 1), plus 1e-6. Rollouts that failed, and those without a reward, are in no
    group and have no advantage: mean and deviation are those of the others. The one that is left of a group has 0.
    """
    return dict(compared(rows).values)


def compared(rows: Collection[Mapping[str, Any]]) -> Relative:
    """As `group_advantages`, with notes on groups that have nothing to compare."""
    rewards = {row["name"]: reward for row in rows if (reward := _reward(row)) is not None}
    return relative_to_group(rewards, {row["name"]: _group(row) for row in rows})


def check_run(folder: Path, settings: Mapping[str, Any]) -> None:
    """Write down the settings of a run, or compare them with those of the run that has begun in the folder.

    InputError names the first setting that differs.
    """
    path, journal = folder / RUN, folder / JOURNAL
    if not journal.is_file() or not journal.stat().st_size:
        folder.mkdir(0o700, parents=True, exist_ok=True)
        text = json.dumps(settings, indent=2, ensure_ascii=False, default=str) + "\n"
        write_whole(path, text.encode("utf-8", "replace"), private=True)
        return
    if not path.is_file():
        raise InputError(f"{folder} holds rollouts, but no {RUN} that says of which run")
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not what a run wrote: {error}") from error
    if differs := differing(before, settings):
        raise InputError(f"{folder} holds a run with other settings: {differs}")


def differing(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first setting that is not what it was, in words."""
    old, new = (flat(json.loads(json.dumps(settings, default=str))) for settings in (before, now))
    for key in [*new, *old]:
        if new.get(key) != old.get(key):
            was, is_now = (json.dumps(one.get(key), ensure_ascii=False) for one in (old, new))
            return f"{key} was {was} and is {is_now} now"
    return None


def discard_run(folder: Path) -> None:
    """Remove what a run wrote into a folder, and nothing else. InputError while another process writes there."""
    if not (folder / JOURNAL).is_file():
        return
    with open(folder / JOURNAL, "ab", opener=owned) as journal:
        lock(journal, _BUSY.format(folder))
        shutil.rmtree(folder / TRAJECTORIES, ignore_errors=True)
        for name in (ROWS, METRICS, RUN, JOURNAL):
            (folder / name).unlink(missing_ok=True)


def _group(row: Mapping[str, Any]) -> str:
    group = row["metadata"].get("group")
    return str(row["name"] if group is None else group)


def _reward(row: Mapping[str, Any]) -> float | None:
    """What a finished rollout is worth; None for one that failed, whatever the journal says."""
    reward = None if row["metrics"]["end"] in FAILED_ENDS else row["metrics"]["reward"]
    return float(reward) if reward is not None and math.isfinite(reward) else None


def _line(row: Mapping[str, Any]) -> bytes:
    """A line of the journal. What JSON cannot hold becomes text; halves of surrogate pairs are escaped."""
    text = json.dumps(row, ensure_ascii=False, default=str)
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        return json.dumps(row, default=str).encode("ascii") + b"\n"


def _record(line: bytes) -> dict[str, Any]:
    """A record of the journal. ValueError, KeyError and the like if it is not one; the file of a finished rollout must
    be one of the store's own trajectories."""
    row: dict[str, Any] = json.loads(line)
    if not isinstance(row["name"], str):
        raise ValueError("the name is not text")
    if row["event"] == "finished":
        if not isinstance(row["file"], str) or not _OWN_FILE.fullmatch(row["file"]):
            raise ValueError(f"{shown(row['file'])} is not a trajectory of this folder")
        if not isinstance(row["metadata"], dict) or not {"end", "reward"} <= row["metrics"].keys():
            raise ValueError("metadata or metrics are missing")
    return row


def unreadable_lines(lines: Sequence[UnreadableLine]) -> str:
    """How many lines of a journal cannot be read, and which."""
    count = len(lines)
    numbers = ", ".join(str(one.line) for one in lines[:5]) + (", …" if count > 5 else "")
    word = "line" if count == 1 else "lines"
    return (
        f"{count} {word} cannot be read ({word} {numbers}): a rollout whose end was recorded there counts as unfinished"
    )


def file_name(name: str) -> str:
    """A name that every file system takes, and that no two rollouts share, whether or not it tells capitals apart.

    Plain names in small letters are kept; others have a digest of the name after a dot, which no plain name has.

    >>> file_name("row-000001-0"), file_name("../../x")
    ('row-000001-0', '_x.9cdf6a50100a862e14286c7a334296da')
    """
    if _PLAIN.fullmatch(name) and not _DEVICES.fullmatch(name):
        return name
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    return f"_{_UNSAFE.sub('_', name.lower()).lstrip('_')[:60]}.{digest}"
