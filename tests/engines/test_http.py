"""HTTP: retries after faults, servers that send too much or junk, and secrets that are never shown."""

import asyncio
import base64
import copy
import gzip
import json
import logging
import traceback
import zlib
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.dialects import LLAMACPP, SGLANG, VLLM, VLLM_COMPLETIONS, Dialect, inputs
from tests.engines.support import Fake, Reply, answer_bytes, cut, http_head, json_reply, recording, serving
from tests.loop import in_loop
from tokentrace.engines import http
from tokentrace.engines.errors import EngineAnswerError, EngineError, EngineRefusal, EngineUnavailable
from tokentrace.engines.http import Connection, EventReader, HTTPSettings
from tokentrace.engines.llamacpp import LlamaCppEngine
from tokentrace.engines.protocol import Capabilities, SamplingParams, collected
from tokentrace.engines.routing import Router
from tokentrace.engines.sglang import GENERATE, SGLangEngine
from tokentrace.engines.vllm import VLLMEngine

WHOLE = recording("sglang_generate")
STREAM = recording("sglang_generate_stream")
TINY = Capabilities("sglang", max_length=4096, vocab_size=1024)
LOST = [
    httpx2.ConnectError("refused"),
    httpx2.ConnectTimeout("slow"),
    httpx2.ReadError("reset"),
    httpx2.WriteError("reset"),
]


def generate(connection: Connection) -> Any:
    body = WHOLE["request"]["json"]
    return asyncio.run(SGLangEngine(connection, TINY).generate(body["input_ids"], SamplingParams(6)))


def stream(connection: Connection) -> Any:
    body = STREAM["request"]["json"]
    engine = SGLangEngine(connection, TINY)
    return asyncio.run(collected(engine.stream(body["input_ids"], SamplingParams(3, temperature=0))))


BOTH = [(generate, WHOLE, [477, 506, 317, 511, 226, 510]), (stream, STREAM, [131, 915, 915])]


# -- retries


@pytest.mark.parametrize(("ask", "recorded", "ids"), BOTH)
@pytest.mark.parametrize(
    "fault",
    [
        *LOST,
        httpx2.RemoteProtocolError("server disconnected"),
        json_reply({"error": "oops"}, 500),
        json_reply({"error": "overloaded"}, 503),
        json_reply({"error": "slow down"}, 429),
        Reply([], breaks_off=True),
        Reply([b"half an err"], 500, breaks_off=True),
    ],
)
def test_requests_that_were_not_accepted_are_retried(ask: Any, recorded: Any, ids: list[int], fault: Any) -> None:
    fake = Fake().on(GENERATE, fault, fault, Reply([answer_bytes(recorded)]))
    assert ask(fake.connection()).ids.tolist() == ids
    assert len(fake.requests) == 3
    assert fake.requests[0] == fake.requests[1] == fake.requests[2]
    assert fake.slept == [0.5, 1.0]


@pytest.mark.parametrize(("ask", "recorded", "ids"), BOTH)
def test_retries_are_limited(ask: Any, recorded: Any, ids: list[int]) -> None:
    fake = Fake().on(GENERATE, json_reply({"error": {"message": "the\n engine   is dead"}}, 500))
    with pytest.raises(EngineUnavailable):
        ask(fake.connection(retries=3))
    assert len(fake.requests) == 4
    assert fake.slept == [0.5, 1.0, 2.0]


def test_retry_after_is_waited_for() -> None:
    for value, least in [("7", 7.0), ("soon", 0.5), ("0", 0.5)]:
        fake = Fake().on("/x", json_reply({}, 429, retry_after=value), {"ok": 1})
        assert asyncio.run(fake.connection().get("/x")) == {"ok": 1}
        assert least <= fake.slept[0] <= least + 10
    fake = Fake().on("/x", json_reply({"error": "busy"}, 429, retry_after="3600"), {"ok": 1})
    with pytest.raises(EngineUnavailable):
        asyncio.run(fake.connection().get("/x"))
    assert (len(fake.requests), fake.slept) == (1, [])


# -- no retries


@pytest.mark.parametrize(
    ("answer", "error"),
    [(Reply([answer_bytes(WHOLE)[:200]], breaks_off=True), EngineError), (Reply([b" " * 999] * 99), EngineAnswerError)],
    ids=["broke off", "too long"],
)
def test_an_answer_that_breaks_off_or_is_too_long_is_not_retried(answer: Reply, error: Any) -> None:
    fake = Fake().on(GENERATE, answer)
    with pytest.raises(error) as caught:
        generate(fake.connection(longest_answer=5000))
    assert not isinstance(caught.value, EngineUnavailable)
    assert (len(fake.requests), fake.slept) == (1, [])


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10_000), places=st.lists(st.integers(0, 10_000), max_size=5))
def test_a_stream_that_breaks_off_anywhere(at: int, places: list[int]) -> None:
    """It is retried only before the first token; after the last token, the completion is whole."""
    data = answer_bytes(STREAM)
    head = data[: at % (len(data) + 1)]
    whole_events = head.replace(b"\n\n", b"\n").count(b"\n")
    fake = Fake().on(GENERATE, Reply(cut(head, places), breaks_off=True), Reply([data]))
    if whole_events in (1, 2):
        with pytest.raises(EngineError, match=f"after {whole_events} tokens") as caught:
            stream(fake.connection())
        assert not isinstance(caught.value, EngineUnavailable)
        assert len(fake.requests) == 1
    else:
        assert stream(fake.connection()).ids.tolist() == [131, 915, 915]
        assert len(fake.requests) == (2 if whole_events == 0 else 1)


def test_an_error_in_a_stream() -> None:
    first = answer_bytes(STREAM).split(b"\n\n")[0] + b"\n\n"
    error = b'data: {"error": {"message": "CUDA error", "code": 500}}\n\n'
    fake = Fake().on(GENERATE, Reply([first, error]))
    with pytest.raises(EngineError):
        stream(fake.connection())
    assert len(fake.requests) == 1
    fake = Fake().on(GENERATE, Reply([error]), Reply([answer_bytes(STREAM)]))
    assert len(stream(fake.connection()).ids) == 3
    fake = Fake().on(GENERATE, Reply([b'data: {"error": {"message": "too long", "code": 400}}\n\n']))
    with pytest.raises(EngineRefusal) as caught:
        stream(fake.connection())
    assert (caught.value.status, len(fake.requests)) == (400, 1)


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 307])
@pytest.mark.parametrize("ask", [generate, stream])
def test_a_refusal_is_not_retried(ask: Any, status: int) -> None:
    fake = Fake().on(GENERATE, json_reply({"detail": "n" * 5000}, status))
    with pytest.raises(EngineRefusal) as caught:
        ask(fake.connection())
    assert (caught.value.status, len(fake.requests)) == (status, 1)
    assert len(str(caught.value)) < 400


# -- timeouts


@pytest.mark.parametrize("ask", [generate, stream])
@pytest.mark.parametrize(
    ("silence", "limits"),
    [(httpx2.ReadTimeout("silent"), {}), (lambda body: asyncio.Event().wait(), {"total_timeout": 0.01})],
    ids=["a read", "a try"],
)
def test_an_engine_that_is_silent_is_unavailable_at_once(ask: Any, silence: Any, limits: Any) -> None:
    fake = Fake().on(GENERATE, silence)
    with pytest.raises(EngineUnavailable):
        ask(fake.connection(**limits))
    assert (len(fake.requests), fake.slept) == (1, [])


# -- over sockets


@in_loop
async def test_closing_a_stream_closes_the_connection() -> None:
    gone = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(http_head("content-type: text/event-stream"))
        writer.write(answer_bytes(STREAM).split(b"\n\n")[0] + b"\n\n")
        await writer.drain()
        while await reader.read(65536):
            pass
        gone.set()
        writer.close()

    async with serving(handle) as url:
        engine = SGLangEngine(Connection(url), TINY)
        async with aclosing(engine.stream(STREAM["request"]["json"]["input_ids"], SamplingParams(3))) as deltas:
            assert (await anext(deltas)).ids.tolist() == [131]
        await asyncio.wait_for(gone.wait(), 60)
        await engine.close()


# -- events


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=5),
    st.lists(st.integers(0, 1000), max_size=30),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_cut_at_any_byte_are_the_same(data: list[str], places: list[int], end: str) -> None:
    text = "".join(f": note{end}event: x{end}data: {one}{end}{end}" for one in data).encode()
    reader = EventReader()
    assert [event for piece in cut(text, places) for event in reader.feed(piece)] == [one.encode() for one in data]


# -- health checks


@pytest.mark.parametrize("answer", [*LOST, json_reply({}, status=500), json_reply({}, status=503)], ids=str)
def test_a_server_that_does_not_answer_is_unavailable_after_one_request(answer: Any) -> None:
    """Any answer counts, even a 404; a router needs one healthy endpoint."""
    gone = Fake().on("/health", answer)
    engines = [SGLangEngine(fake.connection(), TINY) for fake in (gone, Fake(), Fake().on("/health", {}))]
    with pytest.raises(EngineUnavailable):
        asyncio.run(engines[0].check())
    assert (len(gone.requests), gone.slept) == (1, [])
    asyncio.run(engines[1].check())
    asyncio.run(engines[2].check())
    asyncio.run(Router(engines[:2]).check())
    with pytest.raises(EngineUnavailable):
        asyncio.run(Router(engines[:1]).check())


# -- limits


@pytest.mark.parametrize("piece", [b"data: " + b"x" * 1000, b"data: x\n" * 200, b"x" * 1000, b": " + b"x" * 1000])
def test_an_event_is_read_up_to_a_limit(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "_EVENT_BYTES", 5000)
    fake = Fake().on(GENERATE, Reply([piece] * 100))
    with pytest.raises(EngineAnswerError):
        stream(fake.connection())


@pytest.mark.parametrize("ask", [generate, stream])
@pytest.mark.parametrize("packing", ["gzip", "deflate", "br", "zstd", "gzip, gzip"])
def test_packed_answers_are_neither_requested_nor_unpacked(ask: Any, packing: str) -> None:
    body = gzip.compress(zlib.compress(b" " * 10_000_000))
    encodings: list[str] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        encodings.append(request.headers["accept-encoding"])
        stream = Reply([body]).arriving()
        return httpx2.Response(200, headers={"content-encoding": packing}, content=stream)

    settings = HTTPSettings(headers={"Accept-Encoding": "gzip"})
    connection = Connection("http://engine", settings, transport=httpx2.MockTransport(answer))
    with pytest.raises(EngineAnswerError):
        ask(connection)
    assert encodings == ["identity"]


ODD: dict[str, list[Any]] = {
    "read_timeout": [float("nan")],
    "retries": [-1, 1.5, None],
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
    """The paths of all values in a JSON value; of lists, only the first item."""
    paths = [path] if path else []
    if isinstance(value, dict):
        for key in value:
            paths += places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        paths += places(value[0], (*path, 0))
    return paths


def spoilt(value: Any, path: tuple[Any, ...], junk: str) -> bytes:
    """The value as JSON text, with junk at one path."""
    copied = copy.deepcopy(value)
    at = copied
    for name in path[:-1]:
        at = at[name]
    at[path[-1]] = "JUNK"
    return json.dumps(copied).replace('"JUNK"', junk).encode()


ADAPTERS = {
    "vllm_generate": VLLM,
    "vllm_completions_ids": VLLM_COMPLETIONS,
    "sglang_generate": SGLANG,
    "llamacpp_completion_eos": LLAMACPP,
}


@pytest.mark.parametrize(("name", "dialect"), ADAPTERS.items(), ids=list(ADAPTERS))
def test_junk_anywhere_in_an_answer_is_a_completion_or_a_typed_error(name: str, dialect: Dialect) -> None:
    answer = recording(name)["response"]
    prompt, params = inputs(recording(name))[0], SamplingParams(1000)

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
    """All texts of an error and its causes, with tracebacks."""
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
    """A server that repeats the request, as some do when they refuse a key."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        headers = dict(request.headers)
        message = f"wrong key {CANARY} in {headers}"
        texts = {
            "text": message,
            "event": f"data: {json.dumps({'error': {'message': message}})}\n\n",
            "bad event": f"data: {message}\n\n",
            "json": json.dumps({"error": message}),
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
            generate,
            stream,
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
def test_an_invalid_address_is_refused_without_its_secrets(url: Any) -> None:
    with pytest.raises(EngineError) as caught:
        Connection(url)
    assert no_secret(everything(caught.value)), everything(caught.value)


def test_no_repr_shows_a_secret() -> None:
    for connection in connections():
        engine = VLLMEngine(connection, TINY)
        texts = [connection, connection.base_url, connection.settings, engine]
        assert no_secret(" ".join([*map(repr, texts), *map(str, texts)]))
    with pytest.raises(EngineError):
        Connection(f"http://user:{CANARY}@engine", HTTPSettings(headers={"authorization": "x"}))
    with pytest.raises(EngineError) as caught:
        HTTPSettings(headers={"Authorization": f"Bearer {CANARY}\n"})
    assert no_secret(everything(caught.value))
