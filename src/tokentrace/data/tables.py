"""Samples as tables: a column each for ids, mask and provenance, and metadata that says what made them.

docs/rows.md is the specification of the columns.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from ..errors import InputError, SampleError, WriteError, shown
from ..files import owned, sync, writing
from ..samples.sample import CompletionSpan, Sample
from ..settings import instance, items
from ..tokens.kinds import Kind, Part
from ..trajectory.turns import LogprobKind, VersionSpan
from .lines import LinesWriter, metadata_path, read_line_tables
from .sources import tables

METADATA_KEY: Final = "tokentrace"
"""The key of the file's metadata under which JSON says how the rows were made."""

GROUP_TOKENS: Final = 1 << 20
GROUP_ROWS: Final = 4096
"""A row group is closed when it has so many rows, or tokens."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which columns a file has beside those that all have."""

    labels: bool = False
    parts: bool = True
    logprobs: bool = False
    advantages: bool = False
    rollout: bool = False
    """Reward, versions, completions and branch: rows of trajectories."""

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Layout:
        """The columns that some of the samples fill."""
        return cls(
            parts=any(sample.parts is not None for sample in samples),
            logprobs=any(sample.logprobs is not None for sample in samples),
            advantages=any(sample.advantages is not None for sample in samples),
            rollout=any(sample.branch >= 0 or sample.reward is not None for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a sample comes from: the row of a source, counted from 1, and the how-manieth sample of that row."""

    source: str
    row: int
    sample: int = 0
    messages: int = 0


def schema(layout: Layout) -> Any:
    """The Arrow schema of a file of samples."""
    pa = tables("pyarrow")
    fields = [
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        *([("labels", pa.list_(pa.int32()))] if layout.labels else []),
        ("message_indices", pa.list_(pa.int32())),
        ("kinds", pa.list_(pa.uint8())),
        *([("parts", pa.list_(pa.uint8()))] if layout.parts else []),
        *([("logprobs", pa.list_(pa.float32()))] if layout.logprobs else []),
        *([("advantages", pa.list_(pa.float32()))] if layout.advantages else []),
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
                ("cached_tokens", pa.int32()),
            ]
        )
        fields += [("branch", pa.int32()), ("reward", pa.float64()), ("versions", pa.list_(version))]
        fields.append(("completions", pa.list_(completion)))
    return pa.schema(fields)


def samples_table(
    samples: Sequence[Sample], places: Sequence[Place] | None = None, layout: Layout | None = None
) -> Any:
    """Samples as an Arrow table. Without `places`, they are rows 1, 2, 3… of what their names say."""
    pa = tables("pyarrow")
    layout = layout or Layout.of(samples)
    where = places or [
        Place(sample.name, at, 0, int(sample.messages.max(initial=-1)) + 1) for at, sample in enumerate(samples, 1)
    ]
    offsets = np.zeros(len(samples) + 1, np.int32)
    np.cumsum([len(sample) for sample in samples], out=offsets[1:])

    def lists(name: str, dtype: Any) -> Any:
        arrays = [_filled(sample, name, dtype) for sample in samples]
        flat = np.concatenate(arrays) if arrays else np.zeros(0, dtype)
        missing = np.asarray([getattr(sample, name) is None for sample in samples], np.bool_)
        values = pa.array(flat, from_pandas=False)
        return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(missing) if missing.any() else None)

    columns: dict[str, Any] = {
        "input_ids": lists("ids", np.int32),
        "loss_mask": lists("mask", np.bool_),
        "labels": lists("labels", np.int32) if layout.labels else None,
        "message_indices": lists("messages", np.int32),
        "kinds": lists("kinds", np.uint8),
        "parts": lists("parts", np.uint8) if layout.parts else None,
        "logprobs": lists("logprobs", np.float32) if layout.logprobs else None,
        "advantages": lists("advantages", np.float32) if layout.advantages else None,
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
    made = schema(layout)
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in made}, schema=made)


def _filled(sample: Sample, name: str, dtype: Any) -> Any:
    array = getattr(sample, name)
    return np.zeros(len(sample), dtype) if array is None else np.asarray(array, dtype)


def table_samples(table: Any) -> Iterator[Sample]:
    """The samples of a table that `samples_table` made, or of a batch of its rows."""
    for row in _rows(table):
        yield Sample(
            ids=row["input_ids"].astype(np.int32, copy=False),
            mask=row["loss_mask"].astype(np.bool_, copy=False),
            messages=row["message_indices"].astype(np.int32, copy=False),
            kinds=row["kinds"].astype(np.uint8, copy=False),
            parts=row.get("parts"),
            logprobs=row.get("logprobs"),
            advantages=row.get("advantages"),
            reward=row.get("reward"),
            versions=tuple(
                VersionSpan(json.loads(span["version"]), span["start"], span["stop"])
                for span in row.get("versions") or ()
            ),
            completions=tuple(
                CompletionSpan(**span | {"logprobs_kind": LogprobKind(span["logprobs_kind"])})
                for span in row.get("completions") or ()
            ),
            name=row["source"],
            branch=row.get("branch", -1),
            notes=tuple(row["notes"]),
        )


_ARRAYS: Final = ("input_ids", "loss_mask", "message_indices", "kinds", "parts", "logprobs", "advantages")


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
            if name in _ARRAYS:
                row[name] = value.values.to_numpy(zero_copy_only=False) if value.is_valid else None
            else:
                row[name] = value.as_py()
        yield row


# -- files

_SUFFIXES: Final = (".parquet", ".jsonl", ".jsonl.gz")
"""The names of files of samples end in one of these."""


def check_name(path: Path) -> None:
    """Make sure that a file of samples can have this name: it says how the file is written."""
    if not path.name.endswith(_SUFFIXES):
        raise InputError(f"samples are written to {', '.join(_SUFFIXES)}, and {path.name!r} is none of these")
    if path.is_dir():
        raise InputError(f"{path} is a folder: name a file to write")


class Writer(Protocol):
    """What writes tables of samples to a file that has its name only when it is whole."""

    def write(self, table: Any) -> None: ...

    def close(self) -> None: ...

    def abandon(self) -> None: ...


def sample_writer(path: Path, layout: Layout, metadata: Mapping[str, Any]) -> Writer:
    """The writer for a file of samples, by its name: Parquet, or JSON Lines."""
    check_name(path)
    if path.name.endswith(".parquet"):
        return SampleWriter(path, layout, metadata)
    return LinesWriter(path, _metadata_text(metadata))


def _metadata_text(metadata: Mapping[str, Any]) -> str:
    try:
        return json.dumps({**metadata, **_LEGEND}, sort_keys=True, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"the metadata of a file has to be what JSON can hold: {error}") from error


class SampleWriter:
    """Writes tables of samples to one Parquet file, in row groups that depend on nothing but the rows.

    The file has its name only when it is whole. `more` are Arrow fields that the tables have beside those of the
    layout; a `private` file is for its owner alone.
    """

    def __init__(
        self,
        path: Path,
        layout: Layout,
        metadata: Mapping[str, Any],
        *,
        more: Sequence[Any] = (),
        private: bool = False,
    ) -> None:
        parquet, pa = tables("pyarrow.parquet"), tables("pyarrow")
        self._path = path
        self._unfinished = path.with_name(path.name + ".unfinished")
        made = schema(layout)
        self._schema = pa.schema([*made, *more]).with_metadata({METADATA_KEY: _metadata_text(metadata)})
        try:
            with writing(path):
                if private:
                    self._unfinished.unlink(missing_ok=True)
                    with open(self._unfinished, "xb", opener=owned):  # Parquet's own writer then keeps its mode
                        pass
                self._writer = parquet.ParquetWriter(str(self._unfinished), self._schema, compression="zstd")
        except WriteError:
            self._unfinished.unlink(missing_ok=True)
            raise
        self._pa = pa
        self._waiting: list[Any] = []
        self._rows = self._tokens = 0

    def write(self, table: Any) -> None:
        """Add the rows of a table."""
        lengths = table.column("num_tokens").to_numpy()
        start = 0
        for at, length in enumerate(lengths.tolist()):
            self._rows += 1
            self._tokens += length
            if self._rows >= GROUP_ROWS or self._tokens >= GROUP_TOKENS:
                self._waiting.append(table.slice(start, at + 1 - start))
                self._flush()
                start = at + 1
        if start < table.num_rows:
            self._waiting.append(table.slice(start))

    def _flush(self) -> None:
        if self._waiting:
            group = self._pa.concat_tables(self._waiting).cast(self._schema).combine_chunks()
            with writing(self._path):
                self._writer.write_table(group, row_group_size=max(group.num_rows, 1))
        self._waiting, self._rows, self._tokens = [], 0, 0

    def close(self) -> None:
        """Finish the file, on disk and under its name."""
        self._flush()
        with writing(self._path):
            self._writer.close()
            sync(self._unfinished)
            os.replace(self._unfinished, self._path)

    def abandon(self) -> None:
        """Remove what was written."""
        with contextlib.suppress(OSError):  # what could not be written is thrown away
            self._writer.close()
        self._unfinished.unlink(missing_ok=True)


_LEGEND: Final = {
    "kinds": {str(kind.value): kind.name.lower() for kind in Kind},
    "parts": {str(part.value): part.name.lower() for part in Part},
}


def write_samples(path: str | Path, samples: Iterable[Sample], metadata: Mapping[str, Any] | None = None) -> None:
    """Write samples to a file: Parquet, or JSON Lines if its name ends in ``.jsonl`` or ``.jsonl.gz``.

    Those of trajectories have logprobs, advantages, rewards and versions. WriteError where the system refuses; the
    file has its name only when it is whole.
    """
    rows = items("samples", samples, SampleError)
    for row in rows:
        instance("a sample", row, Sample, SampleError)
    layout = Layout.of(rows)
    held = {} if metadata is None else instance("metadata", metadata, Mapping, SampleError)  # type: ignore[type-abstract]
    writer = sample_writer(named_path(path), layout, held)
    try:
        writer.write(samples_table(rows, layout=layout))
        writer.close()
    except BaseException:
        writer.abandon()
        raise


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of a file that tokentrace wrote, a row group (or some lines) at a time."""
    for table in read_tables(path):
        yield from _placed(table_samples(table), path)


def read_tables(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[Any]:
    """The rows of a file of samples as tables, with these columns or all; InputError where the file has them not."""
    file = named_path(path)
    if not file.name.endswith(".parquet") and file.name.endswith(_SUFFIXES):
        everything = schema(Layout(**dict.fromkeys(Layout.__dataclass_fields__, True)))
        for table in read_line_tables(file, everything):
            _check_columns(table.schema.names, columns, path)
            yield table.select(columns) if columns else table
        return
    parquet = _parquet_file(file)
    _check_columns(parquet.schema_arrow.names, columns, path)
    for group in range(parquet.metadata.num_row_groups):
        with _reading(path):
            table = parquet.read_row_group(group, columns=columns)
        yield table


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How the rows of a file were made: tokenizer, template, settings. Empty where the file does not say."""
    file = named_path(path)
    if file.name.endswith(".parquet"):
        found = (_parquet_file(file).schema_arrow.metadata or {}).get(METADATA_KEY.encode(), b"{}")
    else:
        beside = metadata_path(file)
        try:
            found = beside.read_bytes() if beside.is_file() else b"{}"
        except OSError as error:
            raise InputError(f"{beside} cannot be read: {error.strerror or error}") from error
    try:
        value = json.loads(found)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the metadata of {path} is not valid JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def named_path(given: Any) -> Path:
    """The path that a caller names a file by, or InputError."""
    if not isinstance(given, (str, os.PathLike)) or not Path(given).name or "\0" in str(given):
        raise InputError(f"a file is named by a string or a path, not by {shown(given)}")
    try:
        Path(given).exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{shown(given)} cannot be looked at: {error.args[-1]}") from None
    return Path(given)


def _parquet_file(path: Path) -> Any:
    parquet = tables("pyarrow.parquet")
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "is not there"
        raise InputError(f"{path} {what}: name a file of samples")
    try:
        return parquet.ParquetFile(str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error


def _check_columns(names: Sequence[str], columns: Sequence[str] | None, path: str | Path) -> None:
    for name in columns or ():
        if name not in names:
            raise InputError(f"{path} has no column {name!r}: it was not written by tokentrace")


def _placed(samples: Iterator[Sample], path: str | Path) -> Iterator[Sample]:
    """Samples; what is wrong with a row's values is an InputError with the file."""
    try:
        with _reading(path):
            yield from samples
    except InputError as error:
        if str(path) in error.problem:
            raise
        raise InputError(f"{path}: {error.problem}") from error


@contextlib.contextmanager
def _reading(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SampleError) as error:
        raise InputError(f"{path}: not rows of samples: {error}") from error
