"""Tokenize files of conversations into a file of samples, on all cores or a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import logging
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import sys
import tempfile
import threading
from array import array
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import InputError, SampleError
from ..files import write_whole, writing
from ..samples.sample import Sample
from ..settings import instance, whole
from ..show.document import Document, Table
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Tokenizer
from ..version import __version__
from .sources import BATCH_ROWS, Batch, Row, Source, find_sources, pyarrow, read_batches
from .tables import sample_writer, samples_table, target_path
from .tokenizing import Counts, RowTokenizer, TokenizeSettings, filled
from .trainers import find_trainer

_RETRIES = 3
_NO_IDS, _NO_PARTS = np.zeros(0, np.int32), np.zeros(0, np.uint8)
_NOTHING = Sample(_NO_IDS, np.zeros(0, np.bool_), _NO_IDS, _NO_PARTS, parts=_NO_PARTS)
QUANTILES = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run. `bad_rows` is None if every row gave a sample."""

    output: Path
    bad_rows: Path | None
    counts: Counts
    sizes: dict[str, array[int]]
    """Tokens and trained tokens of each sample."""

    @property
    def longest(self) -> int:
        return max(self.sizes["tokens"], default=0)

    def quantiles(self) -> dict[str, dict[float, int]]:
        return {
            name: {at: int(np.quantile(values, at, method="inverted_cdf")) for at in QUANTILES}
            for name, values in self.sizes.items()
        }

    def document(self, _: Tokenizer | None = None) -> Document:
        rows = [[name, *map("{:,}".format, sizes.values())] for name, sizes in self.quantiles().items()]
        head = ["a sample", "least", "25 %", "median", "75 %", "90 %", "99 %", "most"]
        return Document("Statistics", tables=[Table("Lengths", head, rows)])


def tokenize_files(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    split: str | None = None,
    overwrite: bool = False,
    trainer: str | None = None,
    progress: Callable[[Counts, int, int], None] | None = None,
    ray: str | None = None,
) -> Finished:
    """Tokenize files of conversations into a file of samples: Parquet, or JSON Lines (``.jsonl``).

    Rows without a sample go to the file of bad rows, with the reason. With a `trainer` ("trl",
    "axolotl", …) the file has only the columns that it reads. `ray` is the address of a cluster
    that does the work: ``"auto"``, ``"local"`` (a new one), or empty for Ray's default.

    Calls `progress` with the counts, the amount done, and the total. Raises InputError if no
    row gives a sample, or for an existing file without `overwrite`; WriteError. If a run ends
    early, the output stays as it was.
    """
    pyarrow()
    target = find_trainer(trainer)
    path = target_path(output, target, overwrite=overwrite)
    instance("settings", settings, TokenizeSettings, SampleError)
    if workers is not None:
        workers = whole("workers", workers, least=1, error=SampleError)
    counts, sizes, first_reason = Counts(), {"tokens": array("i"), "trained": array("i")}, ""
    bad_rows = path.with_suffix(".bad.jsonl")
    sources = find_sources(inputs, split=split)
    total = sum(source.size for source in sources)
    tokenizer, batches = RowTokenizer(settings), read_batches(sources)
    metadata = tokenizer.described()
    if ray is not None:
        results = run_on_ray(batches, tokenizer, workers, ray)
    else:
        results = run_here(batches, tokenizer, workers or _useful_workers(sources))
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
                    # lone surrogates as JSON escapes
                    rejected.write(line.encode(errors="backslashreplace"))
            if progress is not None:
                progress(counts, batch.done, total)
        if not counts.rows:
            raise InputError(f"there are no rows in {', '.join(source.name for source in sources)}")
        described = [_described(source, path) for source in sources]
        metadata |= {"sources": described, "counts": counts.described()}
        with writing(bad_rows):
            if first_reason:
                rejected.seek(0)
                write_whole(bad_rows, rejected)
            else:
                bad_rows.unlink(missing_ok=True)  # from an earlier run
        if not counts.samples:
            why = f"{bad_rows} says why; first: {first_reason}"
            raise InputError(f"{path} was not written: no row gave a sample ({why})")
    return Finished(path, bad_rows if first_reason else None, counts, sizes)


def _useful_workers(sources: Sequence[Source]) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = sum(os.path.getsize(source.path) for source in sources)
    return max(1, min(cores, size >> 22))  # small inputs are done before processes start


def _described(source: Source, output: Path) -> dict[str, Any]:
    path = os.path.abspath(source.origin) if source.origin else None
    if path is not None:
        with contextlib.suppress(ValueError):  # on another drive
            path = Path(os.path.relpath(path, output.absolute().parent)).as_posix()
    return {"name": source.name, "size": source.size, "digest": source.digest, "path": path}


class BatchResult(NamedTuple):
    table: Any
    counts: Counts
    bad_rows: list[dict[str, Any]]


Results = Generator[tuple[Batch, BatchResult]]


def tokenize_batch(
    tokenizer: RowTokenizer, rows: Sequence[Row], *, with_errors: bool = False
) -> BatchResult:
    """Tokenize rows. `with_errors`, each problem is an empty sample with the reason in `error`."""
    counts = Counts()
    samples, places, bad_rows = [], [], []
    for row in rows:
        result = tokenizer.tokenize(row.parsed())
        counts.add(result)
        errors = [f"{problem.kind}: {problem.reason}" for problem in result.problems if with_errors]
        samples += [sample.replace(rendered=None) for sample in result.samples]
        samples += [_NOTHING] * len(errors)
        place = {"source": row.source, "row": row.number, "num_messages": result.messages}
        reasons = [*[None] * len(result.samples), *errors]
        places += [place | {"sample": at, "error": reason} for at, reason in enumerate(reasons)]
        bad_rows += list(map(filled, result.problems))
    columns = {**tokenizer.settings.output, **({"error": "string"} if with_errors else {})}
    return BatchResult(samples_table(samples, columns, places), counts, bad_rows)


@functools.lru_cache(1)
def worker_tokenizer(settings: bytes) -> RowTokenizer:
    return RowTokenizer(pickle.loads(settings))


def tokenize_in_worker(rows: Sequence[Row], settings: bytes, version: str) -> BatchResult:
    """Tokenize rows with pickled settings. Raises SampleError for another version."""
    if version != __version__:
        node = f"node {platform.node()} has tokentrace {__version__}"
        raise SampleError(f"{node}, but the node that started the run has {version}")
    return tokenize_batch(worker_tokenizer(settings), rows)


def in_order(futures: Iterator[tuple[Batch, Future[BatchResult]]], ahead: int) -> Results:
    """Yield results in order. Raises SampleError if workers fail."""
    pending = deque(itertools.islice(futures, ahead))
    while pending:
        batch, future = pending.popleft()
        try:
            result = future.result()
        except Exception as error:
            problem = first_line(getattr(error, "cause", None) or error)  # of a Ray task
            first, last = batch.rows[0], batch.rows[-1]
            where = f"rows {first.number} to {last.number} of {first.source}: workers failed on them"
            raise SampleError(f"{where} ({problem}); if memory ran out, use fewer workers") from error
        pending.extend(itertools.islice(futures, 1))
        yield batch, result


def first_line(error: BaseException) -> str:
    """An error as one line. Ray's contain tracebacks."""
    return f"{type(error).__name__}: {str(error).strip()[:600]}".splitlines()[0]


def run_here(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int) -> Results:
    if workers == 1:
        yield from ((batch, tokenize_batch(tokenizer, batch.rows)) for batch in batches)
        return
    workers = min(workers, 61) if sys.platform == "win32" else workers  # the limit of Windows
    # a fork would lose threads of encoders and progress bars
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, _start_worker, (tokenizer.settings,))
    try:
        yield from in_order(((batch, pool.submit(_tokenize, batch.rows)) for batch in batches), 2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


_worker_tokenizers: Final[list[RowTokenizer]] = []


def _tokenize(rows: Sequence[Row]) -> BatchResult:
    return tokenize_batch(_worker_tokenizers[0], rows)


def _start_worker(settings: TokenizeSettings) -> None:
    """Prepare a worker that ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _worker_tokenizers.append(RowTokenizer(settings))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def import_ray() -> Any:
    """Raises InputError if Ray cannot be imported."""
    pyarrow()
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("work on clusters needs Ray: install tokentrace[ray]") from None
    except Exception as error:  # a broken installation
        raise InputError(f"Ray cannot be imported: {first_line(error)}") from error
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connect to a cluster for the block. An existing connection stays open."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        problem = f"{where} is an address of the Ray Client, which is outside the cluster"
        raise InputError(f"{problem}: run this on a node with the address 'auto'")
    host, colon, port = where.rpartition(":")
    try:
        if colon and port.isdecimal():
            # Ray waits for minutes
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=address, ignore_reinit_error=True, **quiet)
    except Exception as error:  # Ray raises all kinds, even plain Exception
        with contextlib.suppress(Exception):
            ray.shutdown()
        at = f" at {where!r}" if where else ""
        raise InputError(f"cannot connect to Ray{at}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def run_on_ray(
    batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int | None, address: str = ""
) -> Results:
    """Tokenize batches as tasks of a cluster, `workers` at once; by default two per CPU."""
    ray = import_ray()
    with connected(ray, address or None):
        cpus = int(ray.cluster_resources().get("CPU", 1))
        settings = ray.put(_pickled(tokenizer.settings))
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_in_worker)
        futures = ((batch, task.remote(batch.rows, settings, __version__).future()) for batch in batches)
        yield from in_order(futures, workers or 2 * cpus)


def _pickled(settings: TokenizeSettings) -> bytes:
    """Pickle settings with the loaded tokenizer: other nodes do not need its files."""
    return pickle.dumps(dataclasses.replace(settings, tokenizer=load_tokenizer(settings.tokenizer)))


def tokenize_dataset(
    dataset: Any, settings: TokenizeSettings, *, concurrency: int | None = None, keep: Sequence[str] = ()
) -> Any:
    """Turn a Ray Dataset of conversations into one of samples: the columns of `tokenize_files` except `row`.

    `error` says why a row gave no sample; its lists are empty. `keep` names columns to copy.
    Rows are in order only with the dataset's execution option ``preserve_order``.
    """
    ray = import_ray()
    RowTokenizer(settings)
    for name in {*settings.output, "error"} & set(keep):
        raise InputError(f"{name!r} cannot be kept: samples have such a column")
    return dataset.map_batches(
        tokenize_table,
        fn_args=(_pickled(settings), tuple(keep)),
        batch_size=BATCH_ROWS,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(size=concurrency),
    )


def tokenize_table(batch: Any, settings: bytes, keep: Sequence[str] = ()) -> Any:
    """Turn a table of conversations into one of samples, at least one per row."""
    rows = [Row(at, None, value, filled=True) for at, value in enumerate(batch.to_pylist())]
    table = tokenize_batch(worker_tokenizer(settings), rows, with_errors=True).table
    for name in keep:
        if name not in batch.column_names:
            raise SampleError(f"there is no column {name!r}; there are {', '.join(batch.column_names)}")
        table = table.append_column(name, batch.column(name).take(table.column("row")))
    return table.drop_columns(["row"])
