"""Several gateways with one store: any of them serves any session, and none can fork its record."""

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines.faults import FaultyEngine, Gate
from tests.gateway.server import Served, gateway_server, until
from tests.gateway.talking import Agent, Refused, counting, every_kind
from tests.trajectory.model import check_trajectory
from tokentrace.trajectory import to_bytes


def scripted(**options: Any) -> FaultyEngine:
    return FaultyEngine(counting, piece=2, **options)


@contextlib.contextmanager
def two_gateways(
    place: str, engine: Callable[[], FaultyEngine] = scripted, **settings: Any
) -> Iterator[tuple[Served, Served]]:
    with (
        gateway_server(engine, store=place, **settings) as one,
        gateway_server(engine, store=place, **settings) as other,
    ):
        yield one, other


def record_of(served: Served, session: str) -> Any:
    """A gateway's record of a session, checked to be consistent."""

    async def read() -> Any:
        async with served.app.gateway.sessions.locked(session) as live:
            check_trajectory(live.session.trajectory)
            return live.session

    return served.run(read())


def check_exact(served: list[Served], sessions: list[str]) -> None:
    """Check that all gateways have the same record, with each prompt that the engines saw exactly once."""
    seen = sorted(prompt for each in served for prompt in each.prompts)
    recorded = []
    for session in sessions:
        records = [record_of(each, session) for each in served]
        assert len({to_bytes(record.trajectory) for record in records}) == 1, session
        for turn in records[0].turns:
            stream = records[0].trajectory.stream(turn.branch).tolist()
            prompt, completion = stream[: turn.start], stream[turn.start : turn.stop]
            assert completion == counting(prompt, None)[: len(completion)]  # type: ignore[arg-type]
            recorded.append(prompt)
    assert sorted(recorded) == seen


def test_an_agent_that_switches_gateways_gives_one_row(place: str) -> None:
    with two_gateways(place) as served:
        agents = every_kind([f"s{at}" for at in range(7)], 7)
        agents[5].previous = True
        rng = random.Random(0)
        for _ in range(4):
            for agent in agents:
                agent.ask(rng.choice(served).url)
        check_exact([*served], [agent.session for agent in agents])
        for agent in agents:
            state = served[0].state(agent.session)
            assert (state["turns"], state["rows"], state["incomplete"]) == (4, 1, [])
            assert [turn["response"] for turn in state["tree"]] == [answer.id for answer in agent.answers]
            assert [turn["base"] for turn in state["tree"]] == [None, 0, 1, 2]
            assert state == served[1].state(agent.session)


def test_many_agents_write_to_one_session_at_both_gateways_at_once(place: str) -> None:
    """Despite many conflicts no turn is lost or duplicated, and each agent's turns form one branch."""
    with two_gateways(place) as served:
        agents = every_kind(["storm"], 40)

        def talk(at: int) -> None:
            for turn in range(3):
                agents[at].ask(served[(at + turn) % 2].url)

        with ThreadPoolExecutor(len(agents)) as threads:
            list(threads.map(talk, range(len(agents))))
        check_exact([*served], ["storm"])
        state = served[0].state("storm")
        assert (state["turns"], state["rows"], state["incomplete"]) == (120, 40, [])
        number = {turn["response"]: turn["turn"] for turn in state["tree"]}
        assert len(number) == 120
        for agent in agents:
            line = [number[answer.id] for answer in agent.answers]
            assert [state["tree"][at]["base"] for at in line] == [None, *line[:-1]]
            assert len({state["tree"][at]["branch"] for at in line}) == 1


def test_a_repeated_request_is_answered_once_at_any_gateway(place: str) -> None:
    with two_gateways(place) as served:
        for dialect in ("chat", "messages", "responses"):
            for stream in (False, True):
                first = Agent("a", f"{dialect}-{stream}", dialect, stream)
                answer = first.ask(served[0].url, "Hello?", idempotency_key="k")
                retry = Agent("a", first.session, dialect, stream)
                assert retry.ask(served[1].url, "Hello?", idempotency_key="k") == answer
                assert served[0].state(first.session)["turns"] == 1
        assert len(served[0].prompts) + len(served[1].prompts) == 6


def test_a_repeated_request_waits_for_the_other_gateway(place: str) -> None:
    gate = Gate()
    with two_gateways(place, lambda: scripted(latency=gate)) as (one, other), ThreadPoolExecutor(2) as threads:
        first = threads.submit(Agent("a", "s").ask, one.url, "Hello?", idempotency_key="k")
        one.run(gate.waiting())
        until(lambda: one.state("s")["incomplete"])
        retry = threads.submit(Agent("a", "s").ask, other.url, "Hello?", idempotency_key="k")
        until(lambda: other.app.gateway.admission.under_way)
        one.run(gate.open())
        assert first.result(60) == retry.result(60)
        assert not other.prompts
        assert one.state("s")["turns"] == 1


def test_changes_to_a_session_at_one_gateway_hold_at_the_other(place: str) -> None:
    with two_gateways(place) as (one, other):
        agent = Agent("a", "s")
        agent.ask(one.url)
        agent.ask(other.url)
        assert one.call("POST", "/sessions/s/rewards", {"reward": 0.5})[0] == 200
        assert other.call("POST", "/sessions/s/rewards", {"reward": 1, "turn": 1})[0] == 200
        labels = [(each["turn"], each["value"]) for each in one.state("s")["labels"]]
        assert labels == [(None, 0.5), (1, 1)]
        assert other.call("PATCH", "/sessions/s", {"settings": {"max_turns": 2}})[0] == 200
        with pytest.raises(Refused) as refused:
            agent.ask(one.url)
        assert (refused.value.status, refused.value.body["error"]["code"]) == (403, "budget_exhausted")
        assert (
            other.call("PATCH", "/sessions/s", {"settings": {"max_turns": None, "sampling": {"max_tokens": 2}}})[0]
            == 200
        )
        assert agent.ask(one.url).tokens == 2
        assert one.call("POST", "/sessions/s/seal")[1]["state"] == "sealed"
        for stream in (False, True):
            agent.stream = stream
            with pytest.raises(Refused) as refused:
                agent.ask(other.url)
            assert (refused.value.status, refused.value.body["error"]["code"]) == (409, "closed")
        assert other.call("DELETE", "/sessions/s")[0] == 200
        with pytest.raises(Refused) as refused:
            agent.ask(one.url)
        assert refused.value.status == 404
        assert one.call("GET", "/sessions/s")[0] == 404
        assert one.call("POST", "/sessions", {"id": "s"})[0] == 409
