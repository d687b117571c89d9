"""The same job on a Ray cluster, and rows of Ray Datasets.

`tokenize_on_ray` is `job.tokenize_files` with tasks of Ray as workers: this process reads and writes, they tokenize.
"""

from __future__ import annotations

import dataclasses
import platform
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError, SampleError, TokentraceError
from ..samples.sample import Sample
from .job import BatchResult, Finished, Results, in_order, tokenize_batch, tokenize_files
from .ray_connection import connected, first_line, import_ray
from .rows import BATCH_ROWS, Batch, Row
from .sources import Format, pyarrow
from .tables import Layout, SampleOrigin, samples_table, schema
from .tokenizing import RowResult, RowTokenizer, TokenizeSettings

_RETRIES: Final = 3
"""How often a batch is tried again when a worker died on it."""

_SAME: Final = ("tokentrace", "tokenizer_sha256", "template_sha256", "family")
"""What `RowTokenizer.described` says that has to be the same on all nodes."""


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

    Rows go to the workers and samples come back through Ray, so only this node needs the inputs and the output. All
    nodes need the same version of tokentrace and the same tokenizer, under the same path or hub name. Each worker
    checks that first; a node where it does not hold is a SampleError that names the node.

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
    described = tokenizer.described()
    same = {name: described[name] for name in _SAME}
    node_run = ray.put(NodeRun(uuid.uuid4().hex, _portable(tokenizer.settings), same))
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(tokenize_on_node)
    # where only so many CPUs are there, twice as many tasks keep them busy
    ahead = workers if workers < ray.cluster_resources().get("CPU", 1) else 2 * workers

    def submit(batch: Batch) -> Callable[[], BatchResult]:
        reference = task.remote(batch, node_run)
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
    """The settings with an absolute path of the tokenizer, unless it is a hub name."""
    path = Path(str(settings.tokenizer)).expanduser()
    return dataclasses.replace(settings, tokenizer=str(path.absolute())) if path.exists() else settings


@dataclass(frozen=True, slots=True)
class NodeRun:
    """What a node has to know of a run."""

    id: str
    settings: TokenizeSettings
    same: Mapping[str, Any]
    """What `RowTokenizer.described` says on the node that started the run."""


_TOKENIZERS: Final[dict[str, RowTokenizer]] = {}
"""In a process of a node: the tokenizer of the run that it works for."""


def tokenize_on_node(batch: Batch, run: NodeRun) -> BatchResult | str:
    """Return the result of a batch, or why there is none. Errors are text: not all of them survive pickling."""
    node = f"node {platform.node()}"
    try:
        if run.id not in _TOKENIZERS:
            _TOKENIZERS.clear()
            _TOKENIZERS[run.id] = _checked_tokenizer(run)
        return tokenize_batch(_TOKENIZERS[run.id], batch)
    except TokentraceError as error:
        return f"{node}: {error}"
    except Exception as error:
        return f"{batch}, on {node}: {type(error).__name__}: {' '.join(str(error).split())[:1000]}"


def _checked_tokenizer(run: NodeRun) -> RowTokenizer:
    """Load the tokenizer. Raises SampleError if it is another one than on the node that started the run."""
    tokenizer = RowTokenizer(run.settings)
    described = tokenizer.described()
    for name, value in run.same.items():
        if described[name] != value:
            raise SampleError(
                f"this node has another {name} than the node that started the run: {described[name]!r} instead of "
                f"{value!r}; they must be the same everywhere"
            )
    return tokenizer


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
        batch_size=BATCH_ROWS,
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
            result = self._tokenizer.tokenize(Row(at, None, value), "rows", Format.PARQUET)
            for number, (sample, error) in enumerate(_outcomes(result)):
                samples.append(sample)
                places.append(SampleOrigin("rows", at, number, result.messages))
                errors.append(error)
                origins.append(at)
        table = samples_table(samples, places, self._layout).drop_columns(["row"])
        table = table.append_column("error", pa.array(errors, pa.string()))
        for name in self._keep:
            if name not in batch.column_names:
                raise SampleError(f"{name!r} cannot be kept: the dataset has {', '.join(batch.column_names)}")
            table = table.append_column(name, batch.column(name).take(pa.array(origins, pa.int64())))
        return table


def _outcomes(result: RowResult) -> Iterator[tuple[Sample, str | None]]:
    """The samples of a row with no error, then an empty sample with the error of each problem."""
    for sample in result.samples:
        yield sample, None
    for bad in result.problems:
        empty = np.zeros(0, np.int32)
        nothing = Sample(empty, empty.astype(np.bool_), empty, empty.astype(np.uint8), parts=empty.astype(np.uint8))
        yield nothing, f"{bad.kind}: {bad.reason}"
