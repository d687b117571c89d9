"""The job: files of conversations to one file of samples, on all cores, in bounded memory.

One process reads batches of rows and writes their samples in the same order; workers tokenize the batches.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError
from ..files import write_whole, writing
from ..settings import instance, whole
from ..show.document import Document, Table
from ..tokens.tokenizer import Tokenizer
from .cluster import run_here, run_on_ray
from .sources import Source, find_sources, pyarrow, read_batches
from .tables import sample_writer, target_path
from .tokenizing import Counts, RowTokenizer, TokenizeSettings
from .trainers import find_trainer

QUANTILES: Final = {0.0: "least", 0.25: "25 %", 0.5: "median", 0.75: "75 %", 0.9: "90 %", 0.99: "99 %", 1.0: "most"}

Progress = Callable[[Counts, int, int], None]
"""Called with the counts, and how much is done of how much."""


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run, and where it is."""

    output: Path
    bad_rows: Path | None
    """The file of bad rows; None if every row gave a sample."""
    counts: Counts
    sizes: dict[str, array[int]]
    """The tokens and the trained tokens of each sample."""

    @property
    def longest(self) -> int:
        """The tokens of the longest sample."""
        return max(self.sizes["tokens"], default=0)

    def quantiles(self) -> dict[str, dict[float, int]]:
        """The sizes of samples at each of `QUANTILES`."""
        return {
            name: {at: int(np.quantile(values, at, method="inverted_cdf")) for at in QUANTILES}
            for name, values in self.sizes.items()
        }

    def document(self, _: Tokenizer | None = None) -> Document:
        """Return the sizes of samples as a document."""
        rows = [[name, *(f"{value:,}" for value in numbers.values())] for name, numbers in self.quantiles().items()]
        return Document("Statistics", tables=[Table("Lengths", ["a sample", *QUANTILES.values()], rows)])


def tokenize_files(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    split: str | None = None,
    overwrite: bool = False,
    trainer: str | None = None,
    progress: Progress | None = None,
    ray: str | None = None,
) -> Finished:
    """Tokenize files of conversations into one file of samples: Parquet, or JSON Lines (``.jsonl``).

    With a `trainer` ("trl", "axolotl", …) the file has the columns that it reads, and no others. Rows without a sample
    go to the file of bad rows, with their line and the reason. With the address of a `ray` cluster its nodes tokenize
    and give the same file: ``"auto"`` is the cluster of this machine, ``"local"`` one of its cores for this call, an
    empty text the default of ``ray.init()``. An existing connection is used.

    Raises InputError if there is nothing to read or no row gives a sample, or for an existing file without `overwrite`;
    WriteError if the system refuses to write. Whenever a run ends early, the output stays as it was.
    """
    pyarrow()
    target = find_trainer(trainer)
    path = target_path(output, target, overwrite=overwrite)
    instance("settings", settings, TokenizeSettings, SampleError)
    workers = None if workers is None else whole("workers", workers, least=1, error=SampleError)
    counts, sizes, first_reason = Counts(), {"tokens": array("i"), "trained": array("i")}, ""
    bad_rows = path.with_name(f"{path.name.removesuffix('.parquet').removesuffix('.jsonl')}.bad.jsonl")
    sources = find_sources(inputs, split=split)
    total = sum(source.size for source in sources)
    tokenizer = RowTokenizer(settings)
    metadata = tokenizer.described()
    batches = read_batches(sources, row_bytes=settings.row_bytes)
    if ray is not None:
        results = run_on_ray(batches, tokenizer, workers, ray)
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        # a small input is done before a second process is ready
        useful = max(1, min(cores, sum(os.path.getsize(source.path) for source in sources) >> 22))
        results = run_here(batches, tokenizer, workers or useful)
    with (
        tempfile.TemporaryFile() as rejected,
        sample_writer(path, settings.output, metadata, trainer=target) as write,
        contextlib.closing(results),
    ):
        for batch, result in results:
            write(result.table)
            counts.update(result.counts)
            for name, values in sizes.items():
                values.extend(result.table.column(f"num_{name}").to_pylist())
            for bad_row in result.bad_rows:
                first_reason = first_reason or bad_row["reason"]
                line = json.dumps(bad_row, ensure_ascii=False) + "\n"
                with writing(bad_rows):
                    rejected.write(line.encode("utf-8", "backslashreplace"))  # lone surrogates as JSON escapes
            if progress is not None:
                progress(counts, batch.done, total)
        if not counts.rows:
            raise InputError(f"there are no rows in {', '.join(source.name for source in sources)}")
        metadata |= {"sources": [_described(source, path) for source in sources], "counts": counts.described()}
        with writing(bad_rows):
            if first_reason:
                rejected.seek(0)
                write_whole(bad_rows, rejected)
            else:
                bad_rows.unlink(missing_ok=True)  # that of an earlier run
        if not counts.samples:
            problem = f"no row gave a sample ({bad_rows} says why; first: {first_reason})"
            raise InputError(f"{path} was not written: {problem}")
    return Finished(path, bad_rows if first_reason else None, counts, sizes)


def _described(source: Source, output: Path) -> dict[str, Any]:
    """A source, with a path that is relative to the output."""
    path = os.path.abspath(source.origin) if source.origin else None
    if path is not None:
        with contextlib.suppress(ValueError):  # on another drive
            path = Path(os.path.relpath(path, output.absolute().parent)).as_posix()
    return {"name": source.name, "size": source.size, "digest": source.digest, "path": path}
