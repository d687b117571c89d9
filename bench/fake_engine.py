"""A server that speaks vLLM's token protocol and samples nothing, to measure and load the gateway.

    python -m bench.fake_engine --answers '[[40, 41, 2]]' --piece 1 --port 8000

The first line of its output is its address. It returns the answers in turn, encoded once, and counts a prompt's ids
without parsing them, so that 50,000 ids cost very little. One process, plain asyncio, no framework.

Responses have the fields of recorded vLLM 0.32 responses (`tests/engines/recordings`). A prompt of one id with
`max_tokens` 1 is a probe for the kind of logprobs, and gets the response of a model of eight ids.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import time
import zlib
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import lru_cache
from typing import Any

GENERATE = "/inference/v1/generate"
LOGPROB = -0.25
"""The logprob of each sampled id."""
_MODEL_SIZE = 8
_JSON = b"content-type: application/json"
_EVENTS = b"content-type: text/event-stream"


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode("ascii")


_FUNCTION_CALL = {"name": "read_file", "arguments": '{"path": "lib/module.py"}'}
_CHAT_RESPONSE = _json_bytes(
    {
        "id": "chatcmpl-fake",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [
            {
                "index": 0,
                "finish_reason": "tool_calls",
                "message": {
                    "role": "assistant",
                    "content": "Nothing leaks so far.",
                    "tool_calls": [{"id": "call00001", "type": "function", "function": _FUNCTION_CALL}],
                },
            }
        ],
        "usage": {"prompt_tokens": 1, "completion_tokens": 60, "total_tokens": 61},
    }
)
"""The response to every chat."""


@lru_cache(maxsize=4096)
def _choice(ids: tuple[int, ...], alternatives: int, reason: str | None, stop: int | None, total: int) -> bytes:
    """A choice with these ids; `reason` is its finish reason, None if more ids follow."""
    ranks = max(alternatives, 1)
    content = []
    for token_id in ids:
        rows = [{"token_id": token_id, "logprob": LOGPROB, "rank": 1}]
        rows += [{"token_id": token_id + at, "logprob": LOGPROB - 2 - at, "rank": at + 1} for at in range(1, ranks)]
        content.append(rows[0] | {"top_logprobs": rows})
    versions = [{"version": "default", "start": 0, "end": total}] if reason and total else None
    choice = {"index": 0, "finish_reason": reason, "stop_reason": stop, "token_ids": list(ids)}
    choice |= {"routed_experts": None, "sampling_mask": None, "weight_versions": versions}
    return _json_bytes(choice | {"logprobs": {"content": content}})


def _probe_choice(temperature: float, top_k: int) -> bytes:
    """One token of a model whose logits fall by 1 from id to id; its logprob includes temperature and top_k."""
    candidates = _MODEL_SIZE if top_k <= 0 else min(top_k, _MODEL_SIZE)
    best = -math.log(sum(math.exp(-at / (temperature or 1.0)) for at in range(candidates)))
    row = {"token_id": 0, "logprob": best, "rank": 1}
    choice = {"index": 0, "finish_reason": "length", "stop_reason": None, "token_ids": [0]}
    choice |= {"weight_versions": [{"version": "default", "start": 0, "end": 1}]}
    return _json_bytes(choice | {"logprobs": {"content": [row | {"top_logprobs": [row]}]}})


class FakeEngine:
    """The engine's answers, and a log of its requests.

    All requests get the next of `answers`, in turn. `piece` is the number of ids per event of a stream, 0 for all ids.
    `delay` and `first_delay` are seconds before each event and before the first.
    """

    def __init__(
        self,
        answers: Sequence[Sequence[int]],
        *,
        model: str = "fake",
        max_length: int = 1 << 20,
        piece: int = 1,
        delay: float = 0.0,
        first_delay: float = 0.0,
    ) -> None:
        if not answers or not all(answers):
            raise ValueError("give at least one answer, none of them empty")
        self.piece, self.delay, self.first_delay = piece, delay, first_delay
        self.request_log: list[list[float]] = []
        """For each request: the number of prompt ids, the checksum of their JSON text, and the time
        (`time.perf_counter`) at which the first event was sent."""
        self._answers: Iterator[tuple[int, ...]] = itertools.cycle([tuple(answer) for answer in answers])
        self._pages = {
            "/v1/models": _json_bytes({"object": "list", "data": [{"id": model, "max_model_len": max_length}]}),
            "/version": _json_bytes({"version": "0.32.0"}),
            "/health": b"{}",
        }

    def page(self, path: str) -> bytes | None:
        """The body for a GET of a path, None if there is no such path."""
        return _json_bytes(self.request_log) if path == "/asked" else self._pages.get(path)

    def respond(self, body: bytes) -> tuple[bool, list[bytes], bytes]:
        """Whether to stream, the encoded choices, and the fields that follow them, without braces."""
        begin, end = body.index(b"[") + 1, body.index(b"]")
        prompt, count = body[begin - 1 : end + 1], body.count(b",", begin, end) + 1
        request = json.loads(b"{" + body[end + 1 :].lstrip(b", ") if body[end + 1 : end + 2] != b"}" else b"{}")
        params = request.get("sampling_params", {})
        self.request_log.append([count, zlib.crc32(prompt), 0.0])
        max_tokens, alternatives = params.get("max_tokens", 16), params.get("logprobs") or 0
        if count == 1 and max_tokens == 1:
            ids, choices = (0,), [_probe_choice(params.get("temperature", 1.0), params.get("top_k", 0))]
        else:
            answer = next(self._answers)
            ids = answer[:max_tokens]
            reason = "stop" if len(answer) <= max_tokens else "length"
            choices = self._choices(ids, alternatives, reason, request.get("stream") is True)
        usage = b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}' % (
            count,
            count + len(ids),
            len(ids),
        )
        echo = b',"prompt_token_ids":%s' % prompt if request.get("return_token_ids") else b""
        return request.get("stream") is True, choices, usage + echo

    def _choices(self, ids: tuple[int, ...], alternatives: int, reason: str, streamed: bool) -> list[bytes]:
        size = (self.piece if streamed else 0) or len(ids)
        stop = ids[-1] if reason == "stop" else None
        pieces = [ids[at : at + size] for at in range(0, len(ids), size)]
        last = _choice(pieces[-1], alternatives, reason, stop, len(ids))
        return [*(_choice(piece, alternatives, None, None, 0) for piece in pieces[:-1]), last]


class _Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._needed = 0
        """The size of the request in bytes, 0 until its head has arrived."""
        self._head = ""
        self._task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._needed:
            end = self._buffer.find(b"\r\n\r\n")
            if end < 0:
                return
            self._head = self._buffer[:end].decode("latin-1")
            lines = self._head.lower().split("\r\n")
            length = next((int(line[15:]) for line in lines if line.startswith("content-length:")), 0)
            self._needed = end + 4 + length
        if len(self._buffer) < self._needed:
            return
        body = bytes(self._buffer[self._needed - self._length() : self._needed])
        del self._buffer[: self._needed]
        self._needed = 0
        self._request(*self._head.split(" ", 2)[:2], body)

    def _length(self) -> int:
        return self._needed - len(self._head) - 4

    def _request(self, method: str, path: str, body: bytes) -> None:
        if method == "POST" and path == GENERATE:
            try:
                streamed, choices, tail = self._engine.respond(body)
            except (ValueError, AttributeError, TypeError):
                self._answer("400 Bad Request", b'{"error":{"message":"not a request","code":400}}')
                return
            log_entry = self._engine.request_log[-1]
            if streamed or self._engine.first_delay:
                answer = self._stream(choices, tail, log_entry) if streamed else self._late(choices, tail)
                self._task = asyncio.create_task(answer)
                return
            self._answer("200 OK", self._whole(choices, tail))
            return
        if method == "POST" and path == "/v1/chat/completions":  # for proxies without token ids; never streamed
            self._answer("200 OK", _CHAT_RESPONSE)
            return
        page = self._engine.page(path) if method == "GET" else b"{}" if path.endswith("abort_requests") else None
        self._answer("200 OK" if page is not None else "404 Not Found", page or b'{"detail":"Not Found"}')

    def _whole(self, choices: list[bytes], tail: bytes) -> bytes:
        return b'{"request_id":"generate-tokens-fake","output_mode":"tokens","choices":[%s],%s}' % (
            b",".join(choices),
            tail,
        )

    def _answer(self, status: str, body: bytes) -> None:
        self._transport.write(
            b"HTTP/1.1 %s\r\n%s\r\ncontent-length: %d\r\n\r\n" % (status.encode(), _JSON, len(body)) + body
        )

    async def _late(self, choices: list[bytes], tail: bytes) -> None:
        await asyncio.sleep(self._engine.first_delay)
        self._task = None
        self._answer("200 OK", self._whole(choices, tail))

    async def _stream(self, choices: list[bytes], tail: bytes, log_entry: list[float]) -> None:
        engine, usage = self._engine, tail.partition(b',"prompt_token_ids"')
        echo = usage[1] + usage[2]
        head = b"HTTP/1.1 200 OK\r\n%s\r\ntransfer-encoding: chunked\r\n\r\n" % _EVENTS
        self._transport.write(head)
        for at, choice in enumerate(choices):
            pause = engine.delay if at else engine.first_delay or engine.delay
            if pause:
                await asyncio.sleep(pause)
            log_entry[2] = log_entry[2] or time.perf_counter()
            self._event(
                b'{"request_id":"generate-tokens-fake","usage":null%s,"choices":[%s]}' % (b"" if at else echo, choice)
            )
        self._event(b'{"request_id":"generate-tokens-fake",%s,"choices":[]}' % usage[0])
        self._task = None
        self._event(b"[DONE]")
        self._transport.write(b"0\r\n\r\n")

    def _event(self, data: bytes) -> None:
        self._transport.write(b"%x\r\ndata: %s\n\n\r\n" % (len(data) + 8, data))


@asynccontextmanager
async def serving(engine: FakeEngine, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve the engine until the context ends; yields its URL."""
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(engine), host, port)
    try:
        yield f"http://{host}:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def _serve(engine: FakeEngine, host: str, port: int) -> None:
    async with serving(engine, host, port) as url:
        print(url, flush=True)
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=json.loads, default=[[5, 6, 7, 8, 2]], help="a JSON list of lists of ids")
    parser.add_argument("--piece", type=int, default=1, help="ids in an event of a stream; 0 for all")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each event")
    parser.add_argument("--first-delay", type=float, default=0.0, help="seconds before the first")
    parser.add_argument("--max-length", type=int, default=1 << 20)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    engine = FakeEngine(
        options.answers,
        piece=options.piece,
        delay=options.delay,
        first_delay=options.first_delay,
        max_length=options.max_length,
    )
    with suppress(KeyboardInterrupt):
        asyncio.run(_serve(engine, options.host, options.port))


if __name__ == "__main__":
    main()
