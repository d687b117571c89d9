"""A gateway that is killed under load, again and again: what an agent heard to its end is recorded, and goes on."""

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
AFRESH = 10
"""After so many rounds the store is a new one: each check reads everything."""
GONE = (OSError, http.client.HTTPException, Unfinished, ValueError)


@contextmanager
def gateway(place: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """A gateway in a process of its own: its URL, and what kills it."""
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
    """Let all agents talk at once, and kill the gateway when they have heard so many answers."""
    enough, heard = threading.Event(), itertools.count(1)

    def talk(agent: Agent, url: str) -> None:
        try:
            while True:
                agent.ask(url)
                if next(heard) >= answers:
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
        assert enough.wait(60)
        kill()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    assert not problems


Recorded = tuple[dict[str, list[TurnRecord]], dict[str, Trajectory], dict[str, list[Any]]]


async def read(place: str) -> Recorded:
    """What is in the store: all turns, each of them whole, their tokens, and the requests that gave none."""
    async with opened(place) as store:
        turns, tokens, incomplete = {}, {}, {}
        for session in SESSIONS:
            turns[session] = [turn async for turn in store.turns(session)]
            incomplete[session] = list(await store.incomplete(session))
            trajectory = tokens[session] = Trajectory()
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
        return turns, tokens, incomplete


def stream_of(trajectory: Trajectory, turn: TurnRecord) -> list[int]:
    return trajectory.stream(turn.info["branch"])[: turn.info["stop"]].tolist()


def check(place: str, agents: list[Agent]) -> int:
    """Everything that was heard is there, in its line; what was not is there whole, or listed. How many are listed."""
    turns, tokens, incomplete = asyncio.run(read(place))
    listed = 0
    for session in SESSIONS:
        by_id = {turn.info["response"]: turn for turn in turns[session]}
        assert len(by_id) == len(turns[session])
        left = {request["request"] for request in incomplete[session]}
        assert not left & set(by_id), "a turn that was stored counts as incomplete"
        listed += len(left)
        for agent in agents:
            if agent.session != session:
                continue
            before = None
            for heard in agent.heard:
                turn = by_id[heard.id]
                assert turn.sampled == heard.tokens, agent.name
                base = turn.info["base"]
                if base != before:  # an answer that was not heard says the same: of like tokens, or not told apart
                    assert base is not None, agent.name
                    assert before is not None, agent.name
                    streams = [stream_of(tokens[session], turns[session][number]) for number in (base, before)]
                    assert streams[0] == streams[1] or turn.info["cause"]["cause"] == "ambiguous", agent.name
                assert (turn.info["reply"]["content"] or "") == heard.text
                before = turn.number
    return listed


def rows_of(url: str, session: str) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"{url}/sessions/{session}/rows?format=jsonl", timeout=60) as answer:
        return [json.loads(line) for line in answer.read().splitlines()]


@pytest.mark.parametrize("where", ["sqlite", "postgres"] if FULL else ["sqlite"])
def test_what_was_heard_to_its_end_is_recorded_however_often_it_is_killed(
    where: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    chance = random.Random(where)
    listed = 0
    for round in range(ROUNDS):
        if not round % AFRESH:
            place = str(tmp_path / f"{round}.db") if where == "sqlite" else request.getfixturevalue("postgres").fresh()
            agents = every_kind(SESSIONS, 12)
        load_and_kill(place, agents, chance.randrange(8, 60 if FULL else 30))
        listed += check(place, agents)
    assert listed or not FULL, "the gateway was never killed in the middle of an answer"
    with gateway(place) as (url, _):
        for agent in agents:
            agent.ask(url)  # each goes on from what it heard last
        check(place, agents)
        for session in SESSIONS:
            rows = rows_of(url, session)
            recorded = {turn["response"] for row in rows for turn in row["turns"]}
            assert {heard.id for agent in agents if agent.session == session for heard in agent.heard} <= recorded
            sampled = sum(sum(row["loss_mask"]) for row in rows)
            assert sampled == sum(turn["stop"] - turn["start"] for row in rows for turn in row["turns"])
