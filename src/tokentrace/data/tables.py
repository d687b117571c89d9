"""Samples as tables: see docs/rows.md."""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from ..errors import InputError, SampleError, brief, kind_of
from ..files import whole_file, write_whole, writing
from ..samples.sample import CompletionSpan, Sample
from ..settings import instance, items
from ..tokens.kinds import Kind, Part
from ..trajectory.channels import Channel
from ..trajectory.turns import LogprobKind, VersionSpan
from .sources import Format, Source, parquet_file, pyarrow, read_rows
from .trainers import ATTENTION, Trainer, find_trainer

SUFFIXES = (".parquet", ".jsonl")
METADATA_KEY = "tokentrace"
GROUP_BYTES = 1 << 24
"""The size of a row group: about a million tokens."""

Columns = Mapping[str, Any]
_PER_TOKEN = {
    "input_ids": ("ids", "int32"),
    "loss_mask": ("mask", "bool_"),
    "labels": ("labels", "int32"),
    "message_indices": ("messages", "int32"),
    "kinds": ("kinds", "uint8"),
    "parts": ("parts", "uint8"),
    "logprobs": ("logprobs", "float32"),
    "advantages": ("advantages", "float32"),
}
ROLLOUT: Columns = {
    "branch": "int32",
    "reward": "float64",
    "versions": [{"version": "string", "start": "int32", "stop": "int32"}],
    "completions": [
        {
            **dict.fromkeys(CompletionSpan._fields, "float64"),
            **dict.fromkeys(("start", "stop", "top_k", "cached_tokens"), "int32"),
            "logprobs_kind": "string",
        }
    ],
}
CHANNELS: Columns = {
    "top_logprobs": [[{"id": "int32", "logprob": "float32"}]],
    "routed_experts": [[["int32"]]],
    "channels": "string",
}
_COLUMNS: Columns = {
    **{name: [kind] for name, (_, kind) in _PER_TOKEN.items()},
    **dict.fromkeys(("num_tokens", "num_trained", "num_messages"), "int32"),
    **{"source": "string", "row": "int64", "sample": "int32", "notes": ["string"]},
    **ROLLOUT,
    **CHANNELS,
}
_OPTIONAL = {"labels", "parts", "logprobs", "advantages", *ROLLOUT, *CHANNELS}
"""Columns that not all files have. Without labels, TRL trains every token."""


def sample_columns(*optional: str) -> Columns:
    """The columns that all files have, and some optional ones."""
    return {name: kind for name, kind in _COLUMNS.items() if name not in _OPTIONAL or name in optional}


def _columns_of(samples: Sequence[Sample]) -> Columns:
    optional = ["labels"]
    for name in ("parts", "logprobs", "advantages"):
        optional += [name] if any(getattr(one, name) is not None for one in samples) else []
    optional += ROLLOUT if any(one.branch >= 0 or one.reward is not None for one in samples) else ()
    return sample_columns(*optional, *(CHANNELS if any(one.channels for one in samples) else ()))


def arrow_schema(columns: Columns) -> Any:
    return pyarrow().schema([(name, _arrow_type(kind)) for name, kind in columns.items()])


def _arrow_type(kind: Any) -> Any:
    pa = pyarrow()
    if isinstance(kind, list):
        return pa.list_(_arrow_type(kind[0]))
    return pa.struct(list(arrow_schema(kind))) if isinstance(kind, dict) else getattr(pa, kind)()


def samples_table(
    samples: Sequence[Sample],
    columns: Columns | None = None,
    places: Iterable[Mapping[str, Any]] | None = None,
) -> Any:
    """An Arrow table. `places` adds values, such as their row."""
    columns = columns or _columns_of(samples)
    places = places or ({"row": at} for at in range(1, len(samples) + 1))
    rows = [{**_row(sample, columns), **place} for sample, place in zip(samples, places, strict=True)]
    return pyarrow().Table.from_pylist(rows, schema=arrow_schema(columns))


def _row(sample: Sample, columns: Columns) -> dict[str, Any]:
    return {
        **{
            name: None if (value := getattr(sample, attribute)) is None else np.asarray(value, kind)
            for name, (attribute, kind) in _PER_TOKEN.items()
            if name in columns
        },
        "num_tokens": len(sample),
        "num_trained": sample.trained,
        "num_messages": int(sample.messages.max(initial=-1)) + 1,
        "source": sample.name,
        "sample": 0,
        **{name: getattr(sample, name) for name in ("notes", "branch", "reward")},
        "versions": [one._asdict() | {"version": json.dumps(one.version)} for one in sample.versions],
        "completions": [one._asdict() for one in sample.completions],
        **(channel_values(sample.channels) if "channels" in columns else {}),
    }


_SHAPES: Mapping[str, Callable[[Any], Any]] = {
    "top_logprobs": lambda entry: entry and [{"id": id, "logprob": logprob} for id, logprob in entry],
    "routed_experts": lambda entry: entry if not entry or isinstance(entry[0], list) else [entry],
}


def channel_values(channels: Mapping[str, Channel]) -> dict[str, Any]:
    """The columns of channels. Tokens without a value are null."""
    values = {
        name: [entry.tolist() if isinstance(entry, np.ndarray) else entry for entry in channel.entries()]
        for name, channel in channels.items()
    }
    columns: dict[str, Any] = dict.fromkeys(CHANNELS)
    for name in values.keys() & _SHAPES.keys():
        # entries that do not fit stay JSON
        with contextlib.suppress(TypeError, ValueError, KeyError, IndexError, OverflowError):
            entries = list(map(_SHAPES[name], values[name]))
            pyarrow().array(entries, _arrow_type(CHANNELS[name][0]))
            columns[name] = entries
            del values[name]
    if values:
        try:
            text = json.dumps(values, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            columns["channels"] = text
        except ValueError as error:
            raise SampleError(f"channels {sorted(values)} cannot be written as JSON: {error}") from error
    return columns


def _row_channels(row: Mapping[str, Any]) -> dict[str, Channel]:
    channels = json.loads(row["channels"]) if row.get("channels") else {}
    if not isinstance(channels, dict) or not all(isinstance(one, list) for one in channels.values()):
        raise InputError(f"channels must be lists of entries by name, not {brief(channels)}")
    if row.get("routed_experts") is not None:
        channels["routed_experts"] = row["routed_experts"]
    if (top := row.get("top_logprobs")) is not None:
        pairs = (entry and [[one["id"], one["logprob"]] for one in entry] for entry in top)
        channels["top_logprobs"] = list(pairs)
    return {name: Channel.of(entries) for name, entries in channels.items()}


def table_samples(table: Any) -> Iterator[Sample]:
    """Yield the samples of a table or a batch."""
    for at in range(table.num_rows):
        yield _sample({name: _plain(name, table.column(name)[at]) for name in table.schema.names})


def _plain(column: str, scalar: Any) -> Any:
    if column in _PER_TOKEN and scalar.is_valid:
        return scalar.values.to_numpy(zero_copy_only=False)
    return scalar.as_py()


def _sample(row: Mapping[str, Any]) -> Sample:
    for needed in ("input_ids", "loss_mask", "message_indices", "kinds", "source", "notes"):
        if needed not in row:
            raise InputError(f"there is no column {needed!r}; the file has {', '.join(map(str, row))}")
    arrays: dict[str, Any] = {
        attribute: np.asarray(row[name], kind)
        for name, (attribute, kind) in _PER_TOKEN.items()
        if row.get(name) is not None and name != "labels"
    }
    versions = [{**one, "version": json.loads(one["version"])} for one in row.get("versions") or ()]
    spans = [CompletionSpan(**one) for one in row.get("completions") or ()]
    completions = [span._replace(logprobs_kind=LogprobKind(span.logprobs_kind)) for span in spans]
    return Sample(
        **arrays,
        reward=row.get("reward"),
        versions=tuple(VersionSpan(**one) for one in versions),
        completions=tuple(completions),
        channels=_row_channels(row),
        name=row["source"],
        branch=row.get("branch", -1),
        notes=tuple(row["notes"]),
    )


class TableWriter:
    """Writes tables to an open file, in the format of `name`'s suffix."""

    def __init__(self, name: str, out: IO[bytes], columns: Columns) -> None:
        self._out = out
        self._schema = schema = arrow_schema(columns).with_metadata({METADATA_KEY: metadata_text({})})
        self._pending: list[Any] = []
        self._writer: Any = None
        if name.endswith(".arrow"):
            self._writer = pyarrow("pyarrow.ipc").new_stream(out, schema)
        elif not name.endswith(".jsonl"):
            self._writer = pyarrow("pyarrow.parquet").ParquetWriter(out, schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Write rows. Parquet and Arrow collect them for a group."""
        if self._writer is None:
            self._out.writelines(_lines(table))
            return
        self._pending.append(table)
        if sum(one.nbytes for one in self._pending) >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        self._writer.write_table(pyarrow().concat_tables(self._pending).cast(self._schema).combine_chunks())
        self._pending = []

    def close(self, metadata: bytes = b"") -> None:
        """Write the end of the file. Only Parquet accepts metadata here."""
        if self._pending:
            self._flush()
        if metadata and hasattr(self._writer, "add_key_value_metadata"):
            self._writer.add_key_value_metadata({METADATA_KEY: metadata})
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        """Close the writer: the file is useless, or complete."""
        with contextlib.suppress(OSError, ValueError, AttributeError):
            self._writer.close()


_LEGEND = {
    "kinds": {str(kind.value): kind.name.lower() for kind in Kind},
    "parts": {str(part.value): part.name.lower() for part in Part},
}


def metadata_text(metadata: Mapping[str, Any]) -> bytes:
    """A file's metadata as JSON, with a legend of numbers."""
    try:
        return json.dumps(
            {**metadata, **_LEGEND}, sort_keys=True, ensure_ascii=False, allow_nan=False
        ).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise SampleError(f"metadata must be JSON values: {error}") from error


def target_path(name: Any, trainer: Trainer | None = None, *, overwrite: bool = False) -> Path:
    """The path of a file of rows. Raises InputError if it cannot be written."""
    path = named_path(name)
    if not path.name.endswith(SUFFIXES):
        what = "samples are written to" if trainer is None else f"{trainer.title} reads rows from"
        raise InputError(f"{what} {' and '.join(SUFFIXES)} files, and {path.name!r} is neither")
    if path.is_dir() or (path.exists() and not overwrite):
        raise InputError(f"{path} already exists: name another file, or replace it with --overwrite")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {str(path.parent)!r} to write to")
    return path


@contextlib.contextmanager
def sample_writer(
    path: Path,
    columns: Columns,
    metadata: Mapping[str, Any],
    *,
    private: bool = False,
    trainer: Trainer | None = None,
) -> Iterator[Callable[[Any], None]]:
    """Write tables to a file that is named when the block succeeds."""
    if trainer is not None:
        if "labels" not in columns:
            raise InputError(f"{trainer.title} reads labels: leave them in")
        columns = {name: columns.get(name, ["int8"]) for name in trainer.columns}
    with contextlib.ExitStack() as stack:
        with writing(path):
            file = stack.enter_context(whole_file(path, private=private))
            out = TableWriter(path.name, file, columns)
        stack.callback(out.abandon)

        def write(table: Any) -> None:
            if ATTENTION in columns:
                ones = [np.ones(length, np.int8) for length in table.column("num_tokens").to_pylist()]
                table = table.append_column(ATTENTION, pyarrow().array(ones))
            with writing(path):
                out.write(table.select(list(columns)))

        yield write
        about = metadata_text(metadata)
        with writing(path):
            out.close(about)
            if path.name.endswith(".jsonl"):
                write_whole(metadata_path(path), about, private=private)
            stack.pop_all().close()


def write_samples(
    path: str | Path,
    samples: Iterable[Sample],
    metadata: Mapping[str, Any] | None = None,
    *,
    trainer: str | None = None,
) -> None:
    """Write samples to Parquet or JSON Lines, with only the columns that `trainer` reads."""
    rows = items("samples", samples, SampleError)
    for row in rows:
        instance("a sample", row, Sample, SampleError)
    reader, about = find_trainer(trainer), {} if metadata is None else metadata
    file = target_path(path, reader, overwrite=True)
    with sample_writer(file, _columns_of(rows), about, trainer=reader) as write:
        write(samples_table(rows))


def read_samples(path: str | Path) -> Iterator[Sample]:
    """Read the samples of a file that tokentrace wrote, a row group or a line at a time."""
    file = named_path(path)
    parquet = None if file.name.endswith(".jsonl") else parquet_file(str(file))
    try:
        if parquet is not None:
            for batch in parquet.iter_batches(256):
                yield from table_samples(batch)
            return
        for row in read_rows(Source("the file", str(file), Format.LINES, 0)):
            if row.problem is not None or not isinstance(row.value, dict):
                problem = row.problem or f"a sample is an object, not {kind_of(row.value)}"
                raise InputError(f"line {row.line}: {problem}")
            yield _sample(row.value)
    except InputError as error:
        raise InputError(f"{path}: {error.problem}") from error
    except (OSError, ValueError, TypeError, AttributeError, KeyError, SampleError) as error:
        raise InputError(f"{path}: not rows of samples: {error}") from error


def read_metadata(path: str | Path) -> dict[str, Any]:
    """How the rows of a file were made; empty if not recorded."""
    file, text = named_path(path), b"{}"
    try:
        if file.name.endswith(".parquet"):
            text = (parquet_file(str(file)).metadata.metadata or {}).get(METADATA_KEY.encode(), text)
        elif metadata_path(file).is_file():
            text = metadata_path(file).read_bytes()
        value = json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"the metadata of {path} cannot be read: {error}") from error
    return value if isinstance(value, dict) else {}


def named_path(name: Any) -> Path:
    """The path that a caller names. Raises InputError if it is invalid."""
    if not isinstance(name, (str, os.PathLike)) or not Path(name).name or "\0" in str(name):
        raise InputError(f"a file name must be a string or a path, not {brief(name)}")
    try:
        Path(name).exists()
    except (OSError, ValueError) as error:
        raise InputError(f"{brief(name)} cannot be read: {error.args[-1]}") from None
    return Path(name)


def metadata_path(path: Path) -> Path:
    return path.with_name(path.name + ".metadata")


_LINE_ENDS = {ord(one): f"\\u{ord(one):04x}" for one in "\x85\u2028\u2029"}


def _lines(table: Any) -> Iterator[bytes]:
    """Yield rows as JSON. NaN, for what was not sampled, becomes null."""
    for row in table.to_pylist():
        for name in {"logprobs", "advantages"} & row.keys():
            row[name] = row[name] and [None if math.isnan(value) else value for value in row[name]]
        try:  # some readers take these characters for line ends
            line = json.dumps(row, ensure_ascii=False, allow_nan=False)
        except ValueError:
            raise InputError("JSON has no infinite numbers: write a .parquet file") from None
        yield line.translate(_LINE_ENDS).encode() + b"\n"
