"""From names to rollouts: trajectory files, folders of them, stores, and files of lines or rows of any known shape.

One rollout is in memory at a time. Where the calls of a rollout are lines of their own, a file is read twice: once to
find out which lines belong together, by the places of the lines alone.
"""

from __future__ import annotations

import json
import tempfile
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

from ...data.check.columns import IDS, has_conversation
from ...data.conversations import Columns
from ...data.rows import Row, array_elements, read_rows
from ...data.sources import Format, Source, find_sources, reading
from ...data.tables import read_metadata
from ...errors import InputError
from .calls import DumpedRollout, UnreadSource
from .fields import Fields
from .records import SQLITE, OpenedStore, begins_with, is_trajectory, read_store, read_trajectory
from .shape import DumpShape
from .shapes import shape_of

ROW_BYTES: Final = 1 << 30
"""A longer line is not read."""
_FIRST_LINES: Final = 100
"""Among so many lines the first is looked for that has a known shape."""
_DUMPS: Final = (".jsonl", ".json", ".parquet", ".arrow", ".gz")
_OF_RUNS: Final = ("rollouts.jsonl", "rows.parquet", "run.json", "metrics.json", "summary.json")
"""What runs write beside their trajectories."""
Progress = Callable[[float, float], None]
"""Is told how much is done, and of how much."""
Told = Callable[[str], None]
"""Is told what was recognised."""
Found = DumpedRollout | UnreadSource


def read_rollouts(
    inputs: Sequence[str],
    *,
    shape: str | None = None,
    progress: Progress | None = None,
    told: Told | None = None,
) -> Iterator[Found]:
    """All rollouts that inputs name, and what could not be read, one after the other.

    Inputs are trajectory files and folders of them, the output folder of ``tokentrace rollout``, a gateway's store (a
    file, or ``postgresql://…``), and files of JSON lines, JSON, Parquet or Arrow in a shape that is known. `shape` is
    whose shape it is, where that is not to be found out. InputError where an input is not there or is none of these.
    """
    for given in inputs:
        yield from _of_input(given, shape, progress or (lambda *_: None), told or (lambda _: None))


def is_of_engines(given: str, shape: str | None = None) -> bool:
    """Whether an input holds what engines sampled, rather than rows that were made of conversations.

    Trajectories, stores, and calls in any known shape do; rows do where they have logprobs, or where their file says
    that a rollout or a gateway made them. Raises InputError for files that hold neither ids nor rollouts.
    """
    path = Path(given).expanduser()
    if shape is not None or "://" in given or (path.is_dir() and _trajectories(path)):
        return True
    if given == "-" or not path.exists():
        return False
    if path.is_file():
        if is_trajectory(path) or begins_with(path, SQLITE):
            return True
        metadata = read_metadata(path)
        if "store" in metadata or "engine" in metadata.get("settings", {}):
            return True
    with tempfile.TemporaryDirectory(prefix="tokentrace-check-") as spool:
        for source in find_sources([given], Path(spool)):
            for row in read_rows(source, row_bytes=ROW_BYTES):
                if row.problem is None and isinstance(row.value, Mapping):
                    return _is_sampled(row.value, given)
    return False


def _is_sampled(row: Mapping[str, Any], given: str) -> bool:
    """Whether a row was sampled by an engine."""
    if any(name in row for name in IDS):
        return "logprobs" in row or (_shape_name(row) or "rows") != "rows"
    if _shape_name(row) is None and has_conversation(row, Columns()):
        raise InputError(
            f"{given} holds conversations, not ids: tokentrace render {given} shows one, tokentrace tokenize makes "
            "rows of them, tokentrace audit --on compares what production, rollout and training show of one"
        )
    return _shape_name(row) is not None


def _shape_name(row: Mapping[str, Any]) -> str | None:
    try:
        return shape_of(row).name
    except InputError:
        return None


def highest_id(inputs: Sequence[str], shape: str | None = None) -> int:
    """The highest id of the first rollout that can be read; -1 where there is none."""
    for found in read_rollouts(inputs, shape=shape):
        if isinstance(found, DumpedRollout):
            arrays = [*(call.stream for call in found.calls), *(row.ids for row in found.rows)]
            return max((int(ids.max(initial=-1)) for ids in arrays), default=-1)
    return -1


def _of_input(given: str, shape: str | None, progress: Progress, told: Told) -> Iterator[Found]:
    if "://" in given:
        yield from _stored(given, progress, told)
        return
    path = Path(given).expanduser()
    if path.is_dir() and (files := _trajectories(path)):
        others = sorted(one.name for one in path.iterdir() if one.suffix in _DUMPS and one.name not in _OF_RUNS)
        left = f"; other files are not read unless you name them: {', '.join(others[:5])}" if others else ""
        told(f"{given}: trajectories{left}{f' and {len(others) - 5:,} more' if len(others) > 5 else ''}")
        for done, file in enumerate(files):
            progress(done, len(files))
            yield read_trajectory(file, f"{given.rstrip('/')}/{file.relative_to(path).as_posix()}")
        progress(len(files), len(files))
    elif path.is_file() and is_trajectory(path):
        told(f"{given}: a trajectory")
        yield read_trajectory(path, given)
    elif path.is_file() and begins_with(path, SQLITE):
        yield from _stored(given, progress, told)
    elif given != "-" and not path.exists():
        raise InputError(f"there is no file or folder {given!r}")
    else:
        with tempfile.TemporaryDirectory(prefix="tokentrace-inspect-") as spool:
            for source in find_sources([given], Path(spool)):
                yield from _of_source(source, shape, progress, told)


def _trajectories(folder: Path) -> list[Path]:
    """The trajectory files in a folder; those of rollouts that were under way are not whole, and left out."""
    return sorted(path for path in folder.rglob("*.tt") if path.is_file() and not path.name.endswith(".partial.tt"))


def _stored(given: str, progress: Progress, told: Told) -> Iterator[Found]:
    total = done = 0
    for found in read_store(given):
        if isinstance(found, OpenedStore):
            total = found.sessions
            told(f"{found.where}: a gateway's store")
            continue
        yield found
        done += 1
        progress(done, max(total, done))


# -- lines


def _of_source(source: Source, name: str | None, progress: Progress, told: Told) -> Iterator[Found]:
    shape = _recognised(source, name)
    told(f"{source.name}: {shape}")
    text = source.format in (Format.LINES, Format.ELEMENTS)
    groups = _gathered if shape.key is not None and text else _in_order
    for rows, done in groups(source, shape):
        yield from _read(source, shape, rows)
        progress(done, source.size)
    progress(source.size, source.size)


def _recognised(source: Source, name: str | None) -> DumpShape:
    """The shape of the first line that has one, among the first few."""
    problem, looked = "", 0
    for row in read_rows(source, row_bytes=ROW_BYTES):
        if row.problem is None:
            looked += 1
            try:
                return shape_of(row.value, name)
            except InputError as error:
                problem = problem or f"{_place(source, row)}: {error}"
                if looked == _FIRST_LINES:
                    raise InputError(problem) from error
        problem = problem or f"{_place(source, row)}: {row.problem}"
    raise InputError(problem or f"{source.name} holds no rows")


def _in_order(source: Source, shape: DumpShape) -> Iterator[tuple[list[Row], float]]:
    """Rows that are rollouts by themselves, or rows of one rollout that follow one another."""
    held: list[Row] = []
    last: str | None = None
    done = 0.0
    for row in read_rows(source, row_bytes=ROW_BYTES):
        key = shape.key(row.value) if shape.key is not None and isinstance(row.value, Mapping) else None
        if held and (key is None or key != last):
            yield held, done
            held = []
        held.append(row)
        last, done = key, float(row.end)
    if held:
        yield held, done


def _gathered(source: Source, shape: DumpShape) -> Iterator[tuple[list[Row], float]]:
    """The lines of each rollout, wherever in the file they are."""
    assert shape.key is not None
    places: dict[str, array[int]] = {}
    read = 0
    with reading(source.name), open(source.path, "rb") as file:
        for at, (start, stop, line, text) in enumerate(_lines(source)):
            row = _line(text, line)
            key = shape.key(row.value) if isinstance(row.value, Mapping) else None
            if key is None:
                key = "" if shape.one_file and row.problem is None else f"\0{at}"
                if key and not places:  # a rollout by itself, and all before it are
                    read = stop
                    yield [row], float(read)
                    continue
            places.setdefault(key, array("q")).extend((start, stop, line))
        for found in places.values():
            spans = [found[at : at + 3] for at in range(0, len(found), 3)]
            read += sum(stop - start for start, stop, _ in spans)
            yield [_line(_text(file, start, stop), line) for start, stop, line in spans], float(min(read, source.size))


def _lines(source: Source) -> Iterator[tuple[int, int, int, bytes]]:
    """Where the lines of a text begin and end, their numbers, and what they say."""
    with open(source.path, "rb") as file:
        if source.format is Format.ELEMENTS:
            yield from ((start, stop, at, _text(file, start, stop)) for start, stop, at in array_elements(source))
            return
        start = 0
        for number, line in enumerate(file, 1):
            if line.strip():
                yield start, start + len(line), number, line
            start += len(line)


def _text(file: BinaryIO, start: int, stop: int) -> bytes:
    file.seek(start)
    return file.read(stop - start)


def _line(text: bytes, line: int) -> Row:
    try:
        return Row(line, line, json.loads(text.removeprefix(b"\xef\xbb\xbf")))
    except (ValueError, RecursionError) as error:
        return Row(line, line, problem=f"not valid JSON: {error}")


def _read(source: Source, shape: DumpShape, rows: Sequence[Row]) -> Iterator[Found]:
    """The rollouts of some lines. A line that cannot be read is said; the others of its rollout are read."""
    found: dict[str, list[DumpedRollout]] = {}
    fields = []
    for row in rows:
        place = _place(source, row)
        if row.problem is not None:
            yield UnreadSource(place, row.problem)
        elif not isinstance(row.value, Mapping) or not shape.fits(row.value):
            yield UnreadSource(place, _unlike(row.value, shape))
        else:
            fields.append(Fields(row.value, place))
    for one in fields if shape.gather is None else shape.gather(fields):
        if isinstance(one, UnreadSource):
            yield one
            continue
        try:
            for rollout in shape.read(one):
                name = rollout.name if shape.key is not None else f"{rollout.name}\0{len(found)}"
                if shape.one_file:
                    name = ""
                found.setdefault(name, []).append(rollout)
        except InputError as error:
            yield UnreadSource(one.where, str(error))
    yield from map(DumpedRollout.joined, found.values())


def _unlike(value: Any, shape: DumpShape) -> str:
    """How a line is not what its file has."""
    try:
        return f"this is not like the other lines, which are {shape}, but {shape_of(value)}"
    except InputError as error:
        return f"this is not like the other lines, which are {shape}: {error}"


def _place(source: Source, row: Row) -> str:
    return f"{source.name}, line {row.line}" if row.line is not None else f"{source.name}, row {row.number}"
