"""Many sessions at once in one process: every row is exactly what the engine saw and sampled."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx2
import pytest

from tests.gateway.server import Served, gateway_server
from tests.gateway.talking import counting
from tests.support import FULL
from tests.trajectory.checker import check_trajectory
from tokentrace.engines import ScriptedEngine

SESSIONS, TURNS = 200, 5


async def talk(client: httpx2.AsyncClient, session: str) -> None:
    messages: list[dict[str, Any]] = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": f"{session}: what is {turn} + 1?"})
        body = {"model": "pocket", "messages": messages, "max_tokens": 20}
        answer = await client.post(f"/sessions/{session}/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])


async def talk_all(url: str) -> None:
    limits = httpx2.Limits(max_connections=SESSIONS)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(talk(client, f"s{at}") for at in range(SESSIONS)))


def streams_of(served: Served) -> list[list[int]]:
    """Every prompt with what was sampled after it, as the record has it."""
    found = []
    for at in range(SESSIONS):
        live = served.app.gateway.sessions.peek(f"s{at}")
        assert live is not None
        trajectory = live.session.trajectory
        check_trajectory(trajectory)
        assert (trajectory.num_samples, len(live.session.turns)) == (1, TURNS)
        found += [trajectory.stream()[: turn.stop].tolist() for turn in live.session.turns]
    return found


@pytest.mark.skipif(not FULL, reason="part of make test-long")
def test_every_row_is_exact_when_many_sessions_talk_at_once() -> None:
    with gateway_server(lambda: ScriptedEngine(counting, piece=3, record=False)) as served:
        asyncio.run(talk_all(served.url))
        seen = [[*prompt, *counting(prompt, None)] for prompt in served.prompts]  # type: ignore[arg-type]
        assert len(seen) == SESSIONS * TURNS
        assert sorted(streams_of(served)) == sorted(seen)
        exported = []
        for at in range(0, SESSIONS, 20):
            [row] = served.rows(f"s{at}")
            exported.append(row["ids"] if "ids" in row else row["input_ids"])
        assert all(ids in seen for ids in exported)
        assert served.app.gateway.admission.in_flight == 0
        assert not served.app.gateway.admission.under_way
