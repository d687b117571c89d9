"""Recordings of real engines, and servers that replay them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import numpy as np

from tokentrace.engines.http import Connection, HTTPSettings
from tokentrace.engines.protocol import Completion

RECORDINGS = Path(__file__).parent / "recordings"
URL = "http://engine"


def recording(name: str) -> Any:
    return json.loads((RECORDINGS / f"{name}.json").read_text(encoding="utf-8"))


def answer_bytes(recorded: Any) -> bytes:
    answer = recorded["response"]
    return answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()


@dataclass
class Reply:
    """An answer in pieces; with `breaks_off`, the connection is lost at the end."""

    pieces: list[bytes]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    breaks_off: bool = False

    async def arriving(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece
        if self.breaks_off:
            raise httpx2.ReadError("the peer is gone")


class Model:
    """A server of a model with the same logits after any prompt; reports logprobs in the given mode."""

    def __init__(self, mode: str, logits: Sequence[float], seed: int = 0) -> None:
        self._mode = mode
        self._logits = np.asarray(logits, np.float64)
        self._random = np.random.default_rng(seed)

    def _logprobs(self, temperature: float, top_k: int) -> Any:
        scaled = self._logits / (temperature or 1.0)
        if top_k > 0:
            scaled = np.where(scaled < np.sort(scaled)[-top_k], -np.inf, scaled)
        return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()

    def sample(self, temperature: float, top_k: int) -> tuple[int, Any, list[int]]:
        """The sampled token, the reported logprobs of all tokens, and the tokens by rank."""
        token = int(self._random.choice(len(self._logits), p=np.exp(self._logprobs(temperature, top_k))))
        if temperature == 0:
            token = int(self._logits.argmax())
        reported = {
            "processed": self._logprobs(temperature, top_k),
            "scaled": self._logprobs(temperature, 0),
            "raw": self._logprobs(1.0, 0),
            "logits": self._logits + 20.0,
        }[self._mode]
        return token, reported, np.argsort(-reported, kind="stable").tolist()


def json_reply(value: Any, status: int = 200, **headers: str) -> Reply:
    return Reply([json.dumps(value).encode()], status, {k.replace("_", "-"): v for k, v in headers.items()})


class Fake:
    """A server without a socket. Each path has its answers in order, and the last one repeats."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []
        self.slept: list[float] = []
        self.answers: dict[str, list[Any]] = {}

    def on(self, path: str, *answers: Any) -> Fake:
        """An answer is a `Reply`, an error to raise, a JSON value, or a function of the body that returns one."""
        self.answers[path] = list(answers)
        return self

    async def __call__(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.raw_path.decode()
        body = json.loads(request.content) if request.content else None
        self.requests.append((request.method, path, body))
        queue = self.answers.get(path)
        if queue is None:
            return httpx2.Response(404, json={"detail": "Not Found"})
        answer = queue.pop(0) if len(queue) > 1 else queue[0]
        answer = answer(body) if callable(answer) else answer
        if isinstance(answer, Awaitable):
            answer = await answer
        if isinstance(answer, Exception):
            raise answer
        reply = answer if isinstance(answer, Reply) else json_reply(answer)
        return httpx2.Response(reply.status, headers=reply.headers, content=reply.arriving())

    def bodies(self, path: str) -> list[Any]:
        return [body for _, at, body in self.requests if at == path]

    def connection(self, **settings: Any) -> Connection:
        async def sleep(seconds: float) -> None:
            self.slept.append(seconds)

        return Connection(
            URL, HTTPSettings(**settings), transport=httpx2.MockTransport(self), sleep=sleep, jitter=lambda: 0.0
        )


@asynccontextmanager
async def serving(
    handle: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[str]:
    """Serve on a local socket."""
    async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def http_head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", *lines, "", ""]).encode()


def same(left: Completion, right: Completion) -> bool:
    return (
        np.array_equal(left.ids, right.ids)
        and np.array_equal(left.logprobs, right.logprobs)
        and (left.finish_reason, left.versions, left.cached_tokens)
        == (right.finish_reason, right.versions, right.cached_tokens)
    )


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Split bytes into pieces."""
    edges = [0, *sorted(place % (len(data) + 1) for place in at), len(data)]
    return [data[start:stop] for start, stop in pairwise(edges) if stop > start]
