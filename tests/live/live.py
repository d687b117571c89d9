"""A llama.cpp server for tests: ``python -m tests.live.live MODEL.gguf`` prints its address, serves until stdin ends.

A process of its own: it ends when the test's process does, however that ends, and whatever llama.cpp does in it.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

ROOT = Path(__file__).parents[2]
SLOTS = 4
CONTEXT = 1536
"""Tokens of one slot: what `connect` must find out."""
START_SECONDS = 60
WHEELS = {("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"), ("darwin", "x86_64"), ("win32", "AMD64")}
"""Systems for which the index has a wheel of xllamacpp."""


def no_wheel() -> str | None:
    """Why there is no llama.cpp here; None where there has to be one."""
    system = (sys.platform, platform.machine())
    return None if system in WHEELS else f"xllamacpp has no wheel for {' '.join(system)}"


@contextmanager
def llama_server(model: Path, log: Path) -> Iterator[str]:
    """The address of a server of this file."""
    command = [sys.executable, "-m", "tests.live.live", str(model)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        too_slow = threading.Timer(START_SECONDS, process.kill)
        too_slow.start()
        try:
            address = process.stdout.readline().decode().strip()
            too_slow.cancel()
            if not address:
                raise RuntimeError(f"llama.cpp did not start: {log.read_text(errors='replace')[-2000:]}")
            yield address
        finally:
            too_slow.cancel()
            process.stdin.close()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


class Recorder(httpx2.AsyncBaseTransport):
    """Lets requests through to the server, and keeps them with their answers."""

    def __init__(self) -> None:
        self._inner = httpx2.AsyncHTTPTransport()
        self.exchanges: list[tuple[str, Any, Any]] = []
        """Path, body and answer."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        response = await self._inner.handle_async_request(request)
        content = await response.aread()
        await response.aclose()
        body = json.loads(request.content) if request.content else None
        self.exchanges.append((request.url.path, body, json.loads(content)))
        return httpx2.Response(response.status_code, content=content)

    async def aclose(self) -> None:
        await self._inner.aclose()

    def completions(self) -> list[tuple[Any, Any]]:
        """Bodies that asked for a completion, with their answers."""
        return [(body, answer) for path, body, answer in self.exchanges if path == "/completion"]


def serve(model: str) -> None:
    """Float32 throughout, no flash attention, one thread: what the NumPy model is held against."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"]
    params.port = 0  # a free one
    params.n_parallel = SLOTS
    params.n_ctx = SLOTS * CONTEXT
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.n_gpu_layers = 0
    params.cache_ram_mib = 64
    params.warmup = False
    params.ui = False
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    while os.read(sys.stdin.fileno(), 4096):
        pass
    del server  # ends its threads


if __name__ == "__main__":
    serve(sys.argv[1])
