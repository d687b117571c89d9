"""Samples as Parquet: a column each for ids, mask and provenance, and metadata that says what made them.

docs/rows.md is the specification of the columns.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from ..errors import InputError
from ..files import owned, sync
from ..samples.sample import CompletionSpan, Sample
from ..tokens.kinds import Kind, Part
from ..trajectory.turns import LogprobKind, VersionSpan
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
        text = json.dumps({**metadata, **_LEGEND}, sort_keys=True, ensure_ascii=False)
        made = schema(layout)
        self._schema = pa.schema([*made, *more]).with_metadata({METADATA_KEY: text})
        if private:
            self._unfinished.unlink(missing_ok=True)
            with open(self._unfinished, "xb", opener=owned):  # Parquet's own writer then keeps its mode
                pass
        self._writer = parquet.ParquetWriter(str(self._unfinished), self._schema, compression="zstd")
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
            self._writer.write_table(group, row_group_size=max(group.num_rows, 1))
        self._waiting, self._rows, self._tokens = [], 0, 0

    def close(self) -> None:
        """Finish the file, on disk and under its name."""
        self._flush()
        self._writer.close()
        sync(self._unfinished)
        os.replace(self._unfinished, self._path)

    def abandon(self) -> None:
        """Remove what was written."""
        self._writer.close()
        self._unfinished.unlink(missing_ok=True)


_LEGEND: Final = {
    "kinds": {str(kind.value): kind.name.lower() for kind in Kind},
    "parts": {str(part.value): part.name.lower() for part in Part},
}


def write_samples(path: str | Path, samples: Iterable[Sample], metadata: Mapping[str, Any] | None = None) -> None:
    """Write samples to a Parquet file; those of trajectories with logprobs, advantages, rewards and versions."""
    rows = list(samples)
    layout = Layout.of(rows)
    writer = SampleWriter(Path(path), layout, metadata or {})
    try:
        writer.write(samples_table(rows, layout=layout))
    except BaseException:
        writer.abandon()
        raise
    writer.close()


def read_samples(path: str | Path) -> Iterator[Sample]:
    """The samples of a Parquet file, a row group at a time."""
    parquet = tables("pyarrow.parquet")
    try:
        file = parquet.ParquetFile(str(path))
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error
    for group in range(file.metadata.num_row_groups):
        yield from table_samples(file.read_row_group(group))


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How the rows of a file were made: tokenizer, template, settings. Empty where the file does not say."""
    parquet = tables("pyarrow.parquet")
    try:
        found = parquet.read_schema(str(path)).metadata or {}
    except (OSError, ValueError) as error:
        raise InputError(f"{path} is no Parquet file: {error}") from error
    value = json.loads(found.get(METADATA_KEY.encode(), b"{}"))
    return value if isinstance(value, dict) else {}
