"""The job: files of conversations to one Parquet file, on all cores, in bounded memory, and resumable.

The input is planned as chunks (`sources.plan`). Each chunk becomes a part file, written whole or not at all, by
whoever is free; parts are put together in the order of the chunks. So the result depends on the input and the
settings alone, not on how many worked on it, and a run that was killed goes on where it stopped: what is there of
its parts is taken as it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from ..errors import InputError
from ..files import lock, write_whole
from .chunks import part_file, read_part
from .sources import Chunk, Source, find_sources, plan, tables
from .tables import Layout, SampleWriter
from .tokenizing import Counts, RowTokenizer, TokenizeSettings
from .workers import run_chunks

MANIFEST: Final = "manifest.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a run has come."""

    counts: Counts
    done: int
    """How much of the sources, in the units of `Source.size`."""
    total: int
    resumed: bool = False
    """This much was there already when the run began."""


@dataclass(frozen=True, slots=True)
class Finished:
    """What a run came to, and where it is."""

    output: Path
    bad_rows: Path | None
    """The side file; None where every row gave a sample."""
    counts: Counts
    resumed_chunks: int
    chunks: int


def bad_rows_path(output: Path) -> Path:
    """The side file of an output."""
    return output.with_name(f"{output.name.removesuffix('.parquet')}.bad.jsonl")


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
    progress: Callable[[Progress], None] | None = None,
    run: Callable[..., Iterable[tuple[Chunk, Counts]]] = run_chunks,
) -> Finished:
    """Tokenize files of conversations into one Parquet file of samples.

    A file that is there already is replaced only with `overwrite`. What an earlier run with the same input and
    settings left behind is gone on with; parts of another one are an InputError, unless `restart` discards them.
    Rows that give no sample are in the side file, with their line and the reason. `run` works through the chunks:
    here on processes of this machine, in `data.cluster` on Ray.
    """
    tables("pyarrow")
    path = Path(output)
    if path.exists() and not overwrite:
        raise InputError(f"{path} is there already: give another name, or overwrite it")
    if not path.parent.is_dir():
        raise InputError(f"there is no folder {str(path.parent)!r} to write to")
    parts = parts_path(path)
    parts.mkdir(exist_ok=True)
    with _held(parts, restart):
        sources = find_sources(inputs, parts / "unpacked", split=split)
        tokenizer = RowTokenizer(settings)
        described = {**tokenizer.described(), "sources": [_described(source) for source in sources]}
        _check_manifest(parts, described)
        work = _Work(parts, settings, sources, described, progress)
        counts = work.run(run, workers or min(available_cores(), work.useful_workers))
        finished = work.assemble(path, counts)
        shutil.rmtree(parts)
    return finished


def available_cores() -> int:
    """The cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _described(source: Source) -> dict[str, Any]:
    return {"name": source.name, "size": source.size, "digest": source.digest}


@contextlib.contextmanager
def _held(folder: Path, restart: bool) -> Iterator[None]:
    """Hold a folder for this process alone; it goes if no chunk was done in it. The lock goes with the process."""
    with (folder / "lock").open("w") as file:
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
    """Make sure that parts of an earlier run are of this very job."""
    path = parts / MANIFEST
    now = json.dumps(described, sort_keys=True, ensure_ascii=False, indent=1)
    if path.is_file():
        before = path.read_text(encoding="utf-8")
        if before != now:
            changed = ", ".join(_changed(json.loads(before), described)) or "something"
            raise InputError(
                f"{parts} is left from an unfinished run with other input or settings ({changed}): restart to discard "
                "it, or give another output"
            )
        return
    write_whole(path, now.encode("utf-8"))


def _changed(before: Any, now: Any, place: str = "") -> Iterator[str]:
    """Where two manifests differ."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _changed(before.get(key), now.get(key), f"{place}.{key}" if place else str(key))
    elif before != now:
        yield place


# -- all of them


class _Work:
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
        """How many processes have something to do; a small input is done sooner than a second one has started."""
        chunks = sum(-(-source.size // source.chunk_size) for source in self.sources)
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

    def assemble(self, path: Path, counts: Counts) -> Finished:
        """Put the parts together, in order."""
        if not counts.rows:
            shutil.rmtree(self.parts)
            raise InputError(f"there are no rows in {', '.join(source.name for source in self.sources)}")
        side = bad_rows_path(path)
        draft = side.with_name(side.name + ".unfinished")
        writer = SampleWriter(
            path, Layout(labels=self.settings.labels), {**self.described, "counts": counts.described()}
        )
        try:
            with draft.open("w", encoding="utf-8") as bad_rows:
                for index in range(self.chunks):
                    table, about = read_part(part_file(self.parts, index))
                    _write_lines(bad_rows, about["bad"])
                    writer.write(table)
        except BaseException:
            writer.abandon()
            draft.unlink(missing_ok=True)
            raise
        has_bad = draft.stat().st_size > 0
        if has_bad:
            os.replace(draft, side)
        else:
            draft.unlink()
            side.unlink(missing_ok=True)
        writer.close()
        return Finished(path, side if has_bad else None, counts, self.resumed, self.chunks)


def _write_lines(file: IO[str], rows: Iterable[dict[str, Any]]) -> None:
    for row in rows:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
