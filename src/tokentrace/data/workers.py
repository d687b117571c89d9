"""Workers: what each makes of a chunk, wherever it runs, and processes of this machine that do it.

The samples of a chunk go to a part file, written whole or not at all. A worker process holds one end of a pipe that
nobody else holds: when the process that started it dies, however it dies, the pipe ends and the worker ends too.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, cast

from ..errors import InputError, SampleError, TokentraceError, WriteError
from ..files import write_whole, writing
from .chunks import Chunk, read_rows
from .sources import pyarrow
from .tables import METADATA_KEY, Layout, SampleOrigin, samples_table
from .tokenizing import Counts, RowTokenizer, TokenizeSettings

_AHEAD: Final = 2
"""How many chunks a worker has waiting, so that it never waits itself."""


def part_file(parts: Path, index: int) -> Path:
    """The file with the samples of a chunk; it is there once the chunk is done."""
    return parts / f"{index:08d}.arrow"


def tokenize_chunk(tokenizer: RowTokenizer, chunk: Chunk, parts: Path) -> Counts:
    """Tokenize a chunk into its part file. What every worker does, here and on Ray."""
    pa, ipc = pyarrow(), pyarrow("pyarrow.ipc")
    counts = Counts()
    samples, places, bad = [], [], []
    for row in read_rows(chunk, row_bytes=tokenizer.settings.row_bytes):
        result = tokenizer.tokenize(row, chunk.source.name, chunk.source.format)
        counts.add(result)
        samples += [sample.replace(rendered=None) for sample in result.samples]
        places += [
            SampleOrigin(chunk.source.name, row.number, at, result.messages) for at in range(len(result.samples))
        ]
        bad += [problem.described() for problem in result.problems]
    table = samples_table(samples, places, Layout(labels=tokenizer.settings.labels))
    about = {"counts": counts.described(), "bad": bad, "size": chunk.size}
    table = table.replace_schema_metadata({METADATA_KEY: json.dumps(about)})
    sink = pa.BufferOutputStream()
    with ipc.new_stream(sink, table.schema, options=ipc.IpcWriteOptions(compression="lz4")) as writer:
        writer.write_table(table)
    path = part_file(parts, chunk.index)
    with writing(path):
        write_whole(path, sink.getvalue().to_pybytes())
    return counts


def read_part(path: Path, *, rows: bool = True) -> tuple[Any, dict[str, Any]]:
    """The samples of a part file, if `rows`, and what it says about itself."""
    pa, ipc = pyarrow(), pyarrow("pyarrow.ipc")
    try:
        with pa.memory_map(str(path)) as file:
            reader = ipc.open_stream(file)
            about = json.loads(reader.schema.metadata[METADATA_KEY.encode()])
            return (reader.read_all() if rows else None), about
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} is not a part of a run: {error}; restart=True (--restart) discards what is there"
        ) from error


# -- processes


def run_chunks(
    chunks: Iterable[Chunk], settings: TokenizeSettings, parts: Path, workers: int
) -> Iterator[tuple[Chunk, Counts]]:
    """Tokenize chunks on `workers` processes (in this process if it is 1); yields each chunk when it is done."""
    if workers == 1:
        tokenizer = RowTokenizer(settings)
        for chunk in chunks:
            yield chunk, tokenize_chunk(tokenizer, chunk, parts)
        return
    pool = [_Worker(settings, parts) for _ in range(workers)]
    try:
        yield from _shared_out(iter(chunks), pool)
    finally:
        for worker in pool:
            worker.end()


def _shared_out(chunks: Iterator[Chunk], pool: list[_Worker]) -> Iterator[tuple[Chunk, Counts]]:
    for _ in range(_AHEAD):
        for worker in pool:
            worker.give(next(chunks, None))
    while busy := {worker.pipe: worker for worker in pool if worker.waiting}:
        for pipe in wait(list(busy)):
            worker = busy[cast("Connection[Any, Any]", pipe)]
            yield worker.take()
            worker.give(next(chunks, None))


class _Worker:
    def __init__(self, settings: TokenizeSettings, parts: Path) -> None:
        context = multiprocessing.get_context("spawn")  # threads of encoders and progress bars do not survive a fork
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, settings, parts), daemon=True)
        self.process.start()
        theirs.close()
        self.waiting: list[Chunk] = []

    def give(self, chunk: Chunk | None) -> None:
        if chunk is not None:
            with contextlib.suppress(BrokenPipeError):  # `take` reports that it is gone, and why
                self.pipe.send(chunk)
            self.waiting.append(chunk)

    def take(self) -> tuple[Chunk, Counts]:
        chunk = self.waiting.pop(0)
        try:
            found = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            raise SampleError(
                f"a worker died ({_how(self.process.exitcode)}) on {chunk.described}, perhaps for lack of memory; "
                "what is done is kept: run again, with fewer workers, to continue"
            ) from None
        if isinstance(found, TokentraceError):
            raise found
        return chunk, found

    def end(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _work(pipe: Connection[Any, Any], settings: TokenizeSettings, parts: Path) -> None:
    """The loop of a worker: chunks in, counts out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started it decides
    tokenizer: RowTokenizer | None = None
    while True:
        try:
            chunk = pipe.recv()
        except (EOFError, OSError):
            return
        answer: Any
        try:
            if tokenizer is None:
                tokenizer = RowTokenizer(settings)
            answer = tokenize_chunk(tokenizer, chunk, parts)
        except WriteError as error:
            answer = error
        except Exception as error:
            answer = SampleError(" ".join(str(error).split()) or type(error).__name__)  # errors do not all travel
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            return
