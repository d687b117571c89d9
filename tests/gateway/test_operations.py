"""Operating a gateway: keys, budgets, weights, load, and shutting down."""

import asyncio
import base64
import io
import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.engines.faults import Gate
from tests.gateway.server import Served, gateway_server, until
from tests.gateway.talking import Agent, Refused, answer_ids, counting
from tokentrace.engines import ScriptedEngine
from tokentrace.errors import InputError
from tokentrace.gateway import http
from tokentrace.gateway.access import Role, add_key
from tokentrace.gateway.admission import Limits
from tokentrace.gateway.chat import Chat
from tokentrace.gateway.gateway import Gateway
from tokentrace.gateway.serving import ServeSettings
from tokentrace.gateway.tracing import Tracing

SUM = {"model": "pocket", "messages": [{"role": "user", "content": "What is 3 + 4?"}]}


@pytest.fixture
def gated() -> Iterator[tuple[Served, Gate]]:
    """A gateway for two requests at once, whose engine samples three tokens, one each time the gate opens."""
    gate = Gate()
    engine = lambda: ScriptedEngine(lambda *_: [100, 101, 102], piece=1, latency=gate)  # noqa: E731
    with gateway_server(engine, limits=Limits(concurrent=2, waiting=1)) as served:
        yield served, gate


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(20) as pool:
        yield pool


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, str, str]]:
    path = tmp_path_factory.mktemp("keys") / "gateway.keys"
    admin, agent = add_key(path, Role.ADMIN), add_key(path, Role.AGENT, "cluster")
    with gateway_server(keys=path) as served:
        yield served, admin, agent


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def every_route(served: Served) -> list[tuple[str, str]]:
    routes = []
    for route in served.app.router.routes:
        path = re.sub(r"\{[^}]*\}", "x", route.path.replace("{session}", "s"))
        routes += [(method, path) for method in route.methods]
    return routes


def test_every_route_refuses_without_a_key(keyed: tuple[Served, str, str]) -> None:
    served, _, _ = keyed
    routes = every_route(served)
    assert len(routes) > 20
    for method, path in routes:
        for headers in ({}, bearer("wrong"), {"x-api-key": ""}, {"authorization": "Basic %%%"}):
            status, _ = served.call(method, path, {} if method in ("POST", "PATCH") else None, headers)
            assert status == 401, (method, path, headers)
    for method, path in [
        ("GET", "/nothing"),
        ("GET", "/v1/models/"),
        ("PUT", "/sessions"),
        ("DELETE", "/v1/models"),
        ("GET", "/../etc"),
    ]:
        assert served.call(method, path)[0] == 401, path
    with pytest.raises(urllib.error.HTTPError) as denied:
        urllib.request.urlopen(served.url)
    assert denied.value.headers["www-authenticate"].startswith("Basic "), "a browser asks for the key"
    denied.value.close()


def test_agents_may_sample_and_nothing_else(keyed: tuple[Served, str, str]) -> None:
    served, admin, agent = keyed
    status, created = served.call("POST", "/sessions", {"id": "one"}, bearer(admin))
    assert status == 201
    session_key = created["key"]
    assert served.call("POST", "/sessions", {"id": "two"}, bearer(admin))[0] == 201
    for key in (agent, session_key):
        for method, path in every_route(served):
            if path.startswith(("/sessions/s/v1", "/sessions/s/inference", "/v1", "/inference", "/healthz", "/readyz")):
                continue
            status, body = served.call(method, path, {} if method in ("POST", "PATCH") else None, bearer(key))
            assert status == 403, (method, path, body)
    assert served.chat("one", SUM, bearer(session_key))[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, {"x-api-key": session_key})[0] == 200
    assert served.chat("two", SUM, bearer(session_key))[0] == 403
    headers = {**bearer(session_key), "x-tokentrace-session": "two"}
    assert served.call("POST", "/v1/chat/completions", SUM, headers)[0] == 403
    assert served.chat("two", SUM, bearer(agent))[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, {**bearer(agent), "x-tokentrace-session": "two"})[0] == 200
    assert served.call("POST", "/v1/chat/completions", SUM, bearer(agent))[0] == 400
    assert served.chat("three", SUM, bearer(agent))[0] == 404
    assert served.call("GET", "/sessions/one", None, bearer(admin))[1]["turns"] == 2


def test_a_browser_logs_in_with_the_admin_key(keyed: tuple[Served, str, str]) -> None:
    served, admin, _ = keyed
    basic = {"authorization": "Basic " + base64.b64encode(f"me:{admin}".encode()).decode()}
    assert served.call("GET", "/sessions", None, basic)[0] == 200
    foreign = {**basic, "origin": "http://evil.example"}
    assert served.call("POST", "/sessions", {}, foreign)[0] == 403
    assert served.call("POST", "/sessions", {}, {**basic, "sec-fetch-site": "cross-site"})[0] == 403


def test_a_key_is_valid_while_it_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    admin = add_key(path, Role.ADMIN)
    before = path.read_text()
    with gateway_server(keys=path) as served:
        path.write_text(before.rstrip())  # as an editor may leave it
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
        assert served.chat("x", SUM, {"host": host})[0] == 403, host
    assert served.call("GET", "/healthz", None, {"host": "localhost:1"})[0] == 200
    assert served.call("POST", "/sessions", {}, {"origin": "http://evil.example"})[0] == 403


def test_budgets_and_forced_sampling(served: Served) -> None:
    settings = {"sampling": {"temperature": 0, "max_tokens": 5}, "max_turns": 2}
    assert served.call("POST", "/sessions", {"id": "b", "settings": settings})[0] == 201
    _, first = served.chat("b", {**SUM, "temperature": 1.5, "max_tokens": 50})
    assert first["usage"]["completion_tokens"] == 5
    assert served.chat("b", {**SUM, "temperature": 1.5})[1]["choices"] == first["choices"]
    status, refused = served.chat("b", SUM)
    assert (status, refused["error"]["code"]) == (403, "budget_exhausted")
    assert refused["error"]["message"].startswith("session b has 0 of its 2 turns left")
    assert served.record("b").trajectory.turns(0)[0].sampling["temperature"] == 0
    served.call("POST", "/sessions", {"id": "c", "settings": {"max_sampled_tokens": 7}})
    _, first = served.chat("c", SUM)
    assert first["usage"]["completion_tokens"] == 7
    assert first["choices"][0]["finish_reason"] == "length"
    assert served.chat("c", SUM)[0] == 403
    samplings = [{"sampling": {"temperature": value}} for value in ("hot", -1)]
    for wrong in ({"max_turns": -1}, {"nonsense": 1}, {"matcher": "odd"}, *samplings, []):
        assert served.call("POST", "/sessions", {"settings": wrong})[0] == 400, wrong


@pytest.mark.parametrize(("limit", "context"), [(4095, 4096), (20, 20)])
def test_a_prompt_that_is_too_long_gives_the_error_that_clients_know(served: Served, limit: int, context: int) -> None:
    text = rf"prompt is too long: \d+ tokens > {limit} maximum. This model's maximum context length is {context} tokens"
    id = served.call("POST", "/sessions", {"settings": {"max_prompt_tokens": limit}} if limit == 20 else {})[1]["id"]
    for path, field in (("chat/completions", "messages"), ("responses", "input"), ("messages", None)):
        body = {field or "messages": [{"role": "user", "content": "word " * 5000}], "max_tokens": 9}
        status, answer = served.call("POST", f"/sessions/{id}/v1/{path}", body)
        assert (status, answer["error"].get("param")) == (400, field)
        assert re.search(text, answer["error"]["message"])
        assert answer["error"].get("code") == (field and "context_length_exceeded")
    assert served.state(id)["turns"] == 0


def test_a_budget_of_turns_holds_for_requests_at_once(served: Served, threads: ThreadPoolExecutor) -> None:
    served.call("POST", "/sessions", {"id": "few", "settings": {"max_turns": 3}})
    answers = [threads.submit(served.chat, "few", SUM) for _ in range(8)]
    assert sorted(answer.result(60)[0] for answer in answers) == [200] * 3 + [403] * 5
    assert served.state("few")["turns"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_budget_of_tokens_holds_for_requests_at_once(stream: bool, threads: ThreadPoolExecutor) -> None:
    """A request reserves what it may sample, and afterwards releases what it did not use."""
    gate = Gate()
    engine = lambda: ScriptedEngine(lambda *_: answer_ids("word " * 500), piece=10, latency=gate)  # noqa: E731

    def ask(at: int) -> int:
        try:
            return Agent(f"agent {at}", "few", stream=stream, max_tokens=30).ask(served.url).tokens
        except Refused as refused:
            return -refused.status

    with gateway_server(engine) as served:
        served.call("POST", "/sessions", {"id": "few", "settings": {"max_sampled_tokens": 100}})
        answers = [threads.submit(ask, at) for at in range(20)]
        served.run(gate.waiting(4))
        served.run(gate.open())
        assert sorted(answer.result(60) for answer in answers) == [-403] * 16 + [10, 30, 30, 30]
        assert served.state("few")["sampled"] == 100


def test_requests_beyond_the_waiting_limit_are_refused(gated: tuple[Served, Gate], threads: ThreadPoolExecutor) -> None:
    served, gate = gated
    answers = [threads.submit(served.chat, "load", SUM) for _ in range(2)]
    served.run(gate.waiting(2))
    answers.append(threads.submit(served.chat, "load", SUM))
    until(lambda: served.app.gateway.admission.waiting == 1)
    status, body = served.chat("load", SUM)
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    assert served.chat("late", SUM)[0] == 429
    assert served.call("GET", "/sessions/late")[0] == 404, "what is refused leaves no session"
    assert b"tokentrace_prompt_seconds_count 3.0" in served.call("GET", "/metrics")[1], "nor is its prompt made"
    served.run(gate.open())
    assert [answer.result(60)[0] for answer in answers] == [200, 200, 200]
    assert served.state("load")["turns"] == 3


def test_a_silent_stream_sends_keep_alives(gated: tuple[Served, Gate], monkeypatch: pytest.MonkeyPatch) -> None:
    served, gate = gated
    monkeypatch.setattr(http, "KEEP_ALIVE_SECONDS", 0.01)
    with served.send("silent", {**SUM, "stream": True}) as connection:
        served.run(gate.open(1))
        received = b""
        while b": keep-alive" not in received and (piece := connection.recv(1 << 16)):
            received += piece
        assert b": keep-alive" in received
        served.run(gate.open())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_agent_that_goes_away_ends_its_request(gated: tuple[Served, Gate], stream: bool) -> None:
    served, gate = gated
    connection = served.send("gone", {**SUM, "stream": stream})
    served.run(gate.waiting())
    if stream:
        served.run(gate.open(1))
        served.run(gate.waiting())
    connection.close()
    until(lambda: gate._before == 0)  # the engine samples no more
    until(lambda: served.app.gateway.admission.in_flight == 0)
    state = served.state("gone")
    assert (state["turns"], served.rows("gone")) == (0, [])
    assert [request["ended"] for request in state["incomplete"]] == ["the agent went away"]


def test_an_agent_that_goes_away_while_its_turn_waits_for_the_store_leaves_nothing_under_way() -> None:
    """Otherwise a retry would wait for an answer that is never sampled."""

    async def leave(gateway: Gateway) -> None:
        append, may_write = gateway.store.append, asyncio.Event()

        async def slow(*args: Any, **settings: Any) -> None:
            await may_write.wait()
            await append(*args, **settings)

        gateway.store.append = slow  # type: ignore[method-assign]
        answer = await gateway.begin("left", Chat, Chat.read(SUM, {}), "key")
        running = asyncio.create_task(answer.run(lambda *_: None))
        while b"tokentrace_engine_seconds_count 1.0" not in gateway.metrics.text():
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.sleep(0)
        may_write.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    with gateway_server(lambda: ScriptedEngine(counting)) as served:
        served.run(leave(served.app.gateway))
        state = served.state("left")
        assert (state["turns"], state["incomplete"]) == (1, [])  # what is being stored is stored
        assert not served.app.gateway.admission.under_way


def test_a_retry_while_the_first_is_under_way_shares_its_answer(
    gated: tuple[Served, Gate], threads: ThreadPoolExecutor
) -> None:
    served, gate = gated
    first = threads.submit(served.chat, "twice", SUM, {"idempotency-key": "k"})
    served.run(gate.waiting())
    retry = threads.submit(served.chat, "twice", SUM, {"idempotency-key": "k", "x-stainless-retry-count": "1"})
    served.run(gate.open())
    assert first.result(60) == retry.result(60)
    assert served.state("twice")["turns"] == 1


def test_weights_change_between_tokens_and_the_record_says_where(
    gated: tuple[Served, Gate], threads: ThreadPoolExecutor
) -> None:
    served, gate = gated
    assert served.call("POST", "/admin/resume", {"version": 7})[1]["version"] == 7
    answers = [threads.submit(served.chat, "w", SUM)]
    served.run(gate.waiting())
    served.run(gate.open(1))
    served.run(gate.waiting())
    assert served.call("POST", "/admin/pause")[1]["paused"] is True
    answers.append(threads.submit(served.chat, "w2", SUM))
    until(lambda: served.app.gateway.admission.waiting == 1)
    state = {"paused": False, "draining": False, "in_flight": 1, "waiting": 1, "version": 8}
    assert served.call("POST", "/admin/resume", {"version": 8})[1] == state
    served.run(gate.open())
    assert [answer.result(60)[0] for answer in answers] == [200, 200]
    [turn] = served.record("w").trajectory.turns(0)
    assert [(span.version, span.start, span.stop) for span in turn.versions] == [(7, 0, 1), (8, 1, 3)]


def test_a_version_of_a_session_changes_between_tokens(gated: tuple[Served, Gate], threads: ThreadPoolExecutor) -> None:
    served, gate = gated
    assert served.call("POST", "/sessions", {"id": "v", "settings": {"version": 7}})[0] == 201
    answer = threads.submit(served.chat, "v", SUM)
    served.run(gate.waiting())
    served.run(gate.open(1))
    served.run(gate.waiting())
    assert served.call("PATCH", "/sessions/v", {"settings": {"version": 8}})[0] == 200
    served.run(gate.open())
    assert answer.result(60)[0] == 200
    [turn] = served.record("v").trajectory.turns(0)
    assert [(span.version, span.start, span.stop) for span in turn.versions] == [(7, 0, 1), (8, 1, 3)]


def test_draining_finishes_running_requests(gated: tuple[Served, Gate], threads: ThreadPoolExecutor) -> None:
    served, gate = gated
    answer = threads.submit(served.chat, "d", SUM)
    served.run(gate.waiting())
    draining = threads.submit(served.call, "POST", "/admin/drain")
    until(lambda: served.app.gateway.admission.draining)
    status, body = served.chat("d", SUM)
    assert (status, body["error"]["code"]) == (503, "draining")
    assert served.call("GET", "/readyz")[0] == 503
    assert served.call("GET", "/healthz")[0] == 200
    served.run(gate.open())
    assert answer.result(60)[0] == 200
    assert draining.result(60)[1]["in_flight"] == 0
    assert served.state("d")["turns"] == 1


def test_a_session_is_sealed_exported_and_dropped(served: Served) -> None:
    assert served.chat("life", SUM)[0] == 200
    status, labels = served.call("POST", "/sessions/life/rewards", {"reward": 0.5})
    assert status == 200
    served.call("POST", "/sessions/life/rewards", {"rewards": [{"reward": 1, "turn": 0}, {"grade": "good"}]})
    turns: list[Any] = [{"reward": 1, "turn": turn} for turn in (5, True)]
    for wrong in ({"reward": "much"}, *turns, {}, [], {"rewards": []}, {"half \ud83d of a pair": 1}, {"a\0b": 1}):
        assert served.call("POST", "/sessions/life/rewards", wrong)[0] == 400, wrong
    named = [(label["name"], label["turn"], label["value"]) for label in served.state("life")["labels"]]
    assert sorted(named, key=str) == sorted([("reward", None, 0.5), ("reward", 0, 1), ("grade", None, "good")], key=str)
    assert served.call("POST", "/sessions/life/seal")[1]["state"] == "sealed"
    served.call("HEAD", "/sessions/life/rows")
    assert served.state("life")["state"] == "sealed"
    status, body = served.chat("life", SUM)
    assert (status, body["error"]["code"]) == (409, "closed")
    [row] = served.rows("life")
    assert row["reward"] == 0.5
    assert served.state("life")["state"] == "exported"
    assert served.call("DELETE", "/sessions/life")[1]["state"] == "dropped"
    assert served.chat("life", SUM)[0] == 404
    assert served.call("GET", "/sessions/life")[0] == 404
    assert labels["labels"]


def test_rows_are_filtered_and_sent_in_each_format(served: Served) -> None:
    def fetched(path: str) -> tuple[bytes, Any]:
        with urllib.request.urlopen(served.url + path, timeout=60) as answer:
            return answer.read(), answer.headers

    for name in ("batch-a", "batch-b"):
        assert served.chat(name, SUM)[0] == 200
    assert served.call("POST", "/sessions/batch-a/seal")[0] == 200
    lines, headers = fetched("/rows?format=jsonl&search=batch-&keep_state=true")
    assert headers["content-type"] == "application/x-ndjson"
    assert served.state("batch-a")["state"] == "sealed"
    rows = {row["session"]: row["input_ids"] for row in map(json.loads, lines.splitlines())}
    raw, headers = fetched("/rows?format=arrow&state=sealed")
    assert headers["content-type"] == "application/vnd.apache.arrow.stream"
    assert pyarrow.ipc.open_stream(raw).read_all()["input_ids"].to_pylist() == [rows["batch-a"]]
    raw, headers = fetched("/sessions/batch-b/rows?format=parquet")
    assert headers["content-disposition"] == 'attachment; filename="batch-b.parquet"'
    assert pyarrow.parquet.read_table(io.BytesIO(raw))["input_ids"].to_pylist() == [rows["batch-b"]]
    assert fetched("/rows?state=sealed")[0] == b"", "it is exported now"
    for query in ("format=xml", "keep_state=maybe", "state=gone", "state=dropped", "sort=up"):
        assert served.call("GET", f"/rows?{query}")[0] == 400, query
    assert "must be one of jsonl, arrow, parquet, not 'xml'" in str(served.call("GET", "/rows?format=xml")[1])
    assert served.call("GET", "/sessions/batch-b/rows?state=open")[0] == 400


def test_a_request_is_a_trace_of_its_stages_without_its_messages() -> None:
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
