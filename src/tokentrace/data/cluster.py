"""The same job on a Ray cluster, and rows of Ray Datasets."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError, TokentraceError
from ..samples.sample import Sample
from ..tokens.loading import load_tokenizer
from ..version import __version__
from .job import BatchResult, Finished, Results, in_order, tokenize_batch, tokenize_files
from .ray_connection import connected, first_line, import_ray
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

    Rows, the tokenizer and samples travel through Ray, so only this node needs the inputs, the tokenizer's files and
    the output. All nodes need the same version of tokentrace; a node with another raises SampleError that names it.

    `workers` is the number of tasks at once, each on one CPU; by default the number of CPUs of the cluster. `address`
    is that of a cluster: ``"auto"`` for the one this machine is a node of, ``"local"`` for a cluster of this machine's
    cores that lasts as long as the call; None is the default of ``ray.init()``. A program that is connected to Ray
    stays connected, and its connection is used. `options` are those of `tokenize_files`.
    """
    ray = import_ray()
    with connected(ray, address):
        count = workers if workers is not None else int(ray.cluster_resources().get("CPU", 1))
        return tokenize_files(inputs, output, settings, workers=count, run=run_on_ray, **options)


def run_on_ray(batches: Iterator[Batch], tokenizer: RowTokenizer, workers: int) -> Results:
    """Tokenize batches as tasks of the cluster that this process is connected to, up to `workers` at once."""
    ray = import_ray()
    settings = ray.put(_portable(tokenizer.settings))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_on_node)
    # with no more CPUs than workers, twice as many tasks keep them busy
    ahead = workers if workers < ray.cluster_resources().get("CPU", 1) else 2 * workers

    def submit(batch: Batch) -> Callable[[], BatchResult]:
        reference = task.remote(batch, settings, __version__)
        return lambda: _result(ray, reference, batch)

    return in_order(batches, submit, ahead)


def _result(ray: Any, reference: Any, batch: Batch) -> BatchResult:
    try:
        result = ray.get(reference)
    except ray.exceptions.RayError as error:
        problem = "Ray gave up on them, perhaps for lack of memory: run again with fewer workers"
        raise SampleError(f"{batch}: {problem} ({first_line(error)})") from error
    if isinstance(result, BatchResult):
        return result
    raise SampleError(result)


def _portable(settings: TokenizeSettings) -> TokenizeSettings:
    """The settings with the tokenizer itself instead of its path."""
    return dataclasses.replace(settings, tokenizer=load_tokenizer(settings.tokenizer))


def tokenize_on_node(batch: Batch, settings: TokenizeSettings, version: str) -> BatchResult | str:
    """Return the result of a batch, or why there is none. Errors are text: not all of them survive pickling."""
    node = f"node {platform.node()}"
    try:
        if version != __version__:
            return f"{node} has tokentrace {__version__}, the node that started the run has {version}"
        return tokenize_batch(_node_tokenizer(settings), batch)
    except TokentraceError as error:
        return f"{node}: {error}"
    except Exception as error:
        return f"{batch}, on {node}: {type(error).__name__}: {' '.join(str(error).split())[:1000]}"


_TOKENIZERS: Final[dict[str, RowTokenizer]] = {}
"""In a process of a node: the tokenizer of the run that it works for."""


def _node_tokenizer(settings: TokenizeSettings) -> RowTokenizer:
    key = repr((getattr(settings.tokenizer, "digest", settings.tokenizer), settings))
    if key not in _TOKENIZERS:
        _TOKENIZERS.clear()
        _TOKENIZERS[key] = RowTokenizer(settings)
    return _TOKENIZERS[key]


# -- Ray Datasets


def tokenize_dataset(
    dataset: Any, settings: TokenizeSettings, *, concurrency: int | None = None, keep: Sequence[str] = ()
) -> Any:
    """A Ray Dataset of conversations, wherever it was read from, as a Ray Dataset of samples.

    The columns are those of the files that `tokenize_files` writes, without `row`, which a Ray Dataset does not have,
    and with `error`: null, or why a row gave no sample. A row with an error has empty lists. A row that gives several
    samples becomes several rows. `keep` names columns of the dataset to copy, such as an id.

    Nothing runs before the dataset is used. Rows are in the order of the dataset only if the execution options of its
    context say so (``dataset.context.execution_options.preserve_order = True``). `concurrency` is the number of
    tasks at once; by default Ray decides. Raises an error here for settings that cannot be used.
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
    pa, tokenizer = pyarrow(), _node_tokenizer(settings)
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
