"""Tables of samples as bytes: Parquet, Arrow's stream, or JSON Lines, to a file or to anything that takes bytes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import IO, Any, Final, Protocol

from .lines import LineWriter
from .sources import pyarrow

SUFFIXES: Final = (".parquet", ".arrow", ".jsonl", ".jsonl.gz")
"""The names of files of samples end in one of these."""
GROUP_TOKENS: Final = 1 << 20
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 26
"""A row group, or a batch of an Arrow stream, is closed when it has this many tokens, rows or bytes."""


class TableWriter(Protocol):
    """Writes tables; what it writes is whole after `finish`."""

    def write(self, table: Any) -> None: ...

    def finish(self) -> None: ...

    def abandon(self) -> None:
        """Let go of what was written so far, which is of no use."""
        ...


def table_writer(name: str, out: Path | IO[bytes], schema: Any) -> TableWriter:
    """The writer for a file of this name. It writes to the file at `out`, or to `out` itself, which stays open."""
    if name.endswith((".jsonl", ".jsonl.gz")):
        return LineWriter(out, packed=name.endswith(".gz"))
    if name.endswith(".arrow"):
        sink = out if not isinstance(out, Path) else pyarrow().OSFile(str(out), "wb")
        return _RowGroups(pyarrow("pyarrow.ipc").new_stream(sink, schema), schema, sink if sink is not out else None)
    where = str(out) if isinstance(out, Path) else out
    return _RowGroups(pyarrow("pyarrow.parquet").ParquetWriter(where, schema, compression="zstd"), schema)


class _RowGroups:
    """Collects tables, and writes a group of their rows whenever there are enough rows, tokens or bytes."""

    def __init__(self, writer: Any, schema: Any, file: Any = None) -> None:
        self._writer, self._schema, self._file = writer, schema, file
        self._waiting: list[Any] = []
        self._rows = self._tokens = self._bytes = 0

    def write(self, table: Any) -> None:
        start = 0
        for at, length in enumerate(table.column("num_tokens").to_pylist()):
            self._rows += 1
            self._tokens += length
            if self._rows >= GROUP_ROWS or self._tokens >= GROUP_TOKENS:
                self._waiting.append(table.slice(start, at + 1 - start))
                self._flush()
                start = at + 1
        if start < table.num_rows:
            rest = table.slice(start)
            self._waiting.append(rest)
            self._bytes += rest.nbytes
            if self._bytes >= GROUP_BYTES:
                self._flush()

    def _flush(self) -> None:
        if self._waiting:
            group = pyarrow().concat_tables(self._waiting).cast(self._schema).combine_chunks()
            self._writer.write_table(group, max(group.num_rows, 1))
        self._waiting, self._rows, self._tokens, self._bytes = [], 0, 0, 0

    def finish(self) -> None:
        self._flush()
        self._writer.close()
        if self._file is not None:
            self._file.close()

    def abandon(self) -> None:
        for each in (self._writer, self._file):
            with contextlib.suppress(OSError):
                if each is not None:
                    each.close()
