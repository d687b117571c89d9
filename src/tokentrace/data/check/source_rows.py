"""Rows of source files by number: the conversations that rows of ids were made from."""

from __future__ import annotations

import dataclasses
import pickle
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ...errors import InputError
from ..rows import ROW_BYTES, Row, read_rows
from ..sources import Source, find_sources

_GIVE_IT: Final = (
    "give it with --source, in Python with sources= (JSON Lines tell where it is in the .metadata file beside them)"
)


class SourceRows:
    """The rows of some files, found by the name of the file and their number.

    A file that does not have the very name that is asked for is taken if it alone has that base name. Each file is read
    once, as far as needed.
    """

    def __init__(self, sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> None:
        self.sources = list(sources)
        self._row_bytes = row_bytes
        self._files: dict[str, _RowFile] = {}

    def find(self, name: str) -> Source | str:
        """The file that a row says it comes from, or why there is none."""
        exact = [source for source in self.sources if source.name == name]
        base = PurePosixPath(name).name
        named = exact or [source for source in self.sources if PurePosixPath(source.name).name == base]
        if len(named) == 1:
            return named[0]
        if named:
            return f"several sources are named {base!r}"
        return f"its source {name!r} was not found: {_GIVE_IT}"

    def row(self, name: str, number: int) -> tuple[Source, Row] | str:
        """A row with the file it is from, or why there is none."""
        source = self.find(name)
        if isinstance(source, str):
            return source
        if source.path not in self._files:
            self._files[source.path] = _RowFile(read_rows(source, row_bytes=self._row_bytes))
        row = self._files[source.path].get(number)
        return f"{source.name} has no row {number}" if row is None else (source, row)


class _RowFile:
    """Rows in a temporary file, found by their number. Rows are read as far as one is asked for."""

    def __init__(self, rows: Iterator[Row]) -> None:
        self._rows = rows
        self._last: Row | None = None
        self._places: dict[int, int] = {}
        self._file = tempfile.TemporaryFile(prefix="tokentrace-check-")  # noqa: SIM115 (closed by the next line)
        weakref.finalize(self, self._file.close)

    def get(self, number: int) -> Row | None:
        while self._last is None or self._last.number < number:
            self._last = next(self._rows, None)
            if self._last is None:
                return self._read(number)
            self._places[self._last.number] = self._file.seek(0, 2)
            pickle.dump(self._last, self._file)
        return self._last if self._last.number == number else self._read(number)

    def _read(self, number: int) -> Row | None:
        if number not in self._places:
            return None
        self._file.seek(self._places[number])
        row: Row = pickle.load(self._file)
        return row


class RecordedSources:
    """The files that a file of samples says it was made of: where they were, and what their content hashed to."""

    def __init__(self, rows: Source, metadata: Mapping[str, Any]) -> None:
        self._rows = rows
        sources = metadata.get("sources")
        listed = sources if isinstance(sources, list) else []
        self._recorded = [row for row in listed if isinstance(row, dict) and isinstance(row.get("name"), str)]

    @property
    def names(self) -> list[str]:
        return [row["name"] for row in self._recorded]

    def find(self, spool: Path) -> tuple[list[Source], list[str]]:
        """Those that are still there, by the names that rows know them by; and a sentence about each of the others."""
        found: list[Source] = []
        gone: list[str] = []
        for at, row in enumerate(self._recorded):
            origin = self._found(row, spool / str(at))
            if origin is not None:
                found.append(dataclasses.replace(origin, name=row["name"]))
            elif row.get("path"):
                place = f"{row['name']}, which {self._rows.name} was made of"
                gone.append(f"{place}, is not there any more: {_GIVE_IT}")
            else:
                gone.append(f"{self._rows.name} was made of {row['name']}, which is not a file: {_GIVE_IT}")
        return found, gone

    def _found(self, row: Mapping[str, Any], spool: Path) -> Source | None:
        """The file of a recorded source: where it was, seen from the rows, or by its name from here."""
        places = [row["name"]] if row.get("path") else []
        if isinstance(row.get("path"), str) and self._rows.origin:
            places.insert(0, str(Path(self._rows.origin).absolute().parent / row["path"]))
        others: list[Source] = []
        for place in places:
            if Path(place).is_file():
                try:
                    others += find_sources([place], spool / str(len(others)))
                except InputError:  # there, and no longer what it was
                    continue
        same = [origin for origin in others if origin.digest == row.get("digest")]
        return next(iter(same or others), None)

    def changed(self, origins: Sequence[Source]) -> Iterator[str]:
        """Which of the given files are no longer what the rows were made of."""
        rows = SourceRows(origins)
        for row in self._recorded:
            origin = rows.find(row["name"])
            if isinstance(origin, Source) and isinstance(row.get("digest"), str) and origin.digest != row["digest"]:
                yield (
                    f"{row['name']} has changed since {self._rows.name} was made of it: rows are compared with what it "
                    "says now"
                )
