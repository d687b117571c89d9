"""Servers that send too much, or junk, and secrets that must not come to light."""

from __future__ import annotations

import asyncio
import base64
import copy
import functools
import gzip
import json
import logging
import traceback
import zlib
from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from tests.engines.dialects import LLAMACPP, SGLANG, VLLM, VLLM_COMPLETIONS, Dialect, asked
from tests.engines.support import Fake, Reply, recording
from tokentrace.engines import http
from tokentrace.engines.errors import EngineAnswerError, EngineError
from tokentrace.engines.http import Connection, HTTPSettings
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import Capabilities, Completion, SamplingParams, collected
from tokentrace.engines.sglang import SGLangEngine
from tokentrace.engines.vllm import GENERATE, VLLMEngine

TINY = Capabilities("vllm", model="tiny", max_length=4096, vocab_size=1024, streams=True)


def ask(connection: Connection, streamed: bool = False) -> Completion:
    engine = VLLMEngine(connection, TINY, check_echo=False)
    if streamed:
        return asyncio.run(collected(engine.stream([1, 2], SamplingParams(4))))
    return asyncio.run(engine.generate([1, 2], SamplingParams(4)))


# -- too much


def test_an_answer_is_read_up_to_a_limit() -> None:
    pieces = [b" " * 1000] * 100
    fake = Fake().on(GENERATE, Reply(pieces))
    with pytest.raises(EngineAnswerError):
        ask(fake.connection(longest_answer=5000))
    assert len(fake.requests) == 1


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 1000, b"data: x\n" * 200, b"x" * 1000, b": " + b"x" * 1000])
def test_an_event_is_read_up_to_a_limit(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_EVENT_BYTES", 5000)
    fake = Fake().on(GENERATE, Reply([piece] * 100))
    with pytest.raises(EngineAnswerError):
        ask(fake.connection(), streamed=True)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_packed_answers_are_neither_requested_nor_unpacked(streamed: bool, packing: str) -> None:
    body = gzip.compress(zlib.compress(b" " * 10_000_000))
    asked: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        asked.append(request.headers["accept-encoding"])
        stream = Reply([body]).arriving()
        return httpx2.Response(200, headers={"content-encoding": packing}, content=stream)

    settings = HTTPSettings(headers={"Accept-Encoding": "gzip"})
    connection = Connection("http://engine", settings, transport=httpx2.MockTransport(answer))
    with pytest.raises(EngineAnswerError):
        ask(connection, streamed)
    assert asked == ["identity"]


ODD: dict[str, list[Any]] = {
    "longest_answer": [0, -1, "1"],
    "read_timeout": [float("nan")],
    "retries": [-1, 1.5, None],
    "connections": [0],
    "headers": [[("a", "b")], {"a b": "c"}, {"a": "b\r\nc: d"}, {1: "b"}, {"a": None}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values])
def test_odd_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(EngineError):
        HTTPSettings(**{name: value})


# -- junk

DEEP = "[" * 900 + "]" * 900
JUNK = ["1" * 400, "-" + "1" * 400, "-1e400", "NaN", "Infinity", "true", "null", '"x"', "{}", "[]", "1.5", DEEP]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where anything stands in a JSON value; of lists the first."""
    paths = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            paths += places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        paths += places(value[0], (*path, 0))
    return paths


def spoilt(value: Any, path: tuple[Any, ...], junk: str) -> bytes:
    """The value as JSON text with something else at one place."""
    other = copy.deepcopy(value)
    at = other
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = "JUNK"
    return json.dumps(other).replace('"JUNK"', junk).encode()


ADAPTERS = {
    "vllm_generate": VLLM,
    "vllm_completions_ids": VLLM_COMPLETIONS,
    "sglang_generate": SGLANG,
    "llamacpp_completion_eos": LLAMACPP,
}


@pytest.mark.parametrize(("name", "dialect"), ADAPTERS.items(), ids=list(ADAPTERS))
def test_junk_anywhere_in_an_answer_is_a_completion_or_a_typed_error(name: str, dialect: Dialect) -> None:
    answer = recording(name)["response"]
    prompt, params = asked(recording(name))[0], SamplingParams(1000)

    async def run() -> tuple[int, int]:
        plain = await dialect.engine(answer)[0].generate(prompt, params)
        whole, errors = 0, list[str]()
        for place in places(answer):
            for junk in JUNK:
                try:
                    done = await dialect.engine(Reply([spoilt(answer, place, junk)]))[0].generate(prompt, params)
                except EngineError as error:
                    errors.append(str(error))
                else:
                    whole += 1
                    assert done.ids.tolist() == plain.ids.tolist(), (place, junk)
                    assert done.logprobs.tolist() == plain.logprobs.tolist(), (place, junk)
        assert max(map(len, errors)) < 700
        return whole, len(errors)

    whole, errors = asyncio.run(run())
    assert errors > 50
    assert whole, "what nobody reads may be anything"


# -- secrets

CANARY = "sk-canary-7f3a"
ENCODED = base64.b64encode(f"user:{CANARY}".encode()).decode()


def everything(error: BaseException | None) -> str:
    """All that an error says, of itself and of what caused it, with tracebacks."""
    text = ""
    while error is not None:
        text += "".join(traceback.format_exception(error)) + repr(error) + str(error) + repr(error.args)
        error = error.__cause__ or error.__context__
    return text


def no_secret(text: str) -> bool:
    return CANARY not in text and ENCODED not in text


def connections(transport: httpx2.AsyncBaseTransport | None = None, host: str = "engine") -> list[Connection]:
    def one(url: str, **headers: str) -> Connection:
        return Connection(url, HTTPSettings(retries=0, headers=headers), transport=transport)

    return [
        one(f"http://user:{CANARY}@{host}"),
        one(f"http://{host}", Authorization=f"Bearer {CANARY}"),
        one(f"http://{host}", **{"X-Api-Key": CANARY}),
    ]


def echoes(status: int, kind: str) -> Callable[[httpx2.Request], httpx2.Response]:
    """A server that repeats what it was sent, as some do that refuse a key."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = dict(request.headers)
        words = f"wrong key {CANARY} in {headers}"
        texts = {
            "text": words,
            "event": f"data: {json.dumps({'error': {'message': words}})}\n\n",
            "bad event": f"data: {words}\n\n",
            "json": json.dumps({"error": words}),
            "headers": json.dumps({"headers": headers, "data": headers, "choices": headers}),
        }
        return httpx2.Response(status, text=texts[kind])

    return answer


@pytest.mark.parametrize("status", [200, 400, 401, 429, 500])
@pytest.mark.parametrize("kind", ["text", "json", "headers", "event", "bad event"])
def test_no_error_shows_a_secret_that_a_server_repeats(
    status: int, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    for connection in connections(httpx2.MockTransport(echoes(status, kind))):
        asks: list[Callable[[Connection], Any]] = [
            ask,
            functools.partial(ask, streamed=True),
            lambda one: asyncio.run(VLLMEngine.connect(one)),
            lambda one: asyncio.run(SGLangEngine.connect(one, vocab_size=9)),
            lambda one: asyncio.run(LlamaCppEngine.connect(one)),
        ]
        for work in asks:
            with pytest.raises(EngineError) as caught:
                work(connection)
            assert no_secret(everything(caught.value)), everything(caught.value)
    assert no_secret(caplog.text)


WITH_USER = ["engine:port", "engine:99999", "[::1", "", f"engine?key={CANARY}"]
ADDRESSES: list[Any] = [
    *(f"http://user:{CANARY}@{host}" for host in WITH_USER),
    *(f"http://user:{CANARY}/x@engine", f"http://engine/?api_key={CANARY}", f"http://engine/#{CANARY}"),
    *(f"ftp://user:{CANARY}@engine", f"user:{CANARY}@engine", "http://", "", "engine:8000", None, 5, b"http://engine"),
]


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_that_is_none_is_refused_without_its_secrets(url: Any) -> None:
    with pytest.raises(EngineError) as caught:
        Connection(url)
    assert no_secret(everything(caught.value)), everything(caught.value)


def test_no_repr_shows_a_secret() -> None:
    for connection in connections():
        engine = VLLMEngine(connection, TINY)
        shown = [connection, connection.base_url, connection.settings, engine, engine.capabilities, TINY]
        assert no_secret(" ".join([*map(repr, shown), *map(str, shown)]))
    with pytest.raises(EngineError):
        Connection(f"http://user:{CANARY}@engine", HTTPSettings(headers={"authorization": "x"}))
    with pytest.raises(EngineError) as caught:
        HTTPSettings(headers={"Authorization": f"Bearer {CANARY}\n"})
    assert no_secret(everything(caught.value))
