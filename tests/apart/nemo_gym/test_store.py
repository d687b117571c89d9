"""NeMo Gym's conformance checks for durable token stores pass on our store, created from its settings."""

import asyncio
import sys
import typing
from collections.abc import Callable
from typing import Any

import pytest
from nemo_gym.token_id_capture import TokenIdCaptureConfig, stamp_continuation, stamp_lineage
from nemo_gym.token_id_capture.conformance import run_conformance
from nemo_gym.token_id_capture.protocols import LineageResolver, TokenSink, TokenSource
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry

from tokentrace.integrations.nemo_gym import TokenStore
from tokentrace.store.store import Closed, Conflict

CHECKS = [
    *("put_then_freeze_visibility", "idempotent_reput", "conflicting_reput", "mark_incomplete_durability"),
    *("freeze_idempotency", "post_freeze_write_safety", "conditional_retirement", "lineage_visibility"),
    *("fresh_client_lineage_visibility", "begin_call_custody"),
]
QUESTION = {"role": "user", "content": "What is 6 * 7?"}


@pytest.fixture(autouse=True)
def protocols_know_their_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """NeMo Gym's loader reads ``__protocol_attrs__``, which protocols have from Python 3.12 on."""
    if sys.version_info < (3, 12):
        members = property(lambda protocol: {name for name in vars(protocol) if not name.startswith("_")})
        monkeypatch.setattr(type(typing.Protocol), "__protocol_attrs__", members, raising=False)


def settings(place: str) -> dict[str, Any]:
    """The settings of a user's YAML file."""
    endpoint = "tokentrace.integrations.nemo_gym:TokenStore"
    block = {"enabled": True, "sink": endpoint, "sink_kwargs": {"store": place}}
    return {"token_id_capture": block | {"lineage_store": endpoint, "lineage_store_kwargs": {"store": place}}}


def test_the_conformance_checks_pass_on_the_configured_store(place: str) -> None:
    config = TokenIdCaptureConfig.model_validate(settings(place))

    def checked(build: Callable[[], Any], protocol: type) -> Callable[[], Any]:
        endpoint = build()
        assert isinstance(endpoint, TokenStore)
        assert isinstance(endpoint, protocol)
        asyncio.run(endpoint.close())
        return build

    sink, lineage = checked(config.build_sink, TokenSink), checked(config.build_lineage_store, LineageResolver)
    source = checked(lambda: TokenStore(place), TokenSource)
    assert asyncio.run(run_conformance(sink, source, lineage)) == CHECKS


def calls(deltas: bool) -> list[tuple[TokenEntry, list[dict[str, Any]]]]:
    """Three calls of one rollout, each continuing the previous one, with the messages of the next request."""
    entries: list[tuple[TokenEntry, list[dict[str, Any]]]] = []
    request: list[dict[str, Any]] = [QUESTION]
    stream: list[int] = []
    for number in range(3):
        new, generated = [10 * number, 10 * number + 1], [10 * number + 5]
        parent = entries[-1][0].model_call_id if entries else None
        is_delta = deltas and parent is not None
        entry = TokenEntry(
            rollout_id="one",
            model_call_id=f"call-{number}",
            prompt_token_ids=new if is_delta else stream + new,
            generation_token_ids=generated,
            generation_log_probs=[-0.5],
            output_items=[{"type": "message", "role": "assistant", "content": f"answer {number}"}],
            token_item_index=0,
            prompt_is_delta=is_delta,
            parent_call_id=parent,
            parent_resolution=ParentResolutionStatus.RESOLVED if parent else ParentResolutionStatus.ROOT,
        )
        stamp_continuation(entry, list(request))
        stream = stream + new + generated
        stamp_lineage(entry, parent, parent_resolution=entry.parent_resolution, cumulative=stream)
        request = [*request, *entry.output_items, {"role": "user", "content": f"and {number}?"}]
        entries.append((entry, request))
    return entries


@pytest.mark.parametrize("deltas", [False, True], ids=["whole prompts", "delta records"])
def test_a_parent_is_found_with_all_its_tokens(deltas: bool, place: str) -> None:
    async def check() -> None:
        sink, resolver = TokenStore(place), TokenStore(place)
        stream: list[int] = []
        for number, (entry, request) in enumerate(calls(deltas)):
            await sink.put(entry)
            stream += [10 * number, 10 * number + 1, 10 * number + 5]
            for one in (resolver, TokenStore(place)):
                reply = await one.resolve("one", request)
                assert reply.match is not None
                assert (reply.match.model_call_id, list(reply.match.cumulative_token_ids)) == (f"call-{number}", stream)
                if one is not resolver:
                    await one.close()
        assert (await resolver.resolve("one", [QUESTION])).status == ParentResolutionStatus.ROOT
        await sink.close()
        await resolver.close()

    asyncio.run(check())


def test_many_clients_put_and_resolve_at_once(place: str) -> None:
    """Each call is stored once, even if several clients put it."""

    async def check() -> None:
        clients = [TokenStore(place) for _ in range(3)]
        entries = [
            entry.model_copy(update={"model_call_id": f"c{n}"}) for n in range(8) for entry, _ in calls(False)[:1]
        ]
        await asyncio.gather(*(client.put(entry) for client in clients for entry in entries))
        await asyncio.gather(*(clients[0].resolve("one", [QUESTION]) for _ in range(4)))
        snapshot = await clients[1].freeze("one")
        assert sorted(entry.model_call_id for entry in snapshot.entries) == [f"c{n}" for n in range(8)]
        assert not snapshot.incomplete
        for client in clients:
            await client.close()

    asyncio.run(check())


def test_retired_rollouts_are_gone_for_good(place: str) -> None:
    async def check() -> None:
        store = TokenStore(place)
        (entry, request), *_ = calls(False)
        await store.put(entry)
        await store.resolve("one", request)
        with pytest.raises(Conflict, match="call-0"):
            await store.put(entry.model_copy(update={"generation_log_probs": [-0.25]}))
        snapshot = await store.freeze("one")
        with pytest.raises(Closed):
            await store.put(entry.model_copy(update={"model_call_id": "late"}))
        assert not await store.drop("one", snapshot_id="another", version=snapshot.version)
        assert await store.drop("one", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert not await store.drop("one", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        assert (await store.resolve("one", request)).status == ParentResolutionStatus.UNRESOLVED
        with pytest.raises(Closed):
            await store.freeze("one")
        await store.close()

    asyncio.run(check())
