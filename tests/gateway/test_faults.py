"""Engines and stores that fail: agents are told so in their own words, nothing wrong is recorded, and it goes on."""

import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import apsw
import pytest

from tests.engines.faults import Breaks, Fault, FaultyEngine, Gate
from tests.gateway.server import Served, gateway_server, until
from tests.gateway.talking import PATHS, Agent, Refused, answer_ids, counting, every_kind, pocket
from tokentrace.engines import Capabilities, EngineError, LogprobKind, ScriptedEngine, VLLMEngine
from tokentrace.engines.http import Connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", PATHS)
def test_an_engine_that_fails_leaves_no_turn_and_is_asked_again(dialect: str, stream: bool) -> None:
    size = pocket().tokenizer.vocabulary.size
    engine = FaultyEngine(counting, vocab_size=size, piece=1)
    faults = {
        Fault.UNAVAILABLE: 503,
        Fault.GARBAGE: 502,
        Fault.WRONG_IDS: 502,
        Fault.FEW_LOGPROBS: 502,
        Fault.DIES: 200 if stream else 503,  # nothing was streamed: it may be asked again
        Breaks(0, EngineError("broken")): 502,
        Breaks(3, EngineError("broken")): 200 if stream else 502,
    }
    with gateway_server(lambda: engine) as served:
        agent = Agent("a", "s", dialect, stream)
        agent.ask(served.url)
        for at, (fault, status) in enumerate(faults.items(), 1):
            engine.faults.append(fault)
            with pytest.raises(Refused) as refused:
                agent.ask(served.url)
            assert refused.value.status == status, fault
            assert "Traceback" not in str(refused.value)
            agent.ask(served.url)
            state = served.state("s")
            assert (state["turns"], state["rows"], len(state["incomplete"])) == (at + 1, 1, at), fault
        assert served.app.gateway.admission.in_flight == 0


class ClosingEngine(BaseHTTPRequestHandler):
    """A server like vLLM's that hangs up in the middle of its answers, or answers with nonsense."""

    hangs_up_after = 2
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(200, {"data": [{"id": "pocket", "max_model_len": 4096}], "version": "0.12.0"})

    def _answer(self, status: int, value: Any) -> None:
        raw = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(raw)))
        self.send_header("content-type", "application/json")
        self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(raw)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for one in answer_ids("That is all.")[: self.hangs_up_after]:
            logprobs = {"content": [{"token": f"token_id:{one}", "logprob": -1.0, "top_logprobs": []}]}
            choice = {"index": 0, "token_ids": [one], "logprobs": logprobs, "finish_reason": None, "text": ""}
            frame = f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode()
            self.wfile.write(f"{len(frame):x}\r\n".encode() + frame + b"\r\n")
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


@pytest.fixture
def closing() -> Iterator[tuple[ThreadingHTTPServer, Served]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ClosingEngine)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    url, size = f"http://127.0.0.1:{server.server_address[1]}", pocket().tokenizer.vocabulary.size
    told = Capabilities("vllm", vocab_size=size, streams=True, logprobs=LogprobKind.PROCESSED)
    with gateway_server(lambda: VLLMEngine(Connection(url), told, check_echo=False)) as served:
        yield server, served
    server.shutdown()
    server.server_close()
    thread.join(30)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_an_engine_that_hangs_up_in_the_middle_of_its_answer(closing: Any, stream: bool) -> None:
    _, served = closing
    for dialect in PATHS:
        with pytest.raises(Refused) as refused:
            Agent("a", "s", dialect, stream).ask(served.url)
        assert refused.value.status in ((200, 502, 503) if stream else (502, 503))
    state = served.state("s")
    assert (state["turns"], len(state["incomplete"])) == (0, 3)


def test_a_gateway_whose_engine_is_gone_is_not_ready(closing: Any) -> None:
    server, served = closing
    ready = {"draining": False, "paused": False, "store": "ok", "engine": "ok"}
    assert served.call("GET", "/readyz") == (200, ready)
    server.shutdown()
    server.server_close()
    assert served.call("GET", "/readyz") == (503, {**ready, "engine": "unavailable"})
    assert served.call("GET", "/healthz")[0] == 200


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    with gateway_server(lambda: ScriptedEngine(counting, piece=2), store=str(tmp_path / "store.db")) as served:
        agents = every_kind([f"s{at}" for at in range(6)], 6)
        for agent in agents:
            agent.ask(served.url)
        connection: apsw.Connection = served.app.gateway.store._database._connections[0]  # type: ignore[attr-defined]
        pages = int(connection.pragma("page_count"))
        connection.pragma("max_page_count", pages)
        filled = Agent("filler", "filler")
        with pytest.raises(Refused) as refused:
            [filled.ask(served.url, "more and more " * 100) for _ in range(200)]
        assert refused.value.status == 503
        assert refused.value.body["error"]["code"] == "store"
        assert "no room left" in refused.value.body["error"]["message"]
        connection.pragma("max_page_count", 2**30)
        for agent in [*agents, filled]:  # every agent goes on in its line, and the record is whole
            agent.ask(served.url)
            state = served.state(agent.session)
            assert (state["turns"], state["rows"]) == (len(agent.heard), 1)
            assert [turn["response"] for turn in state["tree"]] == [heard.id for heard in agent.heard]


def slow_reader(served: Served, body: dict[str, Any]) -> socket.socket:
    """A client that sends a request and reads nothing; the system keeps as little for it as it can."""
    address = urlsplit(served.url)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    connection.connect((address.hostname, address.port))
    raw = json.dumps(body).encode()
    head = f"POST /sessions/slow/v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def test_a_reader_that_never_reads_and_one_that_hangs_up_harm_nobody() -> None:
    """Their turns are stored or given up, their places are free again, and others go on."""
    words = answer_ids("word " * 20_000)
    gate = Gate()
    script = lambda prompt, sampling: words if sampling.max_tokens > 12 else counting(prompt, sampling)  # noqa: E731
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 30_000, "stream": True, "logprobs": True}
    with gateway_server(lambda: ScriptedEngine(script, piece=1000, latency=gate)) as served:
        gateway = served.app.gateway
        readers = [slow_reader(served, body) for _ in range(3)]
        served.run(gate.waiting(3))
        served.run(gate.open(3))
        served.run(gate.waiting(3))
        vanished = readers.pop()
        vanished.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # hangs up without a word
        vanished.close()
        until(lambda: gateway.admission.in_flight <= 2)
        served.run(gate.open())
        for agent in every_kind(["others"], 6):
            assert agent.ask(served.url).text
        until(lambda: not gateway.admission.in_flight)
        state = served.state("slow")
        assert (state["turns"], len(state["incomplete"])) == (2, 1)
        assert state["incomplete"][0]["ended"] == "the agent went away"
        assert all(turn["stop"] - turn["start"] == len(words) for turn in state["tree"])
        for reader in readers:  # they may read it all later
            reader.settimeout(30)
            got = b""
            while b"[DONE]" not in got[-200:]:
                got += reader.recv(1 << 20)
            reader.close()
