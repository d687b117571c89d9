"""A llama.cpp server for tests: ``python -m tests.live.live MODEL.gguf`` prints its address, serves until stdin ends.

A process of its own: it ends when the test's process does, however that ends, and whatever llama.cpp does in it.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.engines.test_embedded import reference
from tokentrace.engines.llamacpp import COMPLETION
from tokentrace.engines.protocol import SamplingParams
from tokentrace.engines.vllm import COMPLETIONS, GENERATE
from tokentrace.pocket.model import load_pocket

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
    """Lets requests through, and keeps whole answers; a path that is `closed` is answered 403."""

    def __init__(self, closed: str | None = None) -> None:
        self._closed = closed
        self._inner = httpx2.AsyncHTTPTransport()
        self.seen: list[tuple[str, Any, Any]] = []
        """Path, body and answer of each completion."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        if path == self._closed:
            return httpx2.Response(403, json={"detail": "off"})
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            return response
        answer = await response.aread()
        await response.aclose()
        if response.is_success and path in (GENERATE, COMPLETIONS, COMPLETION):
            self.seen.append((path, json.loads(request.content), json.loads(answer)))
        return httpx2.Response(response.status_code, headers=response.headers, content=answer)

    async def aclose(self) -> None:
        await self._inner.aclose()


def expected_logprobs(prompt: Sequence[int], ids: Any, sampling: SamplingParams) -> list[float]:
    """The logprobs of sampled ids under the distribution that `sampling` makes of the NumPy model's."""
    model, row = load_pocket(), [*map(int, prompt), *map(int, ids)]
    (logits,) = model.extend([model.new_cache(len(row))], [row], every=True)
    start = len(prompt)
    return [
        math.log(reference(logits[at - 1], row[:start], row[start:at], sampling)[row[at]])
        for at in range(start, len(row))
    ]


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
