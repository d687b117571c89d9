"""Rows of ids without their padding, and the conversations that they were made from."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import numpy as np

from ..data.conversations import COMPLETIONS, MESSAGES, Columns
from ..data.sources import ROW_BYTES, Format, Row, Source, find_sources, read_rows
from ..data.tables import read_metadata
from ..data.trainers import ATTENTION
from ..errors import InputError, kind_of
from ..samples.sample import IGNORE
from ..tokens.ids import check_ids, check_integers
from ..tokens.tokenizer import Ids
from .records import IDS, MASKS, Fields, Mask, first_of

_HOW: Final = "give it with --source, in Python with sources= (a .metadata file beside JSON Lines says where it is)"


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The columns of ids and mask; None uses the first usual name. `mask` may name labels."""

    ids: str | None = None
    mask: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class IdsRow:
    """A row without padding. `mask` is None if the row does not say what is trained.

    `start` tokens of padding came before it, `padding` before and after it, some of them trained
    (`trained_padding`). `columns` are the other ones.
    """

    ids: Ids
    mask: Mask | None
    start: int = 0
    padding: int = 0
    trained_padding: tuple[int, ...] = ()
    attended: bool = False
    columns: Mapping[str, Any] = field(default_factory=dict)

    def cut(self, start: int, stop: int) -> IdsRow:
        """The row without the padding before `start` and from `stop` on."""
        mask = None if self.mask is None else self.mask[start:stop]
        padding = self.padding + start + len(self.ids) - stop
        return replace(self, ids=self.ids[start:stop], mask=mask, start=self.start + start, padding=padding)

    def without_padding(self, pad: int | None, expected: Ids) -> IdsRow:
        """The row without untrained pad tokens at its ends that the expected row lacks."""
        if self.attended or pad is None:
            return self
        pads, theirs = self.ids == pad, expected == pad
        idle = pads if self.mask is None else pads & ~self.mask
        start = max(0, min(_run(idle), _run(pads) - _run(theirs)))
        end = max(0, min(_run(idle[::-1]), _run(pads[::-1]) - _run(theirs[::-1])))
        return self.cut(start, len(self.ids) - end) if start + end < len(self.ids) else self


def _run(flags: Mask) -> int:
    """How many are True at the beginning."""
    return len(flags) if flags.all() else int(flags.argmin())


def read_ids_row(value: Any, columns: RowColumns) -> IdsRow:
    """A row of ids. Raises InputError with the column that does not fit."""
    if not isinstance(value, Mapping):
        raise InputError(f"a row of ids must be a mapping of columns, not {kind_of(value)}")
    for name in (columns.ids, columns.mask):
        if name is not None and value.get(name) is None:
            raise InputError("the row has no such column, or nothing in it", field=name)
    name = columns.ids or first_of(value, IDS)
    if name is None:
        names = ", ".join(str(column)[:80] for column in list(value)[:8]) or "no columns"
        raise InputError(f"the row holds no ids; it has {names}; searched: {', '.join(IDS)}")
    ids = check_ids(value[name], name)
    if not len(ids):
        raise InputError("holds no ids", field=name)
    used = {name, "labels", ATTENTION, *MASKS, columns.mask}
    row = IdsRow(ids, _mask(value, columns.mask, ids), columns={key: value[key] for key in value if key not in used})
    if value.get(ATTENTION) is None:
        return row
    attention = check_integers(value[ATTENTION], ATTENTION) != 0
    present = np.flatnonzero(attention)
    if len(attention) != len(ids) or not len(present):
        raise InputError(f"has {len(attention):,} entries for {len(ids):,} ids, or only zeros", field=ATTENTION)
    start, stop = int(present[0]), int(present[-1]) + 1
    if len(present) != stop - start:
        raise InputError("has a hole: padding comes before and after a row", field=ATTENTION)
    trained = () if row.mask is None else tuple(np.flatnonzero(row.mask & ~attention).tolist())
    return replace(row.cut(start, stop), trained_padding=trained, attended=True)


def _mask(value: Mapping[str, Any], column: str | None, ids: Ids) -> Mask | None:
    """What a row trains, by its mask or its labels; None if it has neither."""
    if column is not None:
        labels = isinstance(value[column], (list, np.ndarray)) and IGNORE in value[column]
        value = {"labels" if labels else "mask": value[column]}
    row = Fields(value, "the row")
    mask = row.trained(ids)
    if row.findings:
        raise InputError(row.findings[0].words, field=row.findings[0].where.rpartition(", ")[2])
    return mask


def has_conversation(row: Mapping[str, Any], columns: Columns = Columns()) -> bool:  # noqa: B008 (frozen)
    """True if a row's columns hold a conversation, valid or not."""
    named = {columns.messages, columns.prompt, columns.completion} - {None}
    present = {name for name, value in row.items() if value is not None}
    pair = "prompt" in present and not present.isdisjoint(COMPLETIONS)
    return not present.isdisjoint(named) if named else not present.isdisjoint(MESSAGES) or pair


# -- sources


class SourceRows:
    """Rows of files, by the name or base name of the file and their number.

    Files are read forwards: rows in the order of their source cost one pass.
    """

    def __init__(self, sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> None:
        self.sources = list(sources)
        self._row_bytes = row_bytes
        self._reading: dict[str, tuple[Iterator[Row], int]] = {}

    def find(self, name: str) -> Source | str:
        """The file that a row names, or why there is none."""
        base = PurePosixPath(name).name
        exact = [source for source in self.sources if source.name == name]
        named = exact or [source for source in self.sources if PurePosixPath(source.name).name == base]
        if len(named) == 1:
            return named[0]
        return f"several sources are named {base!r}" if named else f"its source {name!r} was not found: {_HOW}"

    def row(self, name: str, number: int) -> tuple[Source, Row] | str:
        """A row with its file, or why there is none."""
        source = self.find(name)
        if isinstance(source, str):
            return source
        rows, last = self._reading.get(source.path, (iter(()), 0))
        if number <= last or not last:
            rows = read_rows(source, row_bytes=self._row_bytes)
        row = next((row for row in rows if row.number >= number), None)
        self._reading[source.path] = rows, 0 if row is None else row.number
        return (source, row) if row is not None and row.number == number else f"{source.name} has no row {number}"


@dataclass(frozen=True, slots=True)
class RowFile:
    """A file of rows, and its metadata, if tokentrace made it."""

    source: Source
    metadata: Mapping[str, Any]

    @classmethod
    def of(cls, source: Source) -> RowFile:
        path = {Format.PARQUET: source.path, Format.LINES: source.origin}.get(source.format)
        return cls(source, read_metadata(path) if path else {})

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The files that the rows were made of: their names, paths and digests."""
        entries = self.metadata.get("sources")
        entries = entries if isinstance(entries, list) else []
        return [one for one in entries if isinstance(one, dict) and isinstance(one.get("name"), str)]

    def find(self, spool: Path) -> tuple[list[Source], list[str]]:
        """The files that the rows were made of, and a sentence about each that is gone."""
        sources, missing = [], []
        for at, entry in enumerate(self.entries):
            name, origin = entry["name"], self._locate(entry, spool / str(at))
            if origin is not None:
                sources.append(replace(origin, name=name))
            elif entry.get("path"):
                missing.append(f"{name}, which {self.source.name} was made of, is not there any more: {_HOW}")
            else:
                missing.append(f"{self.source.name} was made of {name}, which is not a file: {_HOW}")
        return sources, missing

    def _locate(self, entry: Mapping[str, Any], spool: Path) -> Source | None:
        """The file, seen from the rows or from here, preferably with its digest."""
        path, places = entry.get("path"), []
        if isinstance(path, str) and self.source.origin:
            places.append(Path(self.source.origin).absolute().parent / path)
        places += [Path(entry["name"])] if path else []
        sources: list[Source] = []
        for place in places:
            with contextlib.suppress(InputError):  # no longer readable
                sources += find_sources([str(place)], spool / str(len(sources))) if place.is_file() else []
        same = [source for source in sources if source.digest == entry.get("digest")]
        return next(iter(same or sources), None)

    def changes(self, origins: Sequence[Source]) -> Iterator[str]:
        """Which of these files are no longer what the rows were made of."""
        rows = SourceRows(origins)
        for entry in self.entries:
            origin, digest = rows.find(entry["name"]), entry.get("digest")
            if isinstance(origin, Source) and isinstance(digest, str) and origin.digest != digest:
                yield f"{entry['name']} has changed since {self.source.name} was made of it"

    def other_digests(self, now: Mapping[str, Any]) -> Iterator[str]:
        for what in ("tokenizer", "template"):
            before, here = (metadata.get(f"{what}_sha256") for metadata in (self.metadata, now))
            if before is not None and before != here:
                yield f"{self.source.name} was made with another {what} ({_digest(before)}, here {_digest(here)})"

    def other_settings(self, now: Mapping[str, Any]) -> Iterator[str]:
        before, here = self.metadata.get("settings", {}), now["settings"]
        names = sorted(name for name in before if name in here and before[name] != here[name])
        if names:
            yield f"{self.source.name} was made with other settings: {', '.join(names)}"


def _digest(value: Any) -> str:
    text = value if isinstance(value, str) else next(iter(value.values()), "") if len(value) == 1 else json.dumps(value)
    return text[:12]
