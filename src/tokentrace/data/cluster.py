"""The same job on a Ray cluster, and rows of Ray Datasets."""

import contextlib
import dataclasses
import logging
import os
import pickle
import platform
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, SampleError
from ..tokens.loading import load_tokenizer
from ..version import __version__
from . import job
from .sources import BATCH_ROWS, Batch, Row, pyarrow
from .tokenizing import RowTokenizer, TokenizeSettings

_RETRIES: Final = 3
"""How often a batch is tried again when a worker died on it."""


def import_ray() -> Any:
    """Ray with its datasets. Raises InputError that says what to install."""
    pyarrow()
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("work on clusters needs Ray: install tokentrace[ray]") from None
    except Exception as error:  # a broken installation
        raise InputError(f"Ray is installed and cannot be imported: {job.first_line(error)}") from error
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
        raise InputError(f"there is no Ray{at}: {job.first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def tokenize_on_ray(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    address: str | None = None,
    **options: Any,
) -> job.Finished:
    """Run `job.tokenize_files` on a Ray cluster: the same files, byte for byte. Only this node needs the inputs.

    `workers` is the number of tasks at once, by default that of the CPUs. `address` is ``"auto"`` for the cluster of
    this machine, ``"local"`` for a cluster of its cores for this call; None is the default of ``ray.init()``. Uses an
    existing connection. `options` are those of `tokenize_files`.
    """
    ray = import_ray()
    with connected(ray, address):
        count = workers if workers is not None else int(ray.cluster_resources().get("CPU", 1))
        return job.tokenize_files(inputs, output, settings, workers=count, run=run_on_ray, **options)


def run_on_ray(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int) -> job.Results:
    """Tokenize batches as tasks of the connected cluster."""
    ray = import_ray()
    settings = ray.put(_pickled(tokenizer.settings))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_on_node)
    # with no more CPUs than workers, twice as many tasks keep them busy
    ahead = workers if workers < ray.cluster_resources().get("CPU", 1) else 2 * workers
    futures = ((batch, task.remote(batch.rows, settings, __version__).future()) for batch in batches)
    return job.in_order(futures, ahead)


def tokenize_on_node(rows: Sequence[Row], settings: bytes, version: str) -> job.BatchResult:
    """Tokenize rows. Raises SampleError if the node has another version."""
    if version != __version__:
        node = f"node {platform.node()} has tokentrace {__version__}"
        raise SampleError(f"{node}, the node that started the run has {version}")
    return job.tokenize_in_worker(rows, settings)


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
    table = job.tokenize_batch(job.worker_tokenizer(settings), rows, with_errors=True).table
    for name in keep:
        if name not in batch.column_names:
            raise SampleError(f"{name!r} cannot be kept: the dataset has {', '.join(batch.column_names)}")
        table = table.append_column(name, batch.column(name).take(table.column("row")))
    return table.drop_columns(["row"])
