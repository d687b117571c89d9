"""Exported rows: the engine's prompts and completions, each token in one row's loss, in every format."""

import asyncio
import io
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.ipc
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.gateway.recorded import Recording, random_tree, user
from tokentrace import create_renderer
from tokentrace.data.tables import read_samples, table_samples
from tokentrace.gateway.rows import Export, ExportFormat, export_rows
from tokentrace.pocket import POCKET
from tokentrace.samples.batches import collate
from tokentrace.store.store import Label, SessionInfo, State, Store, StoreError, open_store
from tokentrace.tokens.kinds import Kind

RENDERER = create_renderer(POCKET).silent()


@asynccontextmanager
async def temporary() -> AsyncIterator[Store]:
    store = open_store(None)
    try:
        yield store
    finally:
        await store.close()


def in_store(test: Callable[[Store], Awaitable[None]]) -> Callable[[], None]:
    """Run a test with a store."""

    async def main() -> None:
        async with temporary() as store:
            await test(store)

    return lambda: asyncio.run(main())


async def exported(store: Store, *ids: str, format: ExportFormat = ExportFormat.JSONL, **options: Any) -> bytes:
    sessions = [info for id in ids if (info := await store.session(id)) is not None]
    assert len(sessions) == len(ids)
    return b"".join([piece async for piece in export_rows(store, sessions, format, **options)])


async def rows_of(store: Store, *ids: str, **options: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (await exported(store, *ids, **options)).splitlines()]


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 14))
def test_each_sampled_token_is_in_the_loss_of_exactly_one_row(rng: random.Random, turns: int) -> None:
    async def check() -> None:
        async with temporary() as store:
            recording = await Recording(store, "tree", RENDERER).begin()
            await random_tree(recording, rng, turns)
            rows = await rows_of(store, "tree")
            trajectory = recording.session.trajectory
            trained = Counter(
                (trajectory.branches[row["branch"]].index, at)
                for row in rows
                for at, mask in enumerate(row["loss_mask"])
                if mask
            )
            sampled = {(turn.branch, at) for turn in recording.session.turns for at in range(turn.start, turn.stop)}
            assert set(trained) == sampled
            assert set(trained.values()) <= {1}
            assert sum(row["num_trained"] for row in rows) == sum(len(each.ids) for each in recording.completions)
            assert all(row["num_trained"] for row in rows)
            exported_turns = sorted(turn["number"] for row in rows for turn in row["turns"])
            rowless = [
                turn.number for turn in recording.session.turns if turn.branch not in {r["branch"] for r in rows}
            ]
            assert sorted([*exported_turns, *rowless]) == list(range(turns))
            for row in rows:
                check_row(row, recording)

    asyncio.run(check())


def check_row(row: dict[str, Any], recording: Recording) -> None:
    """Check that a row has the engine's prompts and completions, with their values at the right tokens."""
    for turn in row["turns"]:
        start, stop, number = turn["start"], turn["stop"], turn["number"]
        completion = recording.completions[number]
        assert row["input_ids"][:start] == recording.prompts[number]
        assert row["input_ids"][start:stop] == completion.ids.tolist()
        assert row["logprobs"][start:stop] == completion.logprobs.tolist()
        assert row["loss_mask"][start:stop] == [True] * (stop - start)
        assert turn["finish_reason"] == completion.finish_reason
    in_turns = {at for turn in row["turns"] for at in range(turn["start"], turn["stop"])}
    assert {at for at, mask in enumerate(row["loss_mask"]) if mask} == in_turns
    was_sampled = [kind == Kind.SAMPLED for kind in row["kinds"]]
    assert [logprob is not None for logprob in row["logprobs"]] == was_sampled
    if any(was_sampled):
        entropy = json.loads(row["channels"])["entropy"]
        assert [value is not None for value in entropy] == was_sampled
        for turn in row["turns"]:
            assert set(entropy[turn["start"] : turn["stop"]]) <= {turn["number"]}
    messages = json.loads(row["messages"])
    assert messages[-1]["role"] == "assistant"
    assert row["cause"] or row["branch"] == 0


@pytest.mark.parametrize("seed", range(3))
def test_all_formats_hold_the_same_rows(tmp_path: Path, seed: int) -> None:
    async def export_all() -> dict[ExportFormat, bytes]:
        async with temporary() as store:
            for name in ("one", "two"):
                recording = await Recording(store, name, RENDERER).begin(metadata={"task": 'ü"\ud800'})
                await random_tree(recording, random.Random(seed), 8)
            await store.label("one", [Label("reward", 0.5), Label("reward", -1, 0), Label("judge", {"ok": True})])
            return {format: await exported(store, "one", "two", format=format) for format in ExportFormat}

    exports = asyncio.run(export_all())
    lines = [json.loads(line) for line in exports[ExportFormat.JSONL].splitlines()]
    arrow = pyarrow.ipc.open_stream(exports[ExportFormat.ARROW]).read_all()
    parquet = pyarrow.parquet.read_table(io.BytesIO(exports[ExportFormat.PARQUET]))
    assert (arrow.column_names, arrow.schema.metadata) == (parquet.column_names, parquet.schema.metadata)
    assert plain(arrow.to_pylist()) == plain(parquet.to_pylist()) == lines
    for row in lines:
        assert row["labels"] == [
            id if one else -100 for id, one in zip(row["input_ids"], row["loss_mask"], strict=True)
        ]
    assert {row["reward"] for row in lines if row["session"] == "one"} == {0.5}
    assert {row["reward"] for row in lines if row["session"] == "two"} == {None}
    assert [json.loads(row["metadata"]) for row in lines] == [{"task": 'ü"\ud800'}] * len(lines)
    read = [list(table_samples(arrow))]
    for format in (ExportFormat.JSONL, ExportFormat.PARQUET):
        path = tmp_path / f"rows.{format}"
        path.write_bytes(exports[format])
        read.append(list(read_samples(path)))
    for samples in read:
        assert [sample.ids.tolist() for sample in samples] == [row["input_ids"] for row in lines]
        assert [sample.loss_mask for sample in samples] == [[int(one) for one in row["loss_mask"]] for row in lines]
        session_samples = [sample for sample in samples if sample.name == "one"]  # a batch has rewards, or it has none
        trained = sum(row["num_trained"] for row in lines if row["session"] == "one")
        assert int(np.sum(collate(session_samples, pad_id=0)["labels"] != -100)) == trained


def plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list):
        return [plain(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


@in_store
async def test_side_channels_are_aligned_with_their_tokens(store: Store) -> None:
    recording = await Recording(store, "s", RENDERER).begin()
    top = [[[310, -0.5], [311, -1.5]], [[4066, -0.25]]]
    layered = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    first = await recording.turn(
        [user("a")], [310], channels={"top_logprobs": top, "routed_experts": np.array(layered)}
    )
    history = [user("a"), dict(first.reply)]
    second = await recording.turn(
        [*history, user("b")], [320], channels={"routed_experts": [[9, 9], [8, 8]], "mask": ["x", "y"]}
    )
    await recording.turn([*history, user("b"), dict(second.reply), user("c")], [330])
    await recording.turn([*history, user("again")], [340, 341], channels={"routed_experts": ["odd", {}, None]})
    one, two = await rows_of(store, "s")
    (a, b, c), (d,) = one["turns"], two["turns"]
    routed = {at: value for at, value in enumerate(one["routed_experts"]) if value is not None}
    assert routed == {
        a["start"]: [[1, 2], [3, 4]],
        a["start"] + 1: [[5, 6], [7, 8]],
        b["start"]: [[9, 9]],
        b["start"] + 1: [[8, 8]],
    }
    assert len(one["routed_experts"]) == len(one["top_logprobs"]) == one["num_tokens"]
    assert {at for at, value in enumerate(one["top_logprobs"]) if value} == {a["start"], a["start"] + 1}
    assert one["top_logprobs"][a["start"]] == [{"id": 310, "logprob": -0.5}, {"id": 311, "logprob": -1.5}]
    assert {at: v for at, v in enumerate(json.loads(one["channels"])["mask"]) if v} == {
        b["start"]: "x",
        b["start"] + 1: "y",
    }
    assert c["start"] > b["stop"]
    # the shared beginning has its values, too; a channel that does not fit its column is JSON
    assert two["routed_experts"] is None
    experts = json.loads(two["channels"])["routed_experts"]
    assert experts[a["start"]] == [[1, 2], [3, 4]]
    assert experts[d["start"] : d["stop"]] == ["odd", {}, None]


@in_store
async def test_a_row_has_the_cause_of_its_branch_and_its_sessions_metadata(store: Store) -> None:
    recording = await Recording(store, "s", RENDERER).begin(metadata={"task": 7})
    turn = await recording.turn([user("a long question")], [310, 311], stopped_by="END", seconds=0.5)
    await recording.turn([user("a long question"), dict(turn.reply), user("more")], [312], version="v2")
    await recording.turn([user("a long question")], [313], unenforced=["x"])
    await store.label("s", [Label("reward", 2, 1), Label("reward", "good", 2), Label("ok", True)])
    one, two = await rows_of(store, "s")
    assert (one["cause"], one["cause_detail"], one["parent"], one["shared"]) == ("", "", -1, 0)
    assert (two["cause"], two["parent"], two["shared"]) == ("retry", 0, one["turns"][0]["start"])
    assert "earlier point" in two["cause_detail"]
    assert [turn["reward"] for turn in one["turns"]] == [None, 2.0]
    assert [turn["reward"] for turn in two["turns"]] == [None]
    assert (one["reward"], two["reward"]) == (None, None)
    assert json.loads(one["session_labels"]) == [
        {"name": "ok", "value": True, "turn": None},
        {"name": "reward", "value": 2, "turn": 1},
        {"name": "reward", "value": "good", "turn": 2},
    ]
    first = one["turns"][0]
    assert (first["stopped_by"], first["seconds"], first["response"], first["dialect"]) == ("END", 0.5, "r0", "chat")
    assert json.loads(one["metadata"]) == {"task": 7}
    assert [message["role"] for message in json.loads(one["messages"])] == ["user", "assistant"] * 2
    assert [json.loads(span["version"]) for span in one["versions"]] == [1, "v2"]
    assert (one["source"], one["sample"], two["sample"], one["num_messages"]) == ("s", 0, 1, 4)
    assert one["message_indices"][one["turns"][1]["start"]] == 3


@in_store
async def test_sealed_sessions_are_exported_when_the_last_byte_was_read_and_open_ones_stay_open(store: Store) -> None:
    for name in ("open", "sealed", "kept", "left"):
        await (await Recording(store, name, RENDERER).begin()).turn([user("a")], [310])
        if name != "open":
            await store.set_state(name, State.SEALED)

    async def state(id: str) -> State:
        info = await store.session(id)
        assert info is not None
        return info.state

    await exported(store, "kept", keep_state=True)
    assert await state("kept") is State.SEALED
    sessions = [await store.session(name) for name in ("open", "sealed")]
    pieces = export_rows(store, [info for info in sessions if info], ExportFormat.PARQUET)
    async for _ in pieces:
        assert await state("sealed") is State.SEALED
    assert (await state("open"), await state("sealed")) == (State.OPEN, State.EXPORTED)
    assert len(await rows_of(store, "sealed")) == 1  # it can be exported again
    unread = await store.session("left")
    assert unread is not None
    pieces = export_rows(store, [unread], ExportFormat.JSONL)
    await anext(pieces)
    await pieces.aclose()
    assert await state("left") is State.SEALED


@in_store
async def test_a_session_that_is_dropped_meanwhile_gives_no_rows_and_a_damaged_one_is_an_error(store: Store) -> None:
    await (await Recording(store, "s", RENDERER).begin()).turn([user("a")], [310])
    info = await store.session("s")
    assert info is not None
    lost = SessionInfo("s", State.OPEN, 1.0, turns=2)
    with pytest.raises(StoreError, match="1 of its 2 turns"):
        [table async for table in Export(store, [lost]).tables()]
    await store.set_state("s", State.DROPPED)
    assert await exported(store, "s") == b""
    assert [table async for table in Export(store, [info]).tables()] == []
