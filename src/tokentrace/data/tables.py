"""Samples as tables: columns of ids, mask and provenance, and metadata that says how they were made.

docs/rows.md is the specification of the columns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

from ..errors import InputError, SampleError, brief, kind_of
from ..files import owned, write_whole, writing
from ..samples.sample import CompletionSpan, Sample
from ..settings import instance, items
from ..tokens.kinds import Kind, Part
from ..trajectory.turns import LogprobKind, VersionSpan
from .channel_columns import channel_fields, channel_values, row_channels
from .rows import read_rows
from .sources import Format, Source, parquet_file, pyarrow
from .trainers import Trainer, find_trainer

SUFFIXES: Final = (".parquet", ".jsonl")
"""Names of files of samples end in one of these."""
METADATA_KEY: Final = "tokentrace"
"""The key of the file's metadata: JSON that says how the rows were made."""
GROUP_ROWS: Final = 4096
GROUP_BYTES: Final = 1 << 24
"""A row group is closed when it has this many rows or bytes: about a million tokens."""
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

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Layout:
        """The columns that some of the samples fill."""
        optional = ("parts", "logprobs", "advantages")
        return cls(
            **{name: any(getattr(sample, name) is not None for sample in samples) for name in optional},
            rollout=any(sample.branch >= 0 or sample.reward is not None for sample in samples),
            channels=any(sample.channels for sample in samples),
        )


@dataclass(frozen=True, slots=True)
class SampleOrigin:
    """Where a sample comes from: the row of a source, counted from 1, and which sample of that row, counted from 0."""

    source: str
    row: int
    sample: int = 0
    messages: int | None = None
    """The messages of the conversation. None: those up to the last that has a token."""


def schema(layout: Layout) -> Any:
    """The Arrow schema of a file of samples."""
    pa = pyarrow()
    has = dataclasses.asdict(layout)
    fields = [
        *((name, pa.list_(pa.from_numpy_dtype(kind))) for name, (_, kind) in _PER_TOKEN.items() if has.get(name, True)),
        *((name, pa.int32()) for name in ("num_tokens", "num_trained", "num_messages")),
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
    fields = schema(layout or Layout.of(samples))
    places = places or [SampleOrigin(sample.name, at) for at, sample in enumerate(samples, 1)]
    rows = [_row(sample, place, fields.names) for sample, place in zip(samples, places, strict=True)]
    return pa.Table.from_pylist(rows, schema=fields)


def _row(sample: Sample, place: SampleOrigin, names: Sequence[str]) -> dict[str, Any]:
    values = {
        name: (getattr(sample, attribute), kind) for name, (attribute, kind) in _PER_TOKEN.items() if name in names
    }
    count = int(sample.messages.max(initial=-1)) + 1 if place.messages is None else place.messages
    return {
        **{name: None if value is None else np.asarray(value, kind) for name, (value, kind) in values.items()},
        "num_tokens": len(sample),
        "num_trained": sample.trained,
        "num_messages": count,
        **{name: getattr(place, name) for name in ("source", "row", "sample")},
        **{name: getattr(sample, name) for name in ("notes", "branch", "reward")},
        "versions": [span._asdict() | {"version": json.dumps(span.version)} for span in sample.versions],
        "completions": [span._asdict() | {"logprobs_kind": str(span.logprobs_kind)} for span in sample.completions],
        **(channel_values(sample.channels) if "channels" in names else {}),
    }


def table_samples(table: Any) -> Iterator[Sample]:
    """The samples of a table that `samples_table` made, or of a batch of its rows."""
    columns = {name: table.column(name) for name in table.schema.names}
    for at in range(table.num_rows):
        values = {name: column[at] for name, column in columns.items()}
        yield _sample(
            {
                name: value.values.to_numpy(zero_copy_only=False)
                if name in _PER_TOKEN and value.is_valid
                else value.as_py()
                for name, value in values.items()
            }
        )


def _sample(row: Mapping[str, Any]) -> Sample:
    for needed in ("input_ids", "loss_mask", "message_indices", "kinds", "source", "notes"):
        if needed not in row:
            raise InputError(f"there is no column {needed!r}; the file has {', '.join(map(str, row))}")
    arrays: dict[str, Any] = {
        attribute: np.asarray(row[name], kind)
        for name, (attribute, kind) in _PER_TOKEN.items()
        if row.get(name) is not None and name != "labels"
    }
    versions = [span | {"version": json.loads(span["version"])} for span in row.get("versions") or ()]
    completions = [
        span | {"logprobs_kind": LogprobKind(span["logprobs_kind"])} for span in row.get("completions") or ()
    ]
    return Sample(
        **arrays,
        reward=row.get("reward"),
        versions=tuple(VersionSpan(**span) for span in versions),
        completions=tuple(CompletionSpan(**span) for span in completions),
        channels=row_channels(row),
        name=row["source"],
        branch=row.get("branch", -1),
        notes=tuple(row["notes"]),
    )


# -- files


class TableWriter:
    """Writes tables to an open file in the format that the suffix of `name` says."""

    def __init__(self, name: str, out: IO[bytes], schema: Any) -> None:
        self._out, self._schema = out, schema
        self._pending: list[Any] = []
        self._writer: Any = None
        if name.endswith(".arrow"):
            self._writer = pyarrow("pyarrow.ipc").new_stream(out, schema)
        elif not name.endswith(".jsonl"):
            self._writer = pyarrow("pyarrow.parquet").ParquetWriter(out, schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Write rows. Groups of Parquet and Arrow wait until they are large enough."""
        if self._writer is None:
            self._out.writelines(map(_line, table.to_pylist()))
            return
        self._pending.append(table)
        rows, size = sum(one.num_rows for one in self._pending), sum(one.nbytes for one in self._pending)
        if rows >= GROUP_ROWS or size >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        group = pyarrow().concat_tables(self._pending).cast(self._schema).combine_chunks()
        self._writer.write_table(group, GROUP_ROWS)
        self._pending = []

    def finish(self, metadata: str = "") -> None:
        """Write the end of the file. Only Parquet still accepts metadata here."""
        if self._pending:
            self._flush()
        if metadata and hasattr(self._writer, "add_key_value_metadata"):
            self._writer.add_key_value_metadata({METADATA_KEY: metadata})
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Close everything: the file is useless, or already complete."""
        for one in (self._writer, self._out):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                one.close()


def check_target(path: Path, trainer: Trainer | None = None, *, overwrite: bool = False) -> None:
    """Raise InputError if rows may not be written here: wrong suffix, no folder, an existing file."""
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
        text = json.dumps({**metadata, **_LEGEND}, sort_keys=True, ensure_ascii=False)
        return text.encode().decode()  # a lone surrogate fails here
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"the metadata of a file must be what JSON can hold: {error}") from error


def file_schema(layout: Layout, metadata: Mapping[str, Any], more: Sequence[Any] = ()) -> Any:
    """The Arrow schema of a file, with its metadata and with fields beside those of the layout."""
    return pyarrow().schema([*schema(layout), *more]).with_metadata({METADATA_KEY: _metadata_text(metadata)})


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
    """Write tables of samples to a file, which has its name only after the block, when it is complete.

    Metadata that the block adds is written too. `more` are Arrow fields beside those of the layout; a `private` file is
    for its owner alone; a `trainer` gets the columns that it reads and no others. Raises WriteError.
    """
    check_target(path, trainer, overwrite=True)
    schema = file_schema(layout, metadata, more)
    if trainer is not None:
        schema = trainer.schema(schema)
    draft = draft_path(path)
    with contextlib.ExitStack() as stack:
        stack.callback(draft.unlink, missing_ok=True)
        with writing(path):
            file = open(draft, "wb", opener=owned if private else None)  # noqa: SIM115
            out = TableWriter(path.name, file, schema)
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
            file.close()
            if path.name.endswith(".jsonl"):
                write_whole(metadata_path(path), about.encode())
            os.replace(draft, path)


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
    """Write samples to a file: Parquet or JSON Lines (``.jsonl``). Replaces an existing file when it is complete.

    With a `trainer` ("trl", "axolotl", …) the file has the columns that it reads for supervised training and no others.
    Raises WriteError if the system refuses.
    """
    rows = items("samples", samples, SampleError)
    for row in rows:
        instance("a sample", row, Sample, SampleError)
    layout = Layout.of(rows)
    about = instance("metadata", {} if metadata is None else metadata, Mapping, SampleError)  # type: ignore[type-abstract]
    target = None if trainer is None else find_trainer(trainer)
    with sample_writer(named_path(path), layout, about, trainer=target) as write:
        write(samples_table(rows, layout=layout))


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Read the samples of a file that tokentrace wrote, a row group or a line at a time."""
    file = named_path(path)
    parquet: Any = None if file.name.endswith(".jsonl") else parquet_file(str(file))
    try:
        for group in range(parquet.metadata.num_row_groups if parquet else 0):
            yield from table_samples(parquet.read_row_group(group))
        for row in () if parquet else read_rows(Source("the file", str(file), Format.LINES, 0), row_bytes=1 << 40):
            if row.problem is not None or not isinstance(row.value, dict):
                problem = row.problem or f"a sample is an object, not {kind_of(row.value)}"
                raise InputError(f"line {row.line}: {problem}")
            yield _sample(row.value)
    except InputError as error:
        raise InputError(f"{path}: {error.problem}") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SampleError) as error:
        raise InputError(f"{path}: not rows of samples: {error}") from error


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How the rows of a file were made: tokenizer, template, settings. Empty if the file has no metadata."""
    file = named_path(path)
    if file.name.endswith(".parquet"):
        text = (parquet_file(str(file)).metadata.metadata or {}).get(METADATA_KEY.encode(), b"{}")
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


# -- JSON Lines


def metadata_path(path: Path) -> Path:
    """The file beside a file of lines that says how its rows were made."""
    return path.with_name(path.name + ".metadata")


def _line(row: dict[str, Any]) -> bytes:
    try:
        try:
            text = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except ValueError:  # NaN means that nothing was sampled; JSON has null for that
            text = json.dumps(_without_nan(row), ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise InputError("a row holds an infinite number, which JSON cannot: write it to a .parquet file") from error
    return text.encode() + b"\n"


def _without_nan(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_nan(item) for item in value]
    if isinstance(value, dict):
        return {name: _without_nan(item) for name, item in value.items()}
    return None if isinstance(value, float) and math.isnan(value) else value
