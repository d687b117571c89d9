"""NeMo Gym's own checks of a durable token store pass on ours.

nemo-gym 0.7 asks for Python 3.13.14, and its capture package needs orjson and pydantic alone; where it is not installed
these tests are skipped. A rollout is a session, a captured call is a turn, and a frozen rollout is a sealed session.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from tests.gateway.stores import session
from tokentrace.gateway.store import Conflict, Label, State, Store, StoreError, TurnRecord, open_store

pytest.importorskip("nemo_gym", reason="nemo-gym is not installed")

CHECKS = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
    "begin_call_custody",
]


class Client:
    """NeMo Gym's sink, source and lineage resolver over a store of its own, on a place that others share."""

    def __init__(self, place: str) -> None:
        self.store: Store = open_store(place)

    # -- the sink

    async def put(self, entry: Any) -> None:
        id, call = entry.rollout_id, entry.model_call_id
        payload = entry.model_dump_json().encode()
        await self.store.create(session(id))
        while True:
            number = await self.store.turn_named(id, call)
            if number is not None:
                there = await anext(self.store.turns(id, number))
                if there.records != (payload,):
                    raise Conflict(f"call {call!r} was captured with other tokens")
                return
            known = await self.store.session(id)
            assert known is not None
            turn = TurnRecord(known.turns, known.records, (payload,), {}, sampled=len(entry.generation_token_ids))
            with suppress(Conflict):  # another client was quicker: look again
                await self.store.append(id, turn, request=call, names=[call])
                return

    async def begin_call(self, id: str, call: str) -> None:
        await self.store.create(session(id))
        await self.store.begin(id, call, {})

    async def mark_incomplete(self, id: str, call: str = "") -> None:
        await self.store.create(session(id))
        await self.store.label(id, [Label(f"incomplete {call}", True)])  # a sealed session takes labels

    # -- the source

    async def freeze(self, id: str) -> Any:
        from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot

        await self.store.create(session(id))
        await self.store.set_state(id, State.SEALED)
        entries = tuple(await self.entries(id))
        lost = len(await self.store.incomplete(id))
        marks = len(await self.store.labels(id))
        return TokenCaptureSnapshot(id, entries, bool(lost + marks), f"{id} sealed", version=marks)

    async def drop(self, id: str, *, snapshot_id: str, version: int) -> bool:
        if (await self.freeze(id)).version != version:
            return False
        await self.store.set_state(id, State.DROPPED)
        return True

    # -- the resolver

    async def resolve(self, id: str, items: list[dict[str, Any]]) -> Any:
        from nemo_gym.token_id_capture.lineage import RolloutLineage

        lineage = RolloutLineage()
        for entry in await self.entries(id):
            lineage.add_entry(entry)
        return lineage.resolve(items)

    def is_process_shared(self) -> bool:
        return True

    async def entries(self, id: str) -> list[Any]:
        from nemo_gym.token_id_capture.records import TokenEntry

        return [TokenEntry.model_validate_json(turn.records[0]) async for turn in self.store.turns(id)]

    async def close(self) -> None:
        await self.store.close()


def test_the_conformance_checks_pass(place: str) -> None:
    from nemo_gym.token_id_capture.conformance import run_conformance

    def client() -> Client:
        return Client(place)

    assert asyncio.run(run_conformance(client, client, client)) == CHECKS


def test_the_checks_can_fail(place: str) -> None:
    """A sink that forgets what was already there is found out."""
    from nemo_gym.token_id_capture.conformance import ConformanceError, run_conformance

    class Forgetful(Client):
        async def put(self, entry: Any) -> None:
            with suppress(StoreError):
                await super().put(entry)

    with pytest.raises(ConformanceError, match="conflicting_reput"):
        asyncio.run(run_conformance(lambda: Forgetful(place), lambda: Client(place)))
