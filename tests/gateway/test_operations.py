"""Running a gateway: keys, budgets, weights, load, and leaving."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import re
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.engines.faults import Gate
from tests.gateway.server import Served, gateway_server, until
from tests.gateway.talking import Agent, Refused, answer_ids, counting
from tokentrace.engines import Capabilities, Delta, Engine, FinishReason, ScriptedEngine
from tokentrace.errors import InputError
from tokentrace.gateway.access import Role, add_key
from tokentrace.gateway.admission import Limits
from tokentrace.gateway.chat import Chat
from tokentrace.gateway.gateway import Gateway
from tokentrace.gateway.serving import ServeSettings
from tokentrace.gateway.tracing import Tracing

SUM = {"model": "pocket", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}
STREAMED = {**SUM, "stream": True}


class Gated(Engine):
    """Samples a token for each time that it is let, and remembers who was given up."""

    def __init__(self, tokens: int = 3) -> None:
        super().__init__(Capabilities("gated", streams=True, max_length=4096))
        self.tokens, self.gate = tokens, asyncio.Semaphore(0)
        self.began, self.ended = threading.Semaphore(0), threading.Semaphore(0)
        self.given_up = 0

    def _stream(self, request: Any) -> Any:
        return self._sampled()

    async def _sampled(self) -> Any:
        self.began.release()
        try:
            for at in range(self.tokens):
                await self.gate.acquire()
                last = at == self.tokens - 1
                yield Delta(
                    np.array([100 + at], np.int32), np.array([-1.0], np.float32), FinishReason.LENGTH if last else None
                )
        except (asyncio.CancelledError, GeneratorExit):
            self.given_up += 1
            raise
        finally:
            self.ended.release()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with gateway_server() as server:
        yield server


@pytest.fixture
def gated() -> Iterator[tuple[Served, Gated]]:
    engine = Gated()
    with gateway_server(lambda: engine, limits=Limits(concurrent=2, waiting=1)) as served:
        yield served, engine


def let(served: Served, engine: Gated, count: int) -> None:
    def release() -> None:
        for _ in range(count):
            engine.gate.release()

    served.loop.call_soon_threadsafe(release)


def in_thread(work: Callable[[], Any]) -> Callable[[], Any]:
    """Begin some work; what is returned waits for its result."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()

    def result() -> Any:
        thread.join(30)
        assert found, "it did not end"
        return found[0]

    return result


# -- keys


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    path = tmp_path_factory.mktemp("keys") / "gateway.keys"
    admin, agent = add_key(path, Role.ADMIN), add_key(path, Role.AGENT, "cluster")
    with gateway_server(keys=path) as served:
        yield served, admin, agent


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def every_route(served: Served) -> list[tuple[str, str]]:
    found = []
    for route in served.app.starlette().routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path.replace("{session}", "s"))
        found += [(method, path) for method in route.methods]
    return found


def test_every_route_refuses_without_a_key(keyed: tuple[Served, str, str]) -> None:
    served, _, _ = keyed
    routes = every_route(served)
    assert len(routes) > 20
    for method, path in routes:
        for headers in ({}, bearer("wrong"), {"x-api-key": ""}, {"authorization": "Basic %%%"}):
            status, _ = served.call(method, path, {} if method in ("POST", "PATCH") else None, headers)
            assert status == 401, (method, path, headers)
    for method, path in [("GET", "/nothing"), ("PUT", "/sessions"), ("DELETE", "/v1/models"), ("GET", "/../etc")]:
        assert served.call(method, path)[0] == 401, path
    with pytest.raises(urllib.error.HTTPError) as denied:
        urllib.request.urlopen(served.url)
    assert denied.value.headers["www-authenticate"].startswith("Basic "), "a browser asks for the key"
    denied.value.close()


def test_agents_may_sample_and_nothing_else(keyed: tuple[Served, str, str]) -> None:
    served, admin, agent = keyed
    status, made = served.call("POST", "/sessions", {"id": "one"}, bearer(admin))
    assert status == 201
    own = made["key"]
    assert served.call("POST", "/sessions", {"id": "two"}, bearer(admin))[0] == 201
    for key in (agent, own):
        for method, path in every_route(served):
            if path.startswith(("/sessions/s/v1", "/sessions/s/inference", "/v1", "/inference", "/healthz", "/readyz")):
                continue
            status, body = served.call(method, path, {} if method in ("POST", "PATCH") else None, bearer(key))
            assert status == 403, (method, path, body)
    assert served.call("POST", "/sessions/one/v1/chat/completions", SUM, bearer(own))[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, {"x-api-key": own})[0] == 200
    assert served.call("POST", "/sessions/two/v1/chat/completions", SUM, bearer(own))[0] == 403
    other = {**bearer(own), "x-tokentrace-session": "two"}
    assert served.call("POST", "/v1/chat/completions", SUM, other)[0] == 403
    assert served.call("POST", "/sessions/two/v1/chat/completions", SUM, bearer(agent))[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, {**bearer(agent), "x-tokentrace-session": "two"})[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, bearer(agent))[0] == 400
    assert served.call("POST", "/sessions/three/v1/chat/completions", SUM, bearer(agent))[0] == 404
    assert served.call("GET", "/sessions/one", None, bearer(admin))[1]["turns"] == 2


def test_a_browser_logs_in_with_the_admin_key(keyed: tuple[Served, str, str]) -> None:
    served, admin, _ = keyed
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{admin}".encode()).decode()}
    assert served.call("GET", "/sessions", None, basic)[0] == 200
    foreign = {**basic, "origin": "http://evil.example"}
    assert served.call("POST", "/sessions", {}, foreign)[0] == 403
    assert served.call("POST", "/sessions", {}, {**basic, "sec-fetch-site": "cross-site"})[0] == 403


def test_a_key_counts_as_soon_as_it_is_in_the_file_and_until_it_is_not(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    admin = add_key(path, Role.ADMIN)
    before = path.read_text()
    with gateway_server(keys=path) as served:
        later = add_key(path, Role.ADMIN)
        assert served.call("GET", "/sessions", None, bearer(later))[0] == 200
        path.write_text(before + "nonsense that is no key\n")
        assert served.call("GET", "/sessions", None, bearer(admin))[0] == 401
        path.write_text(before)
        assert served.call("GET", "/sessions", None, bearer(later))[0] == 401
        assert served.call("GET", "/sessions", None, bearer(admin))[0] == 200


def test_without_keys_only_this_machine_is_served(served: Served) -> None:
    with pytest.raises(InputError, match="say who may use"):
        ServeSettings()
    with pytest.raises(InputError, match="this machine only"):
        ServeSettings(dev=True, host="0.0.0.0")
    for host in ("evil.example", "127.0.0.1.evil.example", "0.0.0.0", "localhost@evil.example", "["):
        assert served.call("POST", "/sessions/x/v1/chat/completions", SUM, {"host": host})[0] == 403, host
    assert served.call("GET", "/healthz", None, {"host": "localhost:1"})[0] == 200
    assert served.call("POST", "/sessions", {}, {"origin": "http://evil.example"})[0] == 403


# -- budgets


def test_budgets_and_forced_sampling(served: Served) -> None:
    settings = {"sampling": {"temperature": 0, "max_tokens": 5}, "max_turns": 2}
    assert served.call("POST", "/sessions", {"id": "b", "settings": settings})[0] == 201
    path = "/sessions/b/v1/chat/completions"
    _, first = served.call("POST", path, {**SUM, "temperature": 1.5, "max_tokens": 50})
    assert first["usage"]["completion_tokens"] == 5
    assert served.call("POST", path, {**SUM, "temperature": 1.5})[1]["choices"] == first["choices"]
    status, refused = served.call("POST", path, SUM)
    assert (status, refused["error"]["code"]) == (403, "budget_exhausted")
    live = served.run(served.app.gateway.sessions.get("b"))
    assert live.session.trajectory.turns(0)[0].sampling["temperature"] == 0
    served.call("POST", "/sessions", {"id": "c", "settings": {"max_sampled_tokens": 7}})
    path = "/sessions/c/v1/chat/completions"
    _, first = served.call("POST", path, SUM)
    assert first["usage"]["completion_tokens"] == 7
    assert first["choices"][0]["finish_reason"] == "length"
    assert served.call("POST", path, SUM)[0] == 403
    for wrong in (
        {"max_turns": -1},
        {"nonsense": 1},
        {"sampling": {"temperature": "hot"}},
        {"matcher": "odd"},
        {"sampling": {"temperature": -1}},
        [],
    ):
        status, answer = served.call("POST", "/sessions", {"settings": wrong})
        assert status == 400, (wrong, answer)


def test_a_prompt_that_does_not_fit_is_refused_as_clients_know_it(served: Served) -> None:
    body = {**SUM, "messages": [{"role": "user", "content": "word " * 5000}]}
    status, answer = served.call("POST", "/sessions/long/v1/chat/completions", body)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    assert served.state("long")["turns"] == 0


def test_a_budget_of_turns_holds_for_requests_at_once(served: Served) -> None:
    served.call("POST", "/sessions", {"id": "few", "settings": {"max_turns": 3}})
    calls = [in_thread(lambda: served.call("POST", "/sessions/few/v1/chat/completions", SUM)) for _ in range(8)]
    statuses = sorted(result()[0] for result in calls)
    assert statuses == [200, 200, 200, 403, 403, 403, 403, 403]
    assert served.state("few")["turns"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_budget_of_tokens_holds_for_requests_at_once(stream: bool) -> None:
    """What a request may sample is reserved before it samples, and what it did not use is free after it."""
    gates: list[Gate] = []

    def engine() -> ScriptedEngine:
        gates.append(Gate())
        return ScriptedEngine(lambda prompt, sampling: answer_ids("word " * 500), piece=10, latency=gates[0])

    with gateway_server(engine) as served, ThreadPoolExecutor(20) as threads:
        served.call("POST", "/sessions", {"id": "few", "settings": {"max_sampled_tokens": 100}})

        def ask(at: int) -> int:
            try:
                return Agent(f"agent {at}", "few", stream=stream, max_tokens=30).ask(served.url).tokens
            except Refused as refused:
                return -refused.status

        answers = [threads.submit(ask, at) for at in range(20)]
        served.run(gates[0].waiting(4))
        served.run(gates[0].open())
        assert sorted(answer.result(60) for answer in answers) == [-403] * 16 + [10, 30, 30, 30]
        assert served.state("few")["sampled"] == 100


# -- load and disconnects


def test_more_than_can_wait_are_told_to_come_back(gated: tuple[Served, Gated]) -> None:
    served, engine = gated
    path = "/sessions/load/v1/chat/completions"
    under_way = [in_thread(lambda: served.call("POST", path, SUM)) for _ in range(2)]
    for _ in under_way:
        assert engine.began.acquire(timeout=60)
    third = in_thread(lambda: served.call("POST", path, SUM))
    until(lambda: served.app.gateway.admission.waiting == 1)
    status, body = served.call("POST", path, SUM)
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert served.call("POST", "/sessions/late/v1/chat/completions", SUM)[0] == 429
    assert served.call("GET", "/sessions/late")[0] == 404, "what is refused leaves no session"
    assert b"tokentrace_prompt_seconds_count 3.0" in served.call("GET", "/metrics")[1], "nor is its prompt made"
    let(served, engine, 20)
    assert [result()[0] for result in (*under_way, third)] == [200, 200, 200]
    assert served.state("load")["turns"] == 3


@pytest.mark.parametrize("body", [SUM, STREAMED], ids=["whole", "streamed"])
def test_an_agent_that_goes_away_ends_its_request(gated: tuple[Served, Gated], body: dict[str, Any]) -> None:
    served, engine = gated
    raw = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
    head = f"POST /sessions/gone/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    assert engine.began.acquire(timeout=60)
    let(served, engine, 1)
    connection.close()
    assert engine.ended.acquire(timeout=60)
    assert engine.given_up == 1
    until(lambda: served.app.gateway.admission.in_flight == 0)
    state = served.state("gone")
    assert state["turns"] == 0
    [left] = state["incomplete"]
    assert left["ended"] == "the agent went away"
    assert served.rows("gone") == []


def test_an_agent_that_goes_away_while_its_turn_waits_for_the_store_leaves_nothing_under_way() -> None:
    """Else whoever sends the request again waits for an answer that nobody samples."""

    async def leave(gateway: Gateway) -> None:
        begin, written = gateway.store.begin, asyncio.Event()

        async def slow(*args: Any) -> None:
            writing = asyncio.ensure_future(begin(*args))
            await written.wait()
            await writing

        gateway.store.begin = slow  # type: ignore[method-assign]
        answer = await gateway.begin("left", Chat, Chat.read(SUM, {}), "key")
        running = asyncio.create_task(answer.run(lambda *_: None))
        while b"tokentrace_engine_seconds_count 1.0" not in gateway.metrics.text():
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        written.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    with gateway_server(lambda: ScriptedEngine(counting)) as served:
        served.run(leave(served.app.gateway))
        state = served.state("left")
        assert [left["ended"] for left in state["incomplete"]] == ["the agent went away"]
        assert not served.app.gateway.admission.under_way


def test_a_retry_while_the_first_is_under_way_shares_its_answer(gated: tuple[Served, Gated]) -> None:
    served, engine = gated
    path = "/sessions/twice/v1/chat/completions"
    key = {"idempotency-key": "k"}
    first = in_thread(lambda: served.call("POST", path, SUM, key))
    assert engine.began.acquire(timeout=60)
    again = in_thread(lambda: served.call("POST", path, SUM, {**key, "x-stainless-retry-count": "1"}))
    let(served, engine, 10)
    assert first() == again()
    assert served.state("twice")["turns"] == 1


# -- weights and leaving


def test_weights_change_between_tokens_and_the_record_says_where(gated: tuple[Served, Gated]) -> None:
    served, engine = gated
    assert served.call("POST", "/admin/resume", {"version": 7})[1]["version"] == 7
    result = in_thread(lambda: served.call("POST", "/sessions/w/v1/chat/completions", SUM))
    assert engine.began.acquire(timeout=60)
    let(served, engine, 1)
    until(lambda: engine.gate._value == 0)
    assert served.call("POST", "/admin/pause")[1]["paused"] is True
    waiting = in_thread(lambda: served.call("POST", "/sessions/w2/v1/chat/completions", SUM))
    until(lambda: served.app.gateway.admission.waiting == 1)
    assert served.call("POST", "/admin/resume", {"version": 8})[1] == {
        "paused": False,
        "draining": False,
        "in_flight": 1,
        "waiting": 1,
        "version": 8,
    }
    let(served, engine, 20)
    assert result()[0] == waiting()[0] == 200
    live = served.run(served.app.gateway.sessions.get("w"))
    [turn] = live.session.trajectory.turns(0)
    assert [(span.version, span.start, span.stop) for span in turn.versions] == [(7, 0, 1), (8, 1, 3)]


def test_draining_finishes_what_is_under_way(gated: tuple[Served, Gated]) -> None:
    served, engine = gated
    result = in_thread(lambda: served.call("POST", "/sessions/d/v1/chat/completions", SUM))
    assert engine.began.acquire(timeout=60)
    draining = in_thread(lambda: served.call("POST", "/admin/drain"))
    until(lambda: served.app.gateway.admission.draining)
    status, body = served.call("POST", "/sessions/d/v1/chat/completions", SUM)
    assert (status, body["error"]["code"]) == (503, "draining")
    assert served.call("GET", "/readyz")[0] == 503
    assert served.call("GET", "/healthz")[0] == 200
    let(served, engine, 10)
    assert result()[0] == 200
    assert draining()[1]["in_flight"] == 0
    assert served.state("d")["turns"] == 1


# -- the life of a session


def test_a_session_is_sealed_exported_and_dropped(served: Served) -> None:
    path = "/sessions/life/v1/chat/completions"
    assert served.call("POST", path, SUM)[0] == 200
    status, labels = served.call("POST", "/sessions/life/rewards", {"reward": 0.5})
    assert status == 200
    served.call("POST", "/sessions/life/rewards", {"rewards": [{"reward": 1, "turn": 0}, {"grade": "good"}]})
    for wrong in (
        {"reward": "much"},
        {"reward": 1, "turn": 5},
        {"reward": 1, "turn": True},
        {},
        [],
        {"rewards": []},
        {"half \ud83d of a pair": 1},
        {"a\0b": 1},
    ):
        assert served.call("POST", "/sessions/life/rewards", wrong)[0] == 400, wrong
    named = [(label["name"], label["turn"], label["value"]) for label in served.state("life")["labels"]]
    assert sorted(named, key=str) == sorted([("reward", None, 0.5), ("reward", 0, 1), ("grade", None, "good")], key=str)
    assert served.call("POST", "/sessions/life/seal")[1]["state"] == "sealed"
    status, body = served.call("POST", path, SUM)
    assert (status, body["error"]["code"]) == (409, "closed")
    [row] = served.rows("life")
    assert row["reward"] == 0.5
    assert served.state("life")["state"] == "exported"
    assert served.call("DELETE", "/sessions/life")[1]["state"] == "dropped"
    assert served.call("POST", path, SUM)[0] == 404
    assert served.call("GET", "/sessions/life")[0] == 404
    assert labels["labels"]


def fetched(served: Served, path: str) -> tuple[bytes, Any]:
    with urllib.request.urlopen(served.url + path, timeout=60) as answer:
        return answer.read(), answer.headers


def test_rows_come_in_three_formats_with_rewards_and_move_the_state(served: Served) -> None:
    for name in ("batch-a", "batch-b"):
        assert served.call("POST", f"/sessions/{name}/v1/chat/completions", SUM)[0] == 200
        assert served.call("POST", f"/sessions/{name}/rewards", {"reward": 0.5})[0] == 200
    assert served.call("POST", f"/sessions/{name}/rewards", {"rewards": [{"turn": 0, "reward": 1}]})[0] == 200
    assert served.call("POST", "/sessions/batch-a/seal")[0] == 200
    lines, headers = fetched(served, "/rows?format=jsonl&search=batch-&keep_state=true")
    assert headers["content-type"] == "application/x-ndjson"
    assert served.state("batch-a")["state"] == "sealed"
    rows = {row["session"]: row for row in map(json.loads, lines.splitlines())}
    assert [row["reward"] for row in rows.values()] == [0.5, 0.5]
    assert (rows["batch-a"]["turns"][0]["reward"], rows["batch-b"]["turns"][0]["reward"]) == (None, 1.0)
    raw, headers = fetched(served, "/rows?format=arrow&state=sealed")
    assert headers["content-type"] == "application/vnd.apache.arrow.stream"
    [row] = pyarrow.ipc.open_stream(raw).read_all().to_pylist()
    assert row["input_ids"] == rows["batch-a"]["input_ids"]
    assert served.state("batch-a")["state"] == "exported"
    raw, headers = fetched(served, "/sessions/batch-b/rows?format=parquet")
    assert headers["content-disposition"] == 'attachment; filename="batch-b.parquet"'
    [row] = pyarrow.parquet.read_table(io.BytesIO(raw)).to_pylist()
    assert row["input_ids"] == rows["batch-b"]["input_ids"]
    assert served.state("batch-b")["state"] == "open"
    assert fetched(served, "/rows?state=sealed")[0] == b""
    for query in ("format=xml", "keep_state=maybe", "state=gone", "state=dropped", "sort=up"):
        assert served.call("GET", f"/rows?{query}")[0] == 400, query


# -- traces


def test_a_request_is_a_trace_of_its_stages_without_what_was_said() -> None:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider, trace = InMemorySpanExporter(), TracerProvider(), "0af7651916cd43dd8448eb211c80319c"
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    message = {"role": "user", "content": "What is 17 * 23, secretly?"}
    headers = {"traceparent": f"00-{trace}-b7ad6b7169203331-01"}
    path = "/v1/chat/completions"
    with gateway_server(tracing=Tracing(provider.get_tracer("test"))) as served:
        for body in ({"messages": [message], "stream": True}, {"messages": [{**message, "role": 7}]}):
            served.call("POST", f"/sessions/traced{path}", body, headers)
    *stages, request, refused = exporter.get_finished_spans()
    assert [span.name for span in stages] == ["tokentrace.prompt", "tokentrace.engine", "tokentrace.store"]
    assert request.name == refused.name == f"POST /sessions/{{session}}{path}"
    assert {f"{span.context.trace_id:032x}" for span in (*stages, request, refused)} == {trace}
    assert {span.parent.span_id for span in stages} == {request.context.span_id}
    assert (request.attributes["tokentrace.session"], request.attributes["tokentrace.status"]) == ("traced", 200)
    assert refused.attributes["tokentrace.status"] == 400
    assert not any("secretly" in span.to_json() for span in (*stages, request, refused))
