"""Servers in their own processes, their CPU time and memory, and a client that needs very little of both."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Server:
    """A server that is running."""

    url: str
    pid: int

    def cpu(self) -> float:
        """Seconds of CPU time of all its threads so far, with nanosecond resolution (Linux only)."""
        tasks = Path(f"/proc/{self.pid}/task")
        return sum(int((tasks / task / "schedstat").read_text().split()[0]) for task in os.listdir(tasks)) / 1e9

    async def wait_idle(self) -> None:
        """Wait until it uses no CPU time: it loads its tokenizer in the background."""
        before, now = -1.0, self.cpu()
        while now - before > 0.005:
            await asyncio.sleep(0.2)
            before, now = now, self.cpu()

    def memory(self) -> int:
        """Resident memory in bytes."""
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.asynccontextmanager
async def running(
    *command: str, url: str | None = None, environment: Mapping[str, str] | None = None, patience: float = 120
) -> AsyncIterator[Server]:
    """Run a server until the context ends. Its first line of output is its URL unless `url` is given."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE if url is None else asyncio.subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
    )
    try:
        async with asyncio.timeout(patience):
            if url is None:
                assert process.stdout is not None
                url = (await process.stdout.readline()).decode().strip()
            while not await _listens(url):
                if process.returncode is not None:
                    raise RuntimeError(f"{command[0]} ended with {process.returncode}")
                await asyncio.sleep(0.1)
        yield Server(url, process.pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(15):
                await process.wait()
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _listens(url: str) -> bool:
    address = urlsplit(url)
    try:
        _, writer = await asyncio.open_connection(address.hostname, address.port)
    except OSError:
        return False
    writer.close()
    return True


def python(module: str, *arguments: str) -> Sequence[str]:
    """The command that runs a module with this Python."""
    return (sys.executable, "-m", module, *arguments)


@dataclass(frozen=True, slots=True)
class Reply:
    """A server's response, with times of `time.perf_counter`, which all processes share."""

    status: int
    body: bytes
    sent: float
    first: float
    """When the first byte of the body arrived."""
    last: float
    """When the last byte of the body arrived."""

    @property
    def seconds(self) -> float:
        """From the request to the end of the response."""
        return self.last - self.sent


class Client:
    """One keep-alive connection: it sends bytes unchanged and reads whole responses."""

    def __init__(self, url: str) -> None:
        self._address = urlsplit(url)
        lines = {"host": self._address.netloc, "content-type": "application/json"}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None

    async def post(self, path: str, body: bytes) -> Reply:
        """Send a body and return the response."""
        return await self._request("POST", path, body)

    async def get(self, path: str) -> Reply:
        return await self._request("GET", path, b"")

    async def _request(self, method: str, path: str, body: bytes) -> Reply:
        if self._writer is None:
            self._reader, self._writer = await asyncio.open_connection(
                self._address.hostname, self._address.port, limit=2**26
            )
        sent = time.perf_counter()
        head = f"{method} {self._address.path}{path} HTTP/1.1\r\n{self._headers}content-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        if "transfer-encoding: chunked" in head:
            first, content = await self._chunks()
        else:
            length = int(head.partition("content-length:")[2].partition("\r\n")[0])
            content = await self._reader.readexactly(length)
            first = time.perf_counter()
        return Reply(int(head.split(" ", 2)[1]), content, sent, first, time.perf_counter())

    async def _chunks(self) -> tuple[float, bytes]:
        first, pieces = 0.0, []
        while True:
            size = int(await self._reader.readuntil(b"\r\n"), 16)
            piece = await self._reader.readexactly(size + 2)
            first = first or time.perf_counter()
            if not size:
                return first, b"".join(pieces)
            pieces.append(piece[:-2])

    def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
