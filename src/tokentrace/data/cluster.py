"""Batches of rows to tables of samples, in the same order: in this process, in several, or on a Ray cluster.

Ray Datasets of conversations become Ray Datasets of samples.
"""

import contextlib
import dataclasses
import functools
import itertools
import logging
import multiprocessing
import os
import pickle
import platform
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np

from ..errors import InputError, SampleError
from ..samples.sample import Sample
from ..tokens.loading import load_tokenizer
from ..version import __version__
from .sources import BATCH_ROWS, Batch, Row, pyarrow
from .tables import samples_table
from .tokenizing import Counts, RowTokenizer, TokenizeSettings, filled

_RETRIES: Final = 3
"""How often a batch is tried again when a worker died on it."""
_NO_IDS, _NO_PARTS = np.zeros(0, np.int32), np.zeros(0, np.uint8)
_NOTHING: Final = Sample(_NO_IDS, np.zeros(0, np.bool_), _NO_IDS, _NO_PARTS, parts=_NO_PARTS)


class BatchResult(NamedTuple):
    """The samples of a batch as a table, its counts, and its bad rows as they are written."""

    table: Any
    counts: Counts
    bad_rows: list[dict[str, Any]]


Results = Generator[tuple[Batch, BatchResult]]


def tokenize_batch(tokenizer: RowTokenizer, rows: Sequence[Row], *, with_errors: bool = False) -> BatchResult:
    """Tokenize rows. Every worker does this, here and on Ray.

    The table of samples has no bad rows, or `with_errors` one empty sample for each problem, which is in `error`.
    """
    counts = Counts()
    samples, places, bad_rows = [], [], []
    for row in rows:
        result = tokenizer.tokenize(row.parsed())
        counts.add(result)
        errors = [f"{problem.kind}: {problem.reason}" for problem in result.problems if with_errors]
        samples += [*(sample.replace(rendered=None) for sample in result.samples), *[_NOTHING] * len(errors)]
        place = {"source": row.source, "row": row.number, "num_messages": result.messages}
        reasons = [*[None] * len(result.samples), *errors]
        places += [place | {"sample": at, "error": reason} for at, reason in enumerate(reasons)]
        bad_rows += list(map(filled, result.problems))
    columns = {**tokenizer.settings.output, **({"error": "string"} if with_errors else {})}
    return BatchResult(samples_table(samples, columns, places), counts, bad_rows)


@functools.lru_cache(1)
def worker_tokenizer(settings: bytes) -> RowTokenizer:
    """The tokenizer of a worker, from pickled settings."""
    return RowTokenizer(pickle.loads(settings))


def tokenize_in_worker(rows: Sequence[Row], settings: bytes, version: str) -> BatchResult:
    """Tokenize rows with pickled settings. Raises SampleError if the worker's node has another version."""
    if version != __version__:
        node = f"node {platform.node()} has tokentrace {__version__}"
        raise SampleError(f"{node}, the node that started the run has {version}")
    return tokenize_batch(worker_tokenizer(settings), rows)


def in_order(futures: Iterator[tuple[Batch, Future[BatchResult]]], ahead: int) -> Results:
    """Yield results in the order of batches. Raises SampleError."""
    pending = deque(itertools.islice(futures, ahead))
    while pending:
        batch, future = pending.popleft()
        try:
            result = future.result()
        except Exception as error:
            problem = first_line(getattr(error, "cause", None) or error)  # what a task of Ray raised
            hint = "if for lack of memory, run again with fewer workers"
            raise SampleError(f"{batch}: workers failed on them ({problem}); {hint}") from error
        pending.extend(itertools.islice(futures, 1))
        yield batch, result


def first_line(error: BaseException) -> str:
    """An error on one line: those of Ray continue with the tracebacks of other machines."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:600]}" if text else type(error).__name__


def run_here(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int) -> Results:
    """Tokenize batches in this process, or in several processes of this machine."""
    if workers == 1:
        yield from ((batch, tokenize_batch(tokenizer, batch.rows)) for batch in batches)
        return
    if sys.platform == "win32":
        workers = min(workers, 61)  # its limit
    context = multiprocessing.get_context("spawn")  # threads of encoders and progress bars do not survive a fork
    pool, settings = ProcessPoolExecutor(workers, context, _start_worker), pickle.dumps(tokenizer.settings)
    try:
        futures = ((batch, pool.submit(tokenize_in_worker, batch.rows, settings, __version__)) for batch in batches)
        yield from in_order(futures, 2 * workers)
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    """Prepare a worker, which ends when its parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started it
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


# -- Ray


def import_ray() -> Any:
    """Ray with its datasets. Raises InputError that says what to install."""
    pyarrow()
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("work on clusters needs Ray: install tokentrace[ray]") from None
    except Exception as error:  # a broken installation
        raise InputError(f"Ray is installed and cannot be imported: {first_line(error)}") from error
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connected to a cluster inside the block; an existing connection stays."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise InputError(
            f"{where} is an address of the Ray Client, which is outside the cluster and its storage: run this on a "
            "node of the cluster, or as a Ray job, with the address 'auto'"
        )
    host, colon, port = where.rpartition(":")
    try:
        if colon and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()  # Ray waits for minutes
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=address, ignore_reinit_error=True, **quiet)
    except Exception as error:  # Ray raises all kinds, also plain Exception
        with contextlib.suppress(Exception):
            ray.shutdown()
        at = f" at {where!r}" if where else ""
        raise InputError(f"there is no Ray{at}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def run_on_ray(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int | None, address: str = "") -> Results:
    """Tokenize batches as tasks of a cluster, `workers` at once, by default as many as it has CPUs.

    Only this node needs the inputs.
    """
    ray = import_ray()
    with connected(ray, address or None):
        cpus = int(ray.cluster_resources().get("CPU", 1))
        count = cpus if workers is None else workers
        settings = ray.put(_pickled(tokenizer.settings))
        task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_in_worker)
        futures = ((batch, task.remote(batch.rows, settings, __version__).future()) for batch in batches)
        # with no more CPUs than workers, twice as many tasks keep them busy
        yield from in_order(futures, count if count < cpus else 2 * count)


def _pickled(settings: TokenizeSettings) -> bytes:
    """The settings with the tokenizer itself: no other node needs its files."""
    return pickle.dumps(dataclasses.replace(settings, tokenizer=load_tokenizer(settings.tokenizer)))


# -- Ray Datasets


def tokenize_dataset(
    dataset: Any, settings: TokenizeSettings, *, concurrency: int | None = None, keep: Sequence[str] = ()
) -> Any:
    """A Ray Dataset of conversations as a Ray Dataset of samples, with the columns of `tokenize_files` but `row`.

    `error` is null, or why a row gave no sample; such a row has empty lists. `keep` names columns to copy, such as an
    id. Rows are in order only if the dataset's ``context.execution_options.preserve_order`` is set.
    """
    ray = import_ray()
    RowTokenizer(settings)
    for name in {*settings.output, "error"} & set(keep):
        raise InputError(f"{name!r} cannot be kept: samples have a column of that name")
    return dataset.map_batches(
        tokenize_table,
        fn_args=(_pickled(settings), tuple(keep)),
        batch_size=BATCH_ROWS,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(size=concurrency),
    )


def tokenize_table(batch: Any, settings: bytes, keep: Sequence[str] = ()) -> Any:
    """A table of samples from a table of conversations, with at least one row for each row."""
    rows = [Row(at, None, value, filled=True) for at, value in enumerate(batch.to_pylist())]
    table = tokenize_batch(worker_tokenizer(settings), rows, with_errors=True).table
    for name in keep:
        if name not in batch.column_names:
            raise SampleError(f"{name!r} cannot be kept: the dataset has {', '.join(batch.column_names)}")
        table = table.append_column(name, batch.column(name).take(table.column("row")))
    return table.drop_columns(["row"])
