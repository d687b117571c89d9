"""A gateway that is killed repeatedly under load: every complete answer is recorded, and agents can continue."""

import asyncio
import http.client
import itertools
import json
import random
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.talking import Agent, Refused, Unfinished, every_kind
from tests.store.support import opened
from tests.support import FULL
from tests.trajectory.model import check_trajectory
from tokentrace.store.store import TurnRecord
from tokentrace.trajectory import Trajectory
from tokentrace.trajectory.storage import replay_records

ROUNDS = 100 if FULL else 1
SESSIONS = [f"s{at}" for at in range(5)]
ROUNDS_PER_STORE = 10
"""A new store is used after so many rounds, since each check reads all of it."""
GONE = (OSError, http.client.HTTPException, Unfinished, ValueError)


@contextmanager
def gateway(place: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Run a gateway in its own process; yields its URL and a function that kills it."""
    command = [sys.executable, "-m", "tokentrace", "serve", "--dev", "--port", "0", "--store", place, "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:"), "it did not start"
            yield url, process.kill
        finally:
            process.kill()


def load_and_kill(place: str, agents: list[Agent], answers: int) -> None:
    """Let all agents talk at once, and kill the gateway once they have received that many answers."""
    enough, received = threading.Event(), itertools.count(1)

    def talk(agent: Agent, url: str) -> None:
        try:
            while True:
                agent.ask(url)
                if next(received) >= answers:
                    enough.set()
        except GONE:
            return
        except Refused as refused:
            problems.append(refused)
            enough.set()

    problems: list[Refused] = []
    with gateway(place) as (url, kill):
        threads = [threading.Thread(target=talk, args=(agent, url)) for agent in agents]
        for thread in threads:
            thread.start()
        assert enough.wait(300)
        kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not problems


StoreContents = tuple[dict[str, list[TurnRecord]], dict[str, Trajectory], dict[str, list[Any]]]


async def read(place: str) -> StoreContents:
    """Read each session's turns, checked to be complete, its trajectory, and its incomplete requests."""
    async with opened(place) as store:
        turns, trajectories, incomplete = {}, {}, {}
        for session in SESSIONS:
            turns[session] = [turn async for turn in store.turns(session)]
            incomplete[session] = list(await store.incomplete(session))
            trajectory = trajectories[session] = Trajectory()
            for number, turn in enumerate(turns[session]):
                assert turn.number == number
                replay_records(trajectory, turn.records)
                assert turn.info["finish_reason"] in ("stop", "length")
                assert turn.info["stop"] - turn.info["start"] == turn.sampled > 0
            if turns[session]:
                check_trajectory(trajectory)
                info = await store.session(session)
                assert info is not None
                assert (info.turns, info.records) == (len(turns[session]), trajectory.num_writes)
        return turns, trajectories, incomplete


def stream_of(trajectory: Trajectory, turn: TurnRecord) -> list[int]:
    return trajectory.stream(turn.info["branch"])[: turn.info["stop"]].tolist()


def check(place: str, agents: list[Agent]) -> int:
    """Check that each answer is recorded on its agent's branch; returns the number of incomplete requests."""
    turns, trajectories, incomplete = asyncio.run(read(place))
    count = 0
    for session in SESSIONS:
        by_id = {turn.info["response"]: turn for turn in turns[session]}
        assert len(by_id) == len(turns[session])
        unfinished = {request["request"] for request in incomplete[session]}
        assert not unfinished & set(by_id), "a turn that was stored counts as incomplete"
        count += len(unfinished)
        for agent in agents:
            if agent.session != session:
                continue
            previous = None
            for answer in agent.answers:
                turn = by_id[answer.id]
                assert turn.sampled == answer.tokens, agent.name
                base = turn.info["base"]
                if base != previous:  # an answer that was lost has the same text: the same tokens, or ambiguous ones
                    assert base is not None, agent.name
                    assert previous is not None, agent.name
                    streams = [stream_of(trajectories[session], turns[session][number]) for number in (base, previous)]
                    assert streams[0] == streams[1] or turn.info["cause"]["cause"] == "ambiguous", agent.name
                assert (turn.info["reply"]["content"] or "") == answer.text
                previous = turn.number
    return count


def rows_of(url: str, session: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/sessions/{session}/rows?format=jsonl", timeout=60) as answer:
        return [json.loads(line) for line in answer.read().splitlines()]


@pytest.mark.parametrize("where", ["sqlite", "postgres"] if FULL else ["sqlite"])
def test_complete_answers_are_recorded_however_often_the_gateway_is_killed(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    rng = random.Random(where)
    incomplete = 0
    for round in range(ROUNDS):
        if not round % ROUNDS_PER_STORE:
            place = str(tmp_path / f"{round}.db") if where == "sqlite" else request.getfixturevalue("postgres").fresh()
            agents = every_kind(SESSIONS, 12)
        load_and_kill(place, agents, rng.randrange(8, 60 if FULL else 30))
        incomplete += check(place, agents)
    assert incomplete or not FULL, "the gateway was never killed in the middle of an answer"
    with gateway(place) as (url, _):
        for agent in agents:
            agent.ask(url)  # each continues after its last answer
        check(place, agents)
        for session in SESSIONS:
            rows = rows_of(url, session)
            recorded = {turn["response"] for row in rows for turn in row["turns"]}
            assert {answer.id for agent in agents if agent.session == session for answer in agent.answers} <= recorded
            sampled = sum(sum(row["loss_mask"]) for row in rows)
            assert sampled == sum(turn["stop"] - turn["start"] for row in rows for turn in row["turns"])
