"""Rows of source files by number: the conversations that rows of ids were made from."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Final

from ..sources import ROW_BYTES, Chunk, Row, Source, plan, read_rows

_KEPT: Final = 4
"""Chunks that are kept: rows are mostly asked for in order."""


class SourceRows:
    """The rows of some files, found by the name of the file and their number.

    A file that does not have the very name that is asked for is taken if it alone has that base name. Rows that are
    asked for in another order than the file's cost the reading of a chunk each.
    """

    def __init__(self, sources: Sequence[Source], *, row_bytes: int = ROW_BYTES) -> None:
        self.sources = list(sources)
        self._row_bytes = row_bytes
        self._plans: dict[str, list[Chunk]] = {}
        self._chunks: OrderedDict[tuple[str, int], dict[int, Row]] = OrderedDict()

    def find(self, name: str) -> Source | str:
        """The file that a row says it comes from, or why there is none."""
        exact = [source for source in self.sources if source.name == name]
        base = PurePosixPath(name).name
        named = exact or [source for source in self.sources if PurePosixPath(source.name).name == base]
        if len(named) == 1:
            return named[0]
        return f"several sources are named {base!r}" if named else f"its source {name!r} is not given"

    def row(self, name: str, number: int) -> tuple[Source, Row] | str:
        """A row with the file it is from, or why there is none."""
        source = self.find(name)
        if isinstance(source, str):
            return source
        if source.path not in self._plans:
            self._plans[source.path] = list(plan([source], row_bytes=self._row_bytes))
        chunks = self._plans[source.path]
        index = bisect_right([chunk.first for chunk in chunks], number) - 1
        row = self._read(chunks[index]).get(number) if index >= 0 else None
        return f"{source.name} has no row {number}" if row is None else (source, row)

    def _read(self, chunk: Chunk) -> dict[int, Row]:
        key = (chunk.source.path, chunk.index)
        if key not in self._chunks:
            self._chunks[key] = {row.number: row for row in read_rows(chunk, row_bytes=self._row_bytes)}
            if len(self._chunks) > _KEPT:
                self._chunks.popitem(last=False)
        self._chunks.move_to_end(key)
        return self._chunks[key]
