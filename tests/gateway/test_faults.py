"""Failing engines and stores: agents get an error of their API, nothing wrong is recorded, and work continues."""

import socket
from pathlib import Path

import apsw
import pytest

from tests.engines.faults import GARBAGE, UNAVAILABLE, Fault, FaultyEngine, Gate
from tests.gateway.server import gateway_server, until
from tests.gateway.talking import PATHS, Agent, Refused, answer_ids, counting, every_kind, pocket
from tokentrace.engines import EngineError, EngineUnavailable, ScriptedEngine


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("dialect", PATHS)
def test_an_engine_that_fails_leaves_no_turn_and_is_used_again(dialect: str, stream: bool) -> None:
    size = pocket().tokenizer.vocabulary.size
    engine = FaultyEngine(counting, vocab_size=size, piece=1)
    faults = {
        UNAVAILABLE: 503,
        GARBAGE: 502,
        Fault(EngineError): 502,
        Fault(EngineError, after=3): 200 if stream else 502,
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


def test_a_gateway_whose_engine_is_gone_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async def gone() -> None:
        raise EngineUnavailable("nobody answers")

    ready = {"draining": False, "paused": False, "store": "ok", "engine": "ok"}
    with gateway_server(lambda: ScriptedEngine(counting)) as served:
        assert served.call("GET", "/readyz") == (200, ready)
        monkeypatch.setattr(served.app.gateway.engine, "check", gone)
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
        for agent in [*agents, filled]:  # every agent continues its branch, and the record is complete
            agent.ask(served.url)
            state = served.state(agent.session)
            assert (state["turns"], state["rows"]) == (len(agent.answers), 1)
            assert [turn["response"] for turn in state["tree"]] == [answer.id for answer in agent.answers]


def test_a_client_that_never_reads_and_one_that_hangs_up_do_no_harm() -> None:
    """Their turns are stored or abandoned, their slots are freed, and other agents continue."""
    words = answer_ids("word " * 20_000)
    gate = Gate()
    script = lambda prompt, sampling: words if sampling.max_tokens > 12 else counting(prompt, sampling)  # noqa: E731
    body = {"messages": [{"role": "user", "content": "Go."}], "max_tokens": 30_000, "stream": True, "logprobs": True}
    with gateway_server(lambda: ScriptedEngine(script, piece=1000, latency=gate)) as served:
        gateway = served.app.gateway
        readers = [served.send("slow", body, buffer_size=1) for _ in range(3)]
        served.run(gate.waiting(3))
        served.run(gate.open(3))
        served.run(gate.waiting(3))
        vanished = readers.pop()
        vanished.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing resets the connection
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
        for reader in readers:  # they can still read everything later
            reader.settimeout(30)
            received = b""
            while b"[DONE]" not in received[-200:]:
                received += reader.recv(1 << 20)
            reader.close()
