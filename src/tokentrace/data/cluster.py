"""The same job on a Ray cluster, and rows of Ray Datasets."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError
from ..samples.sample import Sample
from ..tokens.loading import load_tokenizer
from ..version import __version__
from .job import Finished, Results, in_order, tokenize_files, tokenize_in_worker, worker_tokenizer
from .ray_connection import connected, import_ray
from .rows import BATCH_ROWS, Batch, Row
from .sources import Format, pyarrow
from .tables import Layout, SampleOrigin, samples_table, schema
from .tokenizing import RowTokenizer, TokenizeSettings

_RETRIES: Final = 3
"""How often a batch is tried again when a worker died on it."""


def tokenize_on_ray(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    address: str | None = None,
    **options: Any,
) -> Finished:
    """Run `job.tokenize_files` on a Ray cluster: the same file, byte for byte, and the same file of bad rows.

    Rows, tokenizer and samples travel through Ray: only this node needs the files. All nodes need the same version of
    tokentrace. `workers` is the number of tasks at once, by default that of the CPUs. `address` is ``"auto"`` for the
    cluster of this machine, ``"local"`` for a cluster of its cores for this call; None is the default of
    ``ray.init()``. Uses an existing connection. `options` are those of `tokenize_files`.
    """
    ray = import_ray()
    with connected(ray, address):
        count = workers if workers is not None else int(ray.cluster_resources().get("CPU", 1))
        return tokenize_files(inputs, output, settings, workers=count, run=run_on_ray, **options)


def run_on_ray(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int) -> Results:
    """Tokenize batches as tasks of the cluster that this process is connected to, up to `workers` at once."""
    ray = import_ray()
    settings = ray.put(_portable(tokenizer.settings))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_in_worker)
    # with no more CPUs than workers, twice as many tasks keep them busy
    ahead = workers if workers < ray.cluster_resources().get("CPU", 1) else 2 * workers

    def submit(batch: Batch) -> Future[Any]:
        future: Future[Any] = task.remote(batch, settings, __version__).future()
        return future

    return in_order(batches, submit, ahead, ray.exceptions.RayError)


def _portable(settings: TokenizeSettings) -> TokenizeSettings:
    """The settings with the tokenizer itself instead of its path."""
    return dataclasses.replace(settings, tokenizer=load_tokenizer(settings.tokenizer))


# -- Ray Datasets


def tokenize_dataset(
    dataset: Any, settings: TokenizeSettings, *, concurrency: int | None = None, keep: Sequence[str] = ()
) -> Any:
    """A Ray Dataset of conversations as a Ray Dataset of samples, with the columns of `tokenize_files` but `row`.

    `error` is null, or why a row gave no sample; such a row has empty lists. `keep` names columns to copy, such as an
    id. Rows are in the order of the dataset only if its ``context.execution_options.preserve_order`` is set.
    `concurrency` is the number of tasks at once.
    """
    ray = import_ray()
    RowTokenizer(settings)
    for name in {*schema(Layout(labels=settings.labels)).names, "error"} & set(keep):
        raise InputError(f"{name!r} cannot be kept: samples have a column of that name")
    return dataset.map_batches(
        tokenize_table,
        fn_args=(_portable(settings), tuple(keep)),
        batch_size=BATCH_ROWS,
        batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(size=concurrency),
    )


def tokenize_table(batch: Any, settings: TokenizeSettings, keep: tuple[str, ...] = ()) -> Any:
    """A table of samples from a table of conversations, with at least one row for each row."""
    pa, tokenizer = pyarrow(), worker_tokenizer(settings)
    empty = np.zeros(0, np.int32)
    nothing = Sample(empty, empty.astype(np.bool_), empty, empty.astype(np.uint8), parts=empty.astype(np.uint8))
    samples, places = [], []
    errors: list[str | None] = []
    for at, value in enumerate(batch.to_pylist()):
        result = tokenizer.tokenize(Row(at, None, value), "rows", Format.PARQUET)
        outcomes: list[tuple[Sample, str | None]] = [(sample, None) for sample in result.samples]
        outcomes += [(nothing, f"{bad.kind}: {bad.reason}") for bad in result.problems]
        for number, (sample, error) in enumerate(outcomes):
            samples.append(sample)
            places.append(SampleOrigin("rows", at, number, result.messages))
            errors.append(error)
    table = samples_table(samples, places, Layout(labels=settings.labels)).drop_columns(["row"])
    table = table.append_column("error", pa.array(errors, pa.string()))
    for name in keep:
        if name not in batch.column_names:
            raise SampleError(f"{name!r} cannot be kept: the dataset has {', '.join(batch.column_names)}")
        table = table.append_column(name, batch.column(name).take(pa.array([place.row for place in places])))
    return table
