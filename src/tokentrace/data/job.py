"""The job: files of conversations to one file of samples, on all cores, in bounded memory, and resumable.

The input is planned as chunks (`chunks.plan`). Each chunk becomes a part file, written whole or not at all, by any free
worker; parts are put together in the order of the chunks. So the result depends on the input and the settings alone,
not on the number of workers, and a run that was killed continues where it stopped: part files that are there are kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..errors import InputError, SampleError, WriteError
from ..files import lock, write_whole, writing
from ..settings import flat, instance, whole
from .chunks import Chunk, chunk_size, plan
from .sources import Source, file_digest, find_sources, pyarrow
from .tables import Layout, check_target, named_path, sample_writer
from .tokenizing import Counts, RowTokenizer, TokenizeSettings
from .trainers import Trainer, find_trainer
from .workers import part_file, read_part, run_chunks

MANIFEST: Final = "manifest.json"

_TELL: Final = 64 << 20
"""Bytes of input between two reports while it is hashed: a fraction of a second."""


class Stage(StrEnum):
    """What a run is doing."""

    READING = "reading the input"
    """To tell by its content whether an earlier run had the same input; progress is in bytes."""
    TOKENIZING = "tokenizing"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    counts: Counts
    done: int
    """How much of the sources is done, in the units of `Source.size`."""
    total: int
    resumed: bool = False
    """The chunk was done by an earlier run."""
    stage: Stage = Stage.TOKENIZING


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of a run, and where it is."""

    output: Path
    bad_rows: Path | None
    """The file of bad rows; None where every row gave a sample."""
    counts: Counts
    resumed_chunks: int
    chunks: int
    longest: int
    """The tokens of the longest sample."""


def bad_rows_path(output: Path) -> Path:
    """The file of the bad rows of an output."""
    name = output.name.removesuffix(".gz").removesuffix(".parquet").removesuffix(".jsonl")
    return output.with_name(f"{name}.bad.jsonl")


def parts_path(output: Path) -> Path:
    """Where the parts of an unfinished output are."""
    return output.with_name(output.name + ".parts")


def tokenize_files(
    inputs: Sequence[str],
    output: str | Path,
    settings: TokenizeSettings,
    *,
    workers: int | None = None,
    split: str | None = None,
    overwrite: bool = False,
    restart: bool = False,
    trainer: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    run: Callable[..., Iterable[tuple[Chunk, Counts]]] = run_chunks,
) -> Finished:
    """Tokenize files of conversations into one file of samples: Parquet, or JSON Lines (``.jsonl``, ``.jsonl.gz``).

    With a `trainer` ("trl", "axolotl", …: `data.trainers`) the file has what that trainer reads, and nothing else.

    An existing file is replaced only with `overwrite`, and only if some row gave a sample: otherwise the bad rows are
    written and InputError is raised. An unfinished run with the same input and settings is continued;
    the parts of another run are an InputError, unless `restart` discards them. Rows that give no sample go to the
    file of bad rows, with their line and the reason. `run` works through the chunks: on processes of this machine, or
    on Ray (`data.cluster`). Where the system refuses to write, WriteError names the file and how many rows are safe:
    the same call continues from there.
    """
    pyarrow()
    path = named_path(output)
    target = None if trainer is None else find_trainer(trainer)
    check_target(path, target, overwrite=overwrite)
    instance("settings", settings, TokenizeSettings, SampleError)
    if target is not None and not settings.labels:
        raise InputError(f"{target.title} reads labels: leave them in")
    workers = None if workers is None else whole("workers", workers, least=1, error=SampleError)
    parts = parts_path(path)
    with writing(parts):
        parts.mkdir(exist_ok=True)
    with _held(parts, restart):
        found = find_sources(inputs, parts / "unpacked", split=split)
        tokenizer = RowTokenizer(settings)
        seen = [_seen(source) for source in found]
        sources = _hashed(found, progress)
        listed = [{"name": source.name, "size": source.size, "digest": source.digest} for source in sources]
        described = {**tokenizer.described(), "sources": listed}
        _check_manifest(parts, described)
        work = _Work(parts, settings, sources, described, progress)
        with _safe(work):
            counts = work.run(run, workers or min(available_cores(), work.useful_workers))
            _check_unchanged(sources, seen, parts)
            finished = work.assemble(path, counts, target)
        shutil.rmtree(parts)
    return finished


def available_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _seen(source: Source) -> tuple[int, int]:
    about = os.stat(source.path)
    return about.st_size, about.st_mtime_ns


def _hashed(sources: Sequence[Source], progress: Callable[[Progress], None] | None) -> list[Source]:
    """The sources with the digest of their content. Modification times do not tell whether a file changed."""
    done, total = 0, sum(os.path.getsize(source.path) for source in sources if not source.hashed)

    def more(size: int) -> None:
        nonlocal done
        before, done = done, done + size
        if progress is not None and before // _TELL != done // _TELL:
            progress(Progress(Counts(), done, total, stage=Stage.READING))

    return [replace(source, hashed=source.hashed or file_digest(source.path, more)) for source in sources]


def _check_unchanged(sources: Sequence[Source], seen: Sequence[tuple[int, int]], parts: Path) -> None:
    for source, before in zip(sources, seen, strict=True):
        if _seen(source) != before and file_digest(source.path) != source.digest:
            raise InputError(
                f"{source.name} changed while it was read, and {parts} holds rows of both: restart=True (--restart) "
                "discards it"
            )


@contextlib.contextmanager
def _safe(work: _Work) -> Iterator[None]:
    """Add to a WriteError how many rows are safe."""
    try:
        yield
    except WriteError as error:
        rows = work.counts.rows
        kept = f"{rows:,} row{'' if rows == 1 else 's'} {'is' if rows == 1 else 'are'} safe in {work.parts}"
        said = f"{error.problem}; {kept}: make room and run the same again, it continues from there"
        raise WriteError(said, path=error.path, rows=rows) from error


def _where(source: Source, output: Path) -> str | None:
    """The path of a source, relative to the folder of the output: both may move together."""
    if not source.given:
        return None
    given = os.path.abspath(source.given)
    try:
        return Path(os.path.relpath(given, output.absolute().parent)).as_posix()
    except ValueError:  # on another drive
        return given


@contextlib.contextmanager
def _held(folder: Path, restart: bool) -> Iterator[None]:
    """Hold a folder for this process alone. After an error it is removed if no chunk was done in it."""
    with writing(folder):
        file = (folder / "lock").open("w")
    with file:
        lock(file, f"another run is writing to {folder}: wait for it, or give another output")
        if restart:
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name != "lock":
                    path.unlink()
        try:
            yield
        except BaseException:
            if not any(folder.glob("*.arrow")):
                shutil.rmtree(folder, ignore_errors=True)
            raise


def _check_manifest(parts: Path, described: dict[str, Any]) -> None:
    """Check that parts of an earlier run belong to this job."""
    path = parts / MANIFEST
    now = json.dumps(described, sort_keys=True, ensure_ascii=False, indent=1)
    if path.is_file():
        before = path.read_text(encoding="utf-8")
        if before != now:
            old, new = flat(json.loads(before)), flat(json.loads(now))
            changed = ", ".join(key for key in sorted({*old, *new}) if old.get(key) != new.get(key)) or "something"
            raise InputError(
                f"{parts} is left from an unfinished run with other input or settings ({changed}): restart=True "
                "(--restart) discards it, or give another output"
            )
        return
    with writing(path):
        write_whole(path, now.encode("utf-8"))


class _Work:
    """The state of a run: which chunks are done, and what they came to."""

    def __init__(
        self,
        parts: Path,
        settings: TokenizeSettings,
        sources: Sequence[Source],
        described: dict[str, Any],
        progress: Callable[[Progress], None] | None,
    ) -> None:
        self.parts = parts
        self.settings = settings
        self.sources = sources
        self.described = described
        self.progress = progress
        self.chunks = self.resumed = self.done = 0
        self.counts = Counts()
        self.total = sum(source.size for source in sources)

    @property
    def useful_workers(self) -> int:
        """How many processes are worth starting: a small input is done before a second one is ready."""
        chunks = sum(-(-source.size // chunk_size(source)) for source in self.sources)
        return max(1, chunks // 4)

    def run(self, run: Callable[..., Iterable[tuple[Chunk, Counts]]], workers: int) -> Counts:
        """Work through all chunks that are not done yet."""
        for chunk, counts in run(self._missing(), self.settings, self.parts, workers):
            self._add(chunk.size, counts)
        return self.counts

    def _missing(self) -> Iterator[Chunk]:
        for chunk in plan(self.sources, row_bytes=self.settings.row_bytes):
            self.chunks += 1
            path = part_file(self.parts, chunk.index)
            if path.is_file():
                self.resumed += 1
                self._add(chunk.size, Counts.read(read_part(path, rows=False)[1]["counts"]), resumed=True)
            else:
                yield chunk

    def _add(self, size: int, counts: Counts, *, resumed: bool = False) -> None:
        self.counts.update(counts)
        self.done += size
        if self.progress is not None:
            self.progress(Progress(self.counts, self.done, self.total, resumed))

    def assemble(self, path: Path, counts: Counts, trainer: Trainer | None = None) -> Finished:
        """Put the parts together, in order."""
        if not counts.rows:
            shutil.rmtree(self.parts)
            raise InputError(f"there are no rows in {', '.join(source.name for source in self.sources)}")
        side = bad_rows_path(path)
        draft = side.with_name(side.name + ".unfinished")
        sources = [
            {**row, "path": _where(source, path)}
            for row, source in zip(self.described["sources"], self.sources, strict=True)
        ]
        longest = 0
        metadata = {**self.described, "sources": sources, "counts": counts.described()}
        try:
            with sample_writer(
                path, Layout(labels=self.settings.labels), metadata, trainer=trainer, overwrite=True
            ) as write:
                with writing(side), draft.open("w", encoding="utf-8") as bad_rows:
                    for index in range(self.chunks):
                        table, about = read_part(part_file(self.parts, index))
                        bad_rows.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in about["bad"])
                        longest = max([longest, *table.column("num_tokens").to_pylist()])
                        write(table)
                has_bad = draft.stat().st_size > 0
                if has_bad:
                    os.replace(draft, side)
                else:
                    side.unlink(missing_ok=True)
                if not counts.samples:
                    shutil.rmtree(self.parts)
                    with side.open(encoding="utf-8") as bad_rows:
                        reason = json.loads(bad_rows.readline())["reason"]
                    raise InputError(f"{path} was not written: no row gave a sample ({side} says why; first: {reason})")
        finally:
            draft.unlink(missing_ok=True)
        return Finished(path, side if has_bad else None, counts, self.resumed, self.chunks, longest)
