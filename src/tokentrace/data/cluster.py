"""The same job on a cluster: chunks as a Ray Dataset, tokenized by actors, put together as on one machine.

What a chunk becomes is decided by `chunks.tokenize_chunk` alone, here as there. Parts are written whole, under a name
that only the chunk decides, and say the same however often they are written: that Ray may run a chunk again, when a
worker or a node dies, changes nothing in the result.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import pickle
import platform
import socket
import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError, TokentraceError
from ..samples.sample import Sample
from .chunks import part_file, tokenize_chunk
from .job import MANIFEST, Finished, tokenize_files
from .sources import CHUNK_ROWS, Chunk, Format, Row, tables
from .tables import Layout, Place, samples_table, schema
from .tokenizing import Counts, RowResult, RowTokenizer, TokenizeSettings

_SHARED: Final = "inputs, tokenizer and output must be on storage that all nodes share, under the same paths"
_KEPT: Final = "what is done is kept: run again to go on"

_TASKS: Final = 32
_MOST_CHUNKS: Final = 16
"""A worker is given one chunk at a time. Where each would get more than `_TASKS` of them, so many more at a time that
it is about `_TASKS`, but at most `_MOST_CHUNKS`: what Ray keeps of a task is kept on one machine."""

_RETRIES: Final = 3
"""How often a chunk is tried again when a worker died on it. Ray itself would never stop."""

_PAUSES: Final = (0.0, 1.0, 4.0, 15.0, 40.0)
"""A part that another node wrote is looked for so often, with so many seconds between: network file systems remember
for up to a minute that a file was not there."""

_SAME: Final = ("tokentrace", "tokenizer_sha256", "template_sha256", "family")
"""What has to be the same on all nodes, of what the manifest says."""


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

    On all nodes, this version of tokentrace must be installed, and the inputs, the tokenizer's folder and the
    output's folder must be there under the same paths, on storage that they share. Each worker makes sure of that
    before it does anything: what a node does not see is a SampleError with its name and the path.

    `workers` actors work, each on one CPU; as many as the cluster has CPUs, if it is None. `address` is that of a
    cluster, ``"auto"`` for the one this machine is a node of, ``"local"`` for one of this machine's cores that lasts as
    long as the call; None is what ``ray.init()`` makes of it. A program that is connected to Ray already stays so, and
    its connection is used. `options` are those of `tokenize_files`. Going on after an end is the same as there: parts
    that are done are kept, whether Ray made them or not.
    """
    ray = _ray()
    with _connected(ray, address):
        count = workers if workers is not None else int(ray.cluster_resources().get("CPU", 1))
        return tokenize_files(inputs, output, settings, workers=count, run=run_on_ray, **options)


def run_on_ray(
    chunks: Iterable[Chunk], settings: TokenizeSettings, parts: Path, workers: int
) -> Iterator[tuple[Chunk, Counts]]:
    """Tokenize chunks on so many actors of the cluster this process is connected to; yields each as it is done.

    All chunks are planned before the first is tokenized; what travels is where they are, never what they say. A chunk
    that cannot be worked on is a SampleError with its rows. Those that are done by then stay done.
    """
    ray = _ray()
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
        raise SampleError(f"Ray left out {_rows(next(iter(waiting.values())))}; {_KEPT}")


def _streamed(ray: Any, dataset: Any) -> Iterator[dict[str, Any]]:
    """The rows of a dataset as they are made. When nobody wants more of them, its actors end."""
    with _quiet(), contextlib.closing(iter(dataset.iter_batches(batch_size=None, batch_format="pyarrow"))) as batches:
        while True:
            try:
                batch = next(batches, None)
            except Exception as error:
                known = isinstance(error, ray.exceptions.RayError)
                cause = error if known else error.__cause__ or error  # Ray Data wraps what Ray says
                raise SampleError(f"Ray gave up: {_first_line(cause)}; {_KEPT}, perhaps with fewer workers") from error
            if batch is None:
                return
            yield from batch.to_pylist()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:600]}" if text else type(error).__name__


def _rows(chunk: Chunk) -> str:
    return f"rows {chunk.first} to {chunk.first + chunk.rows - 1} of {chunk.source.name}"


def _everywhere(chunk: Chunk) -> Chunk:
    """The chunk with a path that does not depend on where a process was begun."""
    return dataclasses.replace(chunk, source=dataclasses.replace(chunk.source, path=os.path.abspath(chunk.source.path)))


def _portable(settings: TokenizeSettings) -> TokenizeSettings:
    """The settings with the whole path of the tokenizer, if it is one and no hub name."""
    path = Path(str(settings.tokenizer)).expanduser()
    return dataclasses.replace(settings, tokenizer=str(path.absolute())) if path.exists() else settings


def _check_part(path: Path, node: str) -> None:
    """Make sure that what a node wrote is seen here."""
    for pause in _PAUSES:
        time.sleep(pause)
        if path.is_file():
            return
        os.listdir(path.parent)  # has network file systems look again
    raise SampleError(f"{path}, which node {node} wrote, is not seen on node {platform.node()}: {_SHARED}")


# -- on the nodes


class ChunkTokenizer:
    """What an actor does: descriptions of chunks in, counts or what went wrong out. The samples go to the parts."""

    def __init__(self, settings: TokenizeSettings, parts: Path, run: str = "", retries: int = _RETRIES) -> None:
        self._settings = settings
        self._parts = parts
        self._run = run
        self._retries = retries
        self._node = platform.node()
        self._tokenizer: RowTokenizer | None = None

    def __call__(self, batch: Any) -> Any:
        """One row for each chunk: its number, its counts as JSON, and the error, or an empty string."""
        pa = tables("pyarrow")
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
            error = f"{_rows(chunk)}, on node {self._node}: {reason}; {_KEPT}"
        described = json.dumps(counts.described())
        return {"index": chunk.index, "node": self._node, "counts": described, "error": error}

    def _begin(self, chunk: Chunk) -> Path:
        """Note that a chunk was begun: where a worker died on it, the note is what is left."""
        path = self._parts / f"{chunk.index:08d}.{self._run}.tried"
        with path.open("ab") as file:
            died = file.tell()
            file.write(b".")
        if died > self._retries:
            raise SampleError(
                f"{_rows(chunk)}: {died} workers died on them, perhaps for want of memory; {_KEPT}, with fewer workers"
            )
        return path

    def _made(self) -> RowTokenizer:
        """The tokenizer, made once: what the manifest says it is."""
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
                        f"node {self._node} has another {name} than the node that began: {found[name]!r} instead of "
                        f"{wanted[name]!r}; they must be the same everywhere"
                    )
            self._tokenizer = made
        return self._tokenizer

    def _check_seen(self, path: Path) -> None:
        if not path.exists():
            raise SampleError(f"node {self._node} does not see {path}: {_SHARED}")

    def _check_source(self, chunk: Chunk) -> None:
        """Make sure that this node sees the file that was planned."""
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

    The columns are those of the files that `tokenize_files` writes, but for `row`, which a Ray Dataset does not know,
    and with `error` beside them: null, or why a row gave no sample. Such a row has empty lists, so that no row of the
    dataset is without one here. A row that gives several samples becomes several rows. `keep` names columns of the
    dataset that are carried over, such as an id.

    Nothing is run before the dataset is used. Rows are in the order of the dataset only if the execution options of
    its context say so (``dataset.context.execution_options.preserve_order = True``). `concurrency` is how many actors
    work, or the fewest and the most; Ray decides, if it is None. Settings that cannot be used are an error here; a
    column to keep that the dataset does not have is one when it is run.
    """
    ray = _ray()
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
    """What an actor does with batches of rows: tables of conversations in, tables of samples out."""

    def __init__(self, settings: TokenizeSettings, keep: tuple[str, ...] = ()) -> None:
        self._layout = Layout(labels=settings.labels)
        self._keep = keep
        self._settings = settings
        self._tokenizer: RowTokenizer | None = None

    def __call__(self, batch: Any) -> Any:
        """A table with at least one row for each row of the batch."""
        pa = tables("pyarrow")
        if self._tokenizer is None:
            self._tokenizer = RowTokenizer(self._settings)
        samples: list[Sample] = []
        places: list[Place] = []
        errors: list[str | None] = []
        origins: list[int] = []
        for at, value in enumerate(batch.to_pylist()):
            one = self._tokenizer.tokenize(Row(at, None, value), "rows", Format.PARQUET)
            for number, (sample, error) in enumerate(_outcomes(one)):
                samples.append(sample)
                places.append(Place("rows", at, number, one.messages))
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
    """All that became of a row: samples, and what is wrong with those that are none."""
    for sample in one.samples:
        yield sample, None
    for bad in one.problems:
        empty = np.zeros(0, np.int32)
        nothing = Sample(empty, empty.astype(np.bool_), empty, empty.astype(np.uint8), parts=empty.astype(np.uint8))
        yield nothing, f"{bad.kind}: {bad.reason}"


# -- Ray itself


def _ray() -> Any:
    """Ray with its datasets, or InputError with what to install."""
    tables("pyarrow")
    try:
        import ray
        import ray.data
    except ImportError:
        raise InputError("clusters are worked on with Ray: install tokentrace[ray]") from None
    return ray


@contextlib.contextmanager
def _connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connected to a cluster; afterwards no more, if it was not before."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise InputError(
            f"{where} is an address of the Ray Client, which is outside of the cluster and its storage: run this on "
            "a node of it, or as a Ray job, with the address 'auto'"
        )
    host, colon, port = where.rpartition(":")
    try:
        if colon and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()  # Ray waits for minutes
        with _environ("RAY_BACKEND_LOG_LEVEL", "fatal"):  # else it warns of how its own Ray Data begins actors
            ray.init(
                address=address,
                ignore_reinit_error=True,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError) as error:
        at = f" at {where!r}" if where else ""
        raise InputError(f"there is no Ray{at}: {_first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """With a variable of the environment, unless it is set."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what Ray Data tells the console; its log files still have it."""
    handlers = [one for one in logging.getLogger("ray.data").handlers if isinstance(one, logging.StreamHandler)]
    levels = [one.level for one in handlers]
    for one in handlers:
        one.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for one, level in zip(handlers, levels, strict=True):
            one.setLevel(level)
