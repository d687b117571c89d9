"""A chunk's samples as a part file: what every worker makes, wherever it runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import InputError
from ..files import write_whole, writing
from .sources import Chunk, read_rows, tables
from .tables import METADATA_KEY, Layout, Place, samples_table
from .tokenizing import Counts, RowResult, RowTokenizer


def part_file(parts: Path, index: int) -> Path:
    """The file of a chunk's samples; there once the chunk is done."""
    return parts / f"{index:08d}.arrow"


def tokenize_chunk(tokenizer: RowTokenizer, chunk: Chunk, parts: Path) -> Counts:
    """Tokenize a chunk into its part file. What every worker does, wherever it runs."""
    results = [
        tokenizer.tokenize(row, chunk.source.name, chunk.source.format)
        for row in read_rows(chunk, row_bytes=tokenizer.settings.row_bytes)
    ]
    counts = Counts()
    for one in results:
        counts.add(one)
    _write_part(part_file(parts, chunk.index), results, chunk, counts, Layout(labels=tokenizer.settings.labels))
    return counts


def _write_part(path: Path, results: Sequence[RowResult], chunk: Chunk, counts: Counts, layout: Layout) -> None:
    pa, ipc = tables("pyarrow"), tables("pyarrow.ipc")
    places = [
        Place(chunk.source.name, one.row.number, at, one.messages) for one in results for at in range(len(one.samples))
    ]
    table = samples_table([sample for one in results for sample in one.samples], places, layout)
    bad = [row.described() for one in results for row in one.problems]
    about = {"counts": counts.described(), "bad": bad, "size": chunk.size}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    with writing(path):
        write_whole(path, sink.getvalue().to_pybytes())


def read_part(path: Path, *, rows: bool = True) -> tuple[Any, dict[str, Any]]:
    """The samples of a part, if they are wanted, and what it says of itself."""
    pa, ipc = tables("pyarrow"), tables("pyarrow.ipc")
    try:
        with pa.memory_map(str(path)) as file:
            reader = ipc.open_stream(file)
            about = json.loads(reader.schema.metadata[METADATA_KEY.encode()])
            return (reader.read_all() if rows else None), about
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is no part of a run: {error}; restart to discard what is there") from error
