"""Samples as tables: columns of ids, mask and provenance, and metadata that says how they were made.

docs/rows.md is the specification of the columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from ..errors import InputError, SampleError, brief
from ..files import owned, write_whole, writing
from ..samples.sample import CompletionSpan, Sample
from ..settings import instance, items
from ..tokens.kinds import Kind, Part
from ..trajectory.turns import LogprobKind, VersionSpan
from .channel_columns import channel_columns, channel_fields, row_channels
from .sources import parquet_file, pyarrow
from .trainers import Trainer, find_trainer
from .writers import METADATA_KEY, SUFFIXES, metadata_path, read_line_tables, table_writer

_PER_TOKEN: Final[dict[str, tuple[str, Any]]] = {
    "input_ids": ("ids", np.int32),
    "loss_mask": ("mask", np.bool_),
    "labels": ("labels", np.int32),
    "message_indices": ("messages", np.int32),
    "kinds": ("kinds", np.uint8),
    "parts": ("parts", np.uint8),
    "logprobs": ("logprobs", np.float32),
    "advantages": ("advantages", np.float32),
}
"""Columns with an entry for each token: the attribute of a `Sample`, and its type in the file."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns a file has beside those that all have."""

    labels: bool = True
    """What trainers read by that name; without it TRL trains every token of a row."""
    parts: bool = True
    logprobs: bool = False
    advantages: bool = False
    rollout: bool = False
    """Reward, versions, completions and branch: rows of trajectories."""
    channels: bool = False
    """What engines told of tokens beside logprobs."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Layout:
        """The columns that some of the samples fill."""
        return cls(
            parts=any(sample.parts is not None for sample in samples),
            logprobs=any(sample.logprobs is not None for sample in samples),
            advantages=any(sample.advantages is not None for sample in samples),
            rollout=any(sample.branch >= 0 or sample.reward is not None for sample in samples),
            channels=any(sample.channels for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample comes from: the row of a source, counted from 1, and which sample of that row, counted from 0."""

    source: str
    row: int
    sample: int = 0
    messages: int = 0


def schema(layout: Layout) -> Any:
    """The Arrow schema of a file of samples."""
    pa = pyarrow()
    has = dataclasses.asdict(layout)
    fields = [
        *((name, pa.list_(pa.from_numpy_dtype(kind))) for name, (_, kind) in _PER_TOKEN.items() if has.get(name, True)),
        ("num_tokens", pa.int32()),
        ("num_trained", pa.int32()),
        ("num_messages", pa.int32()),
        ("source", pa.string()),
        ("row", pa.int64()),
        ("sample", pa.int32()),
        ("notes", pa.list_(pa.string())),
    ]
    if layout.rollout:
        version = pa.struct([("version", pa.string()), ("start", pa.int32()), ("stop", pa.int32())])
        completion = pa.struct(
            [
                *[("start", pa.int32()), ("stop", pa.int32()), ("logprobs_kind", pa.string())],
                *[("temperature", pa.float64()), ("top_p", pa.float64()), ("top_k", pa.int32())],
                *[("cached_tokens", pa.int32()), ("min_p", pa.float64()), ("presence_penalty", pa.float64())],
                *[("frequency_penalty", pa.float64()), ("repetition_penalty", pa.float64())],
            ]
        )
        fields += [("branch", pa.int32()), ("reward", pa.float64()), ("versions", pa.list_(version))]
        fields.append(("completions", pa.list_(completion)))
    return pa.schema([*fields, *(channel_fields() if layout.channels else ())])


def samples_table(
    samples: Sequence[Sample], places: Sequence[SampleOrigin] | None = None, layout: Layout | None = None
) -> Any:
    """Samples as an Arrow table. Without `places`, they are rows 1, 2, 3… of what their names say."""
    pa = pyarrow()
    layout = layout or Layout.of(samples)
    where = places or [
        SampleOrigin(sample.name, at, 0, int(sample.messages.max(initial=-1)) + 1)
        for at, sample in enumerate(samples, 1)
    ]
    offsets = np.zeros(len(samples) + 1, np.int32)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])

    def lists(name: str, dtype: Any) -> Any:
        arrays = [_filled(sample, name, dtype) for sample in samples]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        missing = np.asarray([getattr(sample, name) is None for sample in samples], np.bool_)
        values = pa.array(flat, from_pandas=False)
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing) if missing.any() else None)

    fields = schema(layout)
    columns: dict[str, Any] = {
        **{name: lists(*about) for name, about in _PER_TOKEN.items() if name in fields.names},
        "num_tokens": np.diff(offsets),
        "num_trained": np.asarray([sample.trained for sample in samples], np.int32),
        "num_messages": np.asarray([place.messages for place in where], np.int32),
        "source": [place.source for place in where],
        "row": [place.row for place in where],
        "sample": [place.sample for place in where],
        "notes": [list(sample.notes) for sample in samples],
        "branch": [sample.branch for sample in samples],
        "reward": [sample.reward for sample in samples],
        "versions": [
            [{"version": json.dumps(span.version), "start": span.start, "stop": span.stop} for span in sample.versions]
            for sample in samples
        ],
        "completions": [
            [span._asdict() | {"logprobs_kind": str(span.logprobs_kind)} for span in sample.completions]
            for sample in samples
        ],
    }
    if layout.channels:
        columns |= channel_columns([(len(sample), sample.channels) for sample in samples])
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in fields}, schema=fields)


def _filled(sample: Sample, name: str, dtype: Any) -> Any:
    array = getattr(sample, name)
    return np.zeros(len(sample), dtype) if array is None else np.asarray(array, dtype)


def table_samples(table: Any) -> Iterator[Sample]:
    """The samples of a table that `samples_table` made, or of a batch of its rows."""
    for row in _rows(table):
        arrays = {
            attribute: row[name].astype(kind, copy=False)
            for name, (attribute, kind) in _PER_TOKEN.items()
            if row.get(name) is not None and name != "labels"
        }
        yield Sample(
            **arrays,
            reward=row.get("reward"),
            versions=tuple(
                VersionSpan(json.loads(span["version"]), span["start"], span["stop"])
                for span in row.get("versions") or ()
            ),
            completions=tuple(
                CompletionSpan(**span | {"logprobs_kind": LogprobKind(span["logprobs_kind"])})
                for span in row.get("completions") or ()
            ),
            channels=row_channels(row),
            name=row["source"],
            branch=row.get("branch", -1),
            notes=tuple(row["notes"]),
        )


def _rows(table: Any) -> Iterator[dict[str, Any]]:
    """Rows as dicts; lists of numbers as arrays."""
    names = list(table.schema.names)
    for needed in ("input_ids", "loss_mask", "message_indices", "kinds", "source", "notes"):
        if needed not in names:
            raise InputError(f"there is no column {needed!r}; the file has {', '.join(map(str, names))}")
    columns = [table.column(name) for name in names]
    for at in range(table.num_rows):
        row: dict[str, Any] = {}
        for name, column in zip(names, columns, strict=True):
            value = column[at]
            if name in _PER_TOKEN:
                row[name] = value.values.to_numpy(zero_copy_only=False) if value.is_valid else None
            else:
                row[name] = value.as_py()
        yield row


# -- files


def check_target(path: Path, trainer: Trainer | None = None, *, overwrite: bool = False) -> None:
    """Check that rows may be written here.

    Raises InputError if the name has another suffix, if the file exists and `overwrite` is not set, or if there is no
    folder for it.
    """
    if not path.name.endswith(SUFFIXES):
        what = "samples are written to" if trainer is None else f"{trainer.title} reads rows from"
        raise InputError(f"{what} {' and '.join(SUFFIXES)} files, and {path.name!r} is neither")
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write")
    if path.exists() and not overwrite:
        raise InputError(f"{path} already exists: give another name, or replace it with --overwrite (overwrite=True)")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {str(path.parent)!r} to write to")


_LEGEND: Final = {
    "kinds": {str(kind.value): kind.name.lower() for kind in Kind},
    "parts": {str(part.value): part.name.lower() for part in Part},
}


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**metadata, **_LEGEND}, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"the metadata of a file must be what JSON can hold: {error}") from error


def file_schema(layout: Layout, metadata: Mapping[str, Any], more: Sequence[Any] = ()) -> Any:
    """The Arrow schema of a file, with its metadata and with fields beside those of the layout."""
    return pyarrow().schema([*schema(layout), *more]).with_metadata({METADATA_KEY: _metadata_text(metadata)})


def is_lines(path: Path) -> bool:
    """True if a file of samples is JSON Lines, by its name."""
    return path.name.endswith(".jsonl")


@contextlib.contextmanager
def sample_writer(
    path: Path,
    layout: Layout,
    metadata: Mapping[str, Any],
    *,
    more: Sequence[Any] = (),
    private: bool = False,
    trainer: Trainer | None = None,
) -> Iterator[Callable[[Any], None]]:
    """Write tables of samples to a file: Parquet or JSON Lines, by its name. Replaces an existing file.

    The file has its name only after the block, when it is complete. Metadata that the block adds is written too. `more`
    are Arrow fields that the tables have beside those of the layout; a `private` file is for its owner alone. For a
    `trainer`, the file has the columns that it reads and no others. Raises WriteError if the system refuses.
    """
    check_target(path, trainer, overwrite=True)
    schema = file_schema(layout, metadata, more)
    if trainer is not None:
        schema = trainer.schema(schema)
    draft = draft_path(path)
    try:
        with contextlib.ExitStack() as stack:
            with writing(path):
                file = open(draft, "wb", opener=owned if private else None)  # noqa: SIM115
                stack.callback(_close, file)
                out = table_writer(path.name, file, schema)
            stack.callback(out.abandon)

            def write(table: Any) -> None:
                with writing(path):
                    out.write(table if trainer is None else trainer.table(table))

            yield write
            about = _metadata_text(metadata)
            with writing(path):
                out.finish(about)
                file.flush()
                os.fsync(file.fileno())
        with writing(path):
            if is_lines(path):
                write_whole(metadata_path(path), about.encode())
            os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _close(file: IO[bytes]) -> None:
    """Close a file. After success it is flushed already; after an error its contents do not matter."""
    with contextlib.suppress(OSError):
        file.close()


def draft_path(path: Path) -> Path:
    """The name of a file until it is complete, different for each run."""
    return path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}.unfinished")


def write_samples(
    path: str | Path,
    samples: Iterable[Sample],
    metadata: Mapping[str, Any] | None = None,
    *,
    trainer: str | None = None,
) -> None:
    """Write samples to a file: Parquet or JSON Lines (``.jsonl``). Replaces an existing file.

    Samples of trajectories have logprobs, advantages, rewards and versions. With a `trainer` ("trl", "axolotl", …) the
    file has the columns that it reads for supervised training and no others. Raises WriteError if the system refuses;
    the file has its name only when it is complete.
    """
    rows = items("samples", samples, SampleError)
    for row in rows:
        instance("a sample", row, Sample, SampleError)
    layout = Layout.of(rows)
    about = {} if metadata is None else instance("metadata", metadata, Mapping, SampleError)  # type: ignore[type-abstract]
    target = None if trainer is None else find_trainer(trainer)
    with sample_writer(named_path(path), layout, about, trainer=target) as write:
        write(samples_table(rows, layout=layout))


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Read the samples of a file that tokentrace wrote, a row group (or some lines) at a time."""
    for table in read_tables(path):
        with _reading(path):
            yield from table_samples(table)


def read_tables(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows of a file of samples as tables, with these columns or all. Raises InputError if one is missing."""
    file = named_path(path)
    if is_lines(file):
        everything = schema(Layout(**dict.fromkeys(Layout.__dataclass_fields__, True)))
        for table in read_line_tables(file, everything):
            _check_columns(table.schema.names, columns, path)
            yield table.select(columns) if columns else table
        return
    parquet = parquet_file(_existing(file))
    _check_columns(parquet.schema_arrow.names, columns, path)
    for group in range(parquet.metadata.num_row_groups):
        with _reading(path):
            table = parquet.read_row_group(group, columns=columns)
        yield table


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How the rows of a file were made: tokenizer, template, settings. Empty if the file has no metadata."""
    file = named_path(path)
    if file.name.endswith(".parquet"):
        text = (parquet_file(_existing(file)).metadata.metadata or {}).get(METADATA_KEY.encode(), b"{}")
    else:
        beside = metadata_path(file)
        try:
            text = beside.read_bytes() if beside.is_file() else b"{}"
        except OSError as error:
            raise InputError(f"{beside} cannot be read: {error.strerror or error}") from error
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the metadata of {path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def named_path(name: Any) -> Path:
    """The path of a file that a caller names. Raises InputError if it cannot be one."""
    if not isinstance(name, (str, os.PathLike)) or not Path(name).name or "\0" in str(name):
        raise InputError(f"a file is named by a string or a path, not by {brief(name)}")
    try:
        Path(name).exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{brief(name)} cannot be read: {error.args[-1]}") from None
    return Path(name)


def _existing(path: Path) -> str:
    pyarrow()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise InputError(f"{path} {what}: name a file of samples")
    return str(path)


def _check_columns(names: Sequence[str], columns: Sequence[str] | None, path: str | Path) -> None:
    for name in columns or ():
        if name not in names:
            raise InputError(f"{path} has no column {name!r}: it was not written by tokentrace")


@contextlib.contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    """Raise InputError with the name of the file if its rows have wrong values."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{path}: {error.problem}") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SampleError) as error:
        raise InputError(f"{path}: not rows of samples: {error}") from error
