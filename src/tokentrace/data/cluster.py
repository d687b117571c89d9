"""The same job on a cluster: chunks as a Ray Dataset, tokenized by actors, put together as on one machine.

`workers.tokenize_chunk` makes the part file of a chunk, here as on one machine. A part is written whole, its name
depends on the chunk alone, and so does its content: that Ray may run a chunk again, when a worker or a node dies, does
not change the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import platform
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError, TokentraceError
from ..samples.sample import Sample
from .chunks import CHUNK_ROWS, Chunk, Row
from .job import MANIFEST, Finished, tokenize_files
from .ray_connection import connected, first_line, import_ray
from .sources import Format, pyarrow
from .tables import Layout, SampleOrigin, samples_table, schema
from .tokenizing import Counts, RowResult, RowTokenizer, TokenizeSettings
from .workers import part_file, tokenize_chunk

_SHARED: Final = "inputs, tokenizer and output must be on storage that all nodes share, under the same paths"
_KEPT: Final = "what is done is kept: run again to continue"

_TASKS: Final = 32
_MOST_CHUNKS: Final = 16
"""A worker is given one chunk per task. Where that would be more than `_TASKS` tasks for each worker, a task has more
chunks, up to `_MOST_CHUNKS`: Ray keeps a record of each task on one machine."""

_RETRIES: Final = 3
"""How often a chunk is tried again when a worker died on it. Ray itself would never give up."""

_PAUSES: Final = (0.0, 1.0, 4.0, 15.0, 40.0)
"""Seconds to wait before each look for a part that another node wrote: network file systems remember for up to a minute
that a file was not there."""

_SAME: Final = ("tokentrace", "tokenizer_sha256", "template_sha256", "family")
"""What the manifest says that has to be the same on all nodes."""


def tokenize_on_ray(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    address: str | None = None,
    **options: Any,
) -> Finished:
    """`job.tokenize_files` on a Ray cluster: the same file, byte for byte, and the same side file.

    All nodes need this version of tokentrace, and the inputs, the tokenizer's folder and the output's folder under the
    same paths, on storage that they share. Each worker checks that first: what a node does not see is a SampleError
    with the node and the path.

    `workers` is the number of actors, each on one CPU; by default the number of CPUs of the cluster. `address` is that
    of a cluster: ``"auto"`` for the one this machine is a node of, ``"local"`` for a cluster of this machine's cores
    that lasts as long as the call; None is the default of ``ray.init()``. A program that is already connected to Ray
    stays connected, and its connection is used. `options` are those of `tokenize_files`. An unfinished run is continued
    in the same way: parts that are done are kept, whether Ray made them or not.
    """
    ray = import_ray()
    with connected(ray, address):
        count = workers if workers is not None else int(ray.cluster_resources().get("CPU", 1))
        return tokenize_files(inputs, output, settings, workers=count, run=run_on_ray, **options)


def run_on_ray(
    chunks: Iterable[Chunk], settings: TokenizeSettings, parts: Path, workers: int
) -> Iterator[tuple[Chunk, Counts]]:
    """Tokenize chunks on `workers` actors of the cluster this process is connected to; yields each when it is done.

    All chunks are planned before the first is tokenized; only their positions are sent, never their text. A chunk that
    fails is a SampleError with its rows. Chunks that are done by then stay done.
    """
    ray = import_ray()
    waiting = {chunk.index: chunk for chunk in chunks}
    if not waiting:
        return
    folder = parts.absolute()
    per_task = min(max(1, len(waiting) // (workers * _TASKS)), _MOST_CHUNKS)
    dataset = ray.data.from_items(
        [{"chunk": pickle.dumps(_everywhere(chunk))} for chunk in waiting.values()],
        override_num_blocks=-(-len(waiting) // per_task),
    ).map_batches(
        ChunkTokenizer,
        fn_constructor_args=(_portable(settings), folder, uuid.uuid4().hex, _RETRIES),
        batch_size=1,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(waiting))),
        num_cpus=1,
    )
    dataset.context.enable_progress_bars = False
    for row in _streamed(ray, dataset):
        if row["error"]:
            raise SampleError(row["error"])
        chunk = waiting.pop(row["index"], None)
        if chunk is not None:
            _check_part(part_file(folder, chunk.index), row["node"])
            yield chunk, Counts.read(json.loads(row["counts"]))
    if waiting:
        raise SampleError(f"Ray left out {next(iter(waiting.values())).described}; {_KEPT}")


def _streamed(ray: Any, dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset as they are made. Its actors end when the caller stops."""
    with _quiet(), contextlib.closing(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                known = isinstance(error, ray.exceptions.RayError)
                cause = error if known else error.__cause__ or error  # Ray Data wraps what Ray says
                raise SampleError(f"Ray gave up: {first_line(cause)}; {_KEPT}, perhaps with fewer workers") from error
            if batch is None:
                return
            yield from batch.to_pylist()


def _everywhere(chunk: Chunk) -> Chunk:
    """The chunk with an absolute path."""
    return dataclasses.replace(chunk, source=dataclasses.replace(chunk.source, path=os.path.abspath(chunk.source.path)))


def _portable(settings: TokenizeSettings) -> TokenizeSettings:
    """The settings with an absolute path of the tokenizer, unless it is a hub name."""
    path = Path(str(settings.tokenizer)).expanduser()
    return dataclasses.replace(settings, tokenizer=str(path.absolute())) if path.exists() else settings


def _check_part(path: Path, node: str) -> None:
    """Check that this node sees what another wrote."""
    for pause in _PAUSES:
        time.sleep(pause)
        if path.is_file():
            return
        os.listdir(path.parent)  # makes network file systems look again
    raise SampleError(f"{path}, which node {node} wrote, is not seen on node {platform.node()}: {_SHARED}")


# -- on the nodes


class ChunkTokenizer:
    """An actor: positions of chunks in, counts or errors out. The samples go to the part files."""

    def __init__(self, settings: TokenizeSettings, parts: Path, run: str = "", retries: int = _RETRIES) -> None:
        self._settings = settings
        self._parts = parts
        self._run = run
        self._retries = retries
        self._node = platform.node()
        self._tokenizer: RowTokenizer | None = None

    def __call__(self, batch: Any) -> Any:
        """One row for each chunk: its number, its counts as JSON, and the error, or an empty string."""
        pa = pyarrow()
        rows = [self._row(pickle.loads(data)) for data in batch.column("chunk").to_pylist()]
        names = [("index", pa.int64()), ("node", pa.string()), ("counts", pa.string()), ("error", pa.string())]
        return pa.Table.from_pylist(rows, schema=pa.schema(names))

    def _row(self, chunk: Chunk) -> dict[str, Any]:
        counts, error = Counts(), ""
        try:
            self._check_seen(self._parts / MANIFEST)
            tried = self._begin(chunk)
            self._check_source(chunk)
            counts = tokenize_chunk(self._made(), chunk, self._parts)
            tried.unlink(missing_ok=True)
        except SampleError as known:
            error = str(known)
        except Exception as unknown:  # as text: errors do not all travel
            reason = f"{type(unknown).__name__}: {' '.join(str(unknown).split())[:1000]}"
            error = f"{chunk.described}, on node {self._node}: {reason}; {_KEPT}"
        described = json.dumps(counts.described())
        return {"index": chunk.index, "node": self._node, "counts": described, "error": error}

    def _begin(self, chunk: Chunk) -> Path:
        """Leave a note that a chunk was started: it remains if a worker dies on the chunk."""
        path = self._parts / f"{chunk.index:08d}.{self._run}.tried"
        with path.open("ab") as file:
            died = file.tell()
            file.write(b".")
        if died > self._retries:
            raise SampleError(
                f"{chunk.described}: {died} workers died on them, perhaps for lack of memory; {_KEPT}, "
                "with fewer workers"
            )
        return path

    def _made(self) -> RowTokenizer:
        """The tokenizer, made once and checked against the manifest."""
        if self._tokenizer is None:
            if Path(str(self._settings.tokenizer)).is_absolute():
                self._check_seen(Path(str(self._settings.tokenizer)))
            try:
                made = RowTokenizer(self._settings)
            except TokentraceError as error:
                raise SampleError(f"node {self._node}: {error}") from error
            wanted = json.loads((self._parts / MANIFEST).read_text(encoding="utf-8"))
            found = made.described()
            for name in _SAME:
                if found[name] != wanted[name]:
                    raise SampleError(
                        f"node {self._node} has another {name} than the node that started: {found[name]!r} instead of "
                        f"{wanted[name]!r}; they must be the same everywhere"
                    )
            self._tokenizer = made
        return self._tokenizer

    def _check_seen(self, path: Path) -> None:
        if not path.exists():
            raise SampleError(f"node {self._node} does not see {path}: {_SHARED}")

    def _check_source(self, chunk: Chunk) -> None:
        """Check that this node sees the file that was planned."""
        self._check_seen(Path(chunk.source.path))
        if chunk.source.format in (Format.LINES, Format.ELEMENTS, Format.OBJECT):
            size = os.path.getsize(chunk.source.path)
            if size != chunk.source.size:
                raise SampleError(
                    f"node {self._node} sees another {chunk.source.path}, of {size:,} bytes and not "
                    f"{chunk.source.size:,}: {_SHARED}"
                )


# -- datasets that are Ray's already


def tokenize_dataset(
    dataset: Any,
    settings: TokenizeSettings,
    *,
    concurrency: int | tuple[int, int] | None = None,
    keep: Sequence[str] = (),
) -> Any:
    """A Ray Dataset of conversations, wherever it was read from, as a Ray Dataset of samples.

    The columns are those of the files that `tokenize_files` writes, without `row`, which a Ray Dataset does not have,
    and with `error`: null, or why a row gave no sample. A row with an error has empty lists, so that every row of the
    dataset has one here. A row that gives several samples becomes several rows. `keep` names columns of the dataset
    to copy, such as an id.

    Nothing runs before the dataset is used. Rows are in the order of the dataset only if the execution options of its
    context say so (``dataset.context.execution_options.preserve_order = True``). `concurrency` is the number of
    actors, or the fewest and the most; by default Ray decides. Settings that cannot be used are an error here; a
    column to keep that the dataset does not have is an error when it runs.
    """
    ray = import_ray()
    RowTokenizer(settings)
    for name in {*schema(Layout(labels=settings.labels)).names, "error"} & set(keep):
        raise InputError(f"{name!r} cannot be kept: samples have a column of that name")
    if isinstance(concurrency, tuple):
        pool = ray.data.ActorPoolStrategy(min_size=concurrency[0], max_size=concurrency[1])
    else:
        pool = ray.data.ActorPoolStrategy(size=concurrency)
    return dataset.map_batches(
        DatasetTokenizer,
        fn_constructor_args=(_portable(settings), tuple(keep)),
        batch_size=CHUNK_ROWS,
        batch_format="pyarrow",
        compute=pool,
    )


class DatasetTokenizer:
    """An actor: tables of conversations in, tables of samples out."""

    def __init__(self, settings: TokenizeSettings, keep: tuple[str, ...] = ()) -> None:
        self._layout = Layout(labels=settings.labels)
        self._keep = keep
        self._settings = settings
        self._tokenizer: RowTokenizer | None = None

    def __call__(self, batch: Any) -> Any:
        """A table with at least one row for each row of the batch."""
        pa = pyarrow()
        if self._tokenizer is None:
            self._tokenizer = RowTokenizer(self._settings)
        samples: list[Sample] = []
        places: list[SampleOrigin] = []
        errors: list[str | None] = []
        origins: list[int] = []
        for at, value in enumerate(batch.to_pylist()):
            one = self._tokenizer.tokenize(Row(at, None, value), "rows", Format.PARQUET)
            for number, (sample, error) in enumerate(_outcomes(one)):
                samples.append(sample)
                places.append(SampleOrigin("rows", at, number, one.messages))
                errors.append(error)
                origins.append(at)
        table = samples_table(samples, places, self._layout).drop_columns(["row"])
        table = table.append_column("error", pa.array(errors, pa.string()))
        for name in self._keep:
            if name not in batch.column_names:
                raise SampleError(f"{name!r} cannot be kept: the dataset has {', '.join(batch.column_names)}")
            table = table.append_column(name, batch.column(name).take(pa.array(origins, pa.int64())))
        return table


def _outcomes(one: RowResult) -> Iterator[tuple[Sample, str | None]]:
    """The samples of a row with no error, then an empty sample with the error of each problem."""
    for sample in one.samples:
        yield sample, None
    for bad in one.problems:
        empty = np.zeros(0, np.int32)
        nothing = Sample(empty, empty.astype(np.bool_), empty, empty.astype(np.uint8), parts=empty.astype(np.uint8))
        yield nothing, f"{bad.kind}: {bad.reason}"


# -- Ray itself


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without Ray Data's messages on the console; its log files still have them."""
    handlers = [one for one in logging.getLogger("ray.data").handlers if isinstance(one, logging.StreamHandler)]
    levels = [one.level for one in handlers]
    for one in handlers:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in zip(handlers, levels, strict=True):
            one.setLevel(level)
