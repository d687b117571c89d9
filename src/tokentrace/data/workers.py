"""Worker processes for chunks.

A worker holds one end of a pipe, and nobody else does: when the process that began it dies, however it dies, the
pipe ends and the worker goes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Final, cast

from ..errors import SampleError, TokentraceError, WriteError
from .chunks import tokenize_chunk
from .sources import Chunk
from .tokenizing import Counts, RowTokenizer, TokenizeSettings

_AHEAD: Final = 2
"""How many chunks a worker has waiting, so that it never waits itself."""


def run_chunks(
    chunks: Iterable[Chunk], settings: TokenizeSettings, parts: Path, workers: int
) -> Iterator[tuple[Chunk, Counts]]:
    """Tokenize chunks on so many processes (in this one, if it is one); yields each as it is done."""
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
            with contextlib.suppress(BrokenPipeError):  # `take` says that it is gone, and with what
                self.pipe.send(chunk)
            self.waiting.append(chunk)

    def take(self) -> tuple[Chunk, Counts]:
        chunk = self.waiting.pop(0)
        try:
            found = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join()
            rows = f"rows {chunk.first} to {chunk.first + chunk.rows - 1} of {chunk.source.name}"
            raise SampleError(
                f"a worker died ({_how(self.process.exitcode)}) on {rows}, perhaps for want of memory; what is done is "
                "kept: run again to go on, with fewer workers"
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
    """What a worker does: chunks in, counts out, until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the one who began it decides
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
