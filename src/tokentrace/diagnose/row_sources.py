"""The conversations that rows of ids were made from: rows of source files, by name and number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ..data.rows import ROW_BYTES, Row, read_rows
from ..data.sources import Source, find_sources
from ..errors import InputError

_HOW: Final = "give it with --source, in Python with sources= (a .metadata file beside JSON Lines says where it is)"


class SourceRows:
    """Rows of files, by the name or base name of the file and their number.

    Files are read forwards: rows that are in the order of their source cost one pass.
    """

    def __init__(self, sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> None:
        self.sources = list(sources)
        self._row_bytes = row_bytes
        self._files: dict[str, _RowFile] = {}

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
        if source.path not in self._files:
            self._files[source.path] = _RowFile(source, self._row_bytes)
        row = self._files[source.path].get(number)
        return f"{source.name} has no row {number}" if row is None else (source, row)


class _RowFile:
    """A file that is read forwards, and again from its start for an earlier row."""

    def __init__(self, source: Source, row_bytes: int) -> None:
        self._source, self._row_bytes = source, row_bytes
        self._rows: Iterator[Row] = iter(())
        self._last = 0

    def get(self, number: int) -> Row | None:
        if number <= self._last or not self._last:
            self._rows, self._last = read_rows(self._source, row_bytes=self._row_bytes), 0
        for row in self._rows:
            self._last = row.number
            if row.number == number:
                return row
        self._last = 0
        return None


class RecordedSources:
    """The files that a file of rows says it was made of: their names, paths and digests."""

    def __init__(self, rows: Source, metadata: Mapping[str, Any]) -> None:
        self._rows = rows
        listed = metadata.get("sources")
        entries = listed if isinstance(listed, list) else []
        self._entries = [one for one in entries if isinstance(one, dict) and isinstance(one.get("name"), str)]

    @property
    def names(self) -> list[str]:
        return [entry["name"] for entry in self._entries]

    def find(self, spool: Path) -> tuple[list[Source], list[str]]:
        """The files that are still there, and a sentence about each that is not."""
        sources, missing = [], []
        for at, entry in enumerate(self._entries):
            source = self._locate(entry, spool / str(at))
            if source is not None:
                sources.append(replace(source, name=entry["name"]))
            elif entry.get("path"):
                missing.append(f"{entry['name']}, which {self._rows.name} was made of, is not there any more: {_HOW}")
            else:
                missing.append(f"{self._rows.name} was made of {entry['name']}, which is not a file: {_HOW}")
        return sources, missing

    def _locate(self, entry: Mapping[str, Any], spool: Path) -> Source | None:
        """The file, seen from the rows or from here; preferably with the recorded digest."""
        places = [entry["name"]] if entry.get("path") else []
        if isinstance(entry.get("path"), str) and self._rows.origin:
            places.insert(0, str(Path(self._rows.origin).absolute().parent / entry["path"]))
        sources: list[Source] = []
        for place in places:
            if Path(place).is_file():
                try:
                    sources += find_sources([place], spool / str(len(sources)))
                except InputError:  # no longer readable
                    continue
        same = [source for source in sources if source.digest == entry.get("digest")]
        return next(iter(same or sources), None)

    def changed(self, origins: Sequence[Source]) -> Iterator[str]:
        """Which of these files are no longer what the rows were made of."""
        rows = SourceRows(origins)
        for entry in self._entries:
            origin, digest = rows.find(entry["name"]), entry.get("digest")
            if isinstance(origin, Source) and isinstance(digest, str) and origin.digest != digest:
                yield f"{entry['name']} has changed since {self._rows.name} was made of it"
