"""Faults: what is sent again, what is not, and what is said."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from email.utils import formatdate
from time import time
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engines.support import Fake, Reply, answer_bytes, cut, http_head, json_reply, recording
from tests.loop import in_loop
from tokentrace.engines.errors import EngineError, EngineRefusal, EngineUnavailable
from tokentrace.engines.http import Connection, EventReader
from tokentrace.engines.protocol import Capabilities, SamplingParams, collected
from tokentrace.engines.routing import Router
from tokentrace.engines.sglang import GENERATE, SGLangEngine

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


# -- sent again


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
def test_what_nothing_was_accepted_of_is_sent_again(ask: Any, recorded: Any, ids: list[int], fault: Any) -> None:
    fake = Fake().on(GENERATE, fault, fault, Reply([answer_bytes(recorded)]))
    assert ask(fake.connection()).ids.tolist() == ids
    assert len(fake.requests) == 3
    assert fake.requests[0] == fake.requests[1] == fake.requests[2]
    assert fake.slept == [0.5, 1.0]


@pytest.mark.parametrize(("ask", "recorded", "ids"), BOTH)
def test_it_gives_up_after_so_many_tries(ask: Any, recorded: Any, ids: list[int]) -> None:
    fake = Fake().on(GENERATE, json_reply({"error": {"message": "the\n engine   is dead"}}, 500))
    with pytest.raises(EngineUnavailable):
        ask(fake.connection(retries=3))
    assert len(fake.requests) == 4
    assert fake.slept == [0.5, 1.0, 2.0]


def test_retry_after_is_waited_for() -> None:
    for value, least in [("7", 7.0), (formatdate(time() + 60, usegmt=True), 50.0), ("soon", 0.5), ("0", 0.5)]:
        fake = Fake().on("/x", json_reply({}, 429, retry_after=value), {"ok": 1})
        assert asyncio.run(fake.connection().get("/x")) == {"ok": 1}
        assert least <= fake.slept[0] <= least + 10
    fake = Fake().on("/x", json_reply({"error": "busy"}, 429, retry_after="3600"), {"ok": 1})
    with pytest.raises(EngineUnavailable):
        asyncio.run(fake.connection().get("/x"))
    assert (len(fake.requests), fake.slept) == (1, [])


# -- never sent again


def test_a_whole_answer_that_broke_off_is_not_asked_for_again() -> None:
    half = answer_bytes(WHOLE)[:200]
    fake = Fake().on(GENERATE, Reply([half], breaks_off=True))
    with pytest.raises(EngineError) as caught:
        generate(fake.connection())
    assert not isinstance(caught.value, EngineUnavailable)
    assert (len(fake.requests), fake.slept) == (1, [])


@settings(max_examples=40, deadline=None)
@given(at=st.integers(0, 10_000), places=st.lists(st.integers(0, 10_000), max_size=5))
def test_a_stream_that_broke_off_anywhere(at: int, places: list[int]) -> None:
    """Before its first token it is sent again; after, never; after its last, all is there."""
    data = answer_bytes(STREAM)
    head = data[: at % (len(data) + 1)]
    whole_events = head.count(b"\n\n")
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
def test_a_refusal_is_not_sent_again(ask: Any, status: int) -> None:
    fake = Fake().on(GENERATE, json_reply({"detail": "n" * 5000}, status))
    with pytest.raises(EngineRefusal) as caught:
        ask(fake.connection())
    assert (caught.value.status, len(fake.requests)) == (status, 1)
    assert len(str(caught.value)) < 400


# -- timeouts


@pytest.mark.parametrize("ask", [generate, stream])
def test_an_engine_that_is_silent_is_unavailable_at_once(ask: Any) -> None:
    fake = Fake().on(GENERATE, httpx2.ReadTimeout("silent"))
    with pytest.raises(EngineUnavailable):
        ask(fake.connection())
    assert (len(fake.requests), fake.slept) == (1, [])


@pytest.mark.parametrize("ask", [generate, stream])
def test_the_total_time_of_a_try_is_bounded(ask: Any) -> None:
    fake = Fake().on(GENERATE, lambda body: asyncio.Event().wait())
    with pytest.raises(EngineUnavailable):
        ask(fake.connection(total_timeout=0.01))
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

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    engine = SGLangEngine(Connection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"), TINY)
    async with aclosing(engine.stream(STREAM["request"]["json"]["input_ids"], SamplingParams(3))) as deltas:
        assert (await anext(deltas)).ids.tolist() == [131]
    await asyncio.wait_for(gone.wait(), 60)
    await engine.close()
    server.close()
    await server.wait_closed()


# -- addresses, the extra, events


@given(
    st.lists(st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"])), max_size=5),
    st.lists(st.integers(0, 1000), max_size=30),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_cut_at_any_byte_are_the_same(data: list[str], places: list[int], end: str) -> None:
    text = "".join(f": note{end}event: x{end}data: {one}{end}{end}" for one in data).encode()
    reader = EventReader()
    assert [event for piece in cut(text, places) for event in reader.feed(piece)] == [one.encode() for one in data]


# -- whether it is there


@pytest.mark.parametrize("answer", [*LOST, json_reply({}, status=500), json_reply({}, status=503)], ids=str)
def test_a_server_that_does_not_answer_is_not_there_and_is_asked_once(answer: Any) -> None:
    """One that answers is there, whether it knows the path or not; of several, one is enough."""
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
