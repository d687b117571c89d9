"""Training rows of sessions. docs/rows.md specifies the columns."""

import asyncio
import io
import json
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from ..data.tables import CHANNELS, ROLLOUT, TableWriter, channel_values, sample_columns, samples_table
from ..errors import SampleError
from ..samples.sample import Sample
from ..samples.trajectories import each_trajectory_sample
from ..settings import as_float32
from ..store.packing import unpack_channels
from ..store.store import Closed, Label, SessionInfo, State, Store, StoreError, TurnRecord
from ..trajectory.channels import Channel
from ..trajectory.trajectory import Trajectory
from .session import SessionRecord
from .turns import RecordedTurn

Infos = AsyncIterable[SessionInfo] | Iterable[SessionInfo]
REWARD = "reward"
_TABLE_TOKENS = 1 << 18
_TABLE_ROWS = 256


@dataclass(slots=True)
class SessionRows:
    info: SessionInfo
    labels: Sequence[Label] = ()
    session: SessionRecord = field(init=False)
    _numbers: dict[int, int] = field(default_factory=dict)
    _channels: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # no request is placed here, so messages are never compared
        self.session = SessionRecord(Trajectory(name=self.info.id), lambda message: None)

    def add(self, *records: TurnRecord) -> None:
        for record in records:
            self.session.replay(record)
            self._numbers[record.first + len(record.records) - 1] = record.number
            if record.channels:
                self._channels[record.number] = record.channels

    @property
    def causes(self) -> list[str]:
        return [branch.cause for branch in self.session.trajectory.branches[1:] if branch.sampled]

    def tables(self) -> Iterator[Any]:
        if not self.session.trajectory.num_writes:
            return
        reward = self._reward(None)
        samples, places, tokens = list[Sample](), list[dict[str, Any]](), 0
        try:
            rows = each_trajectory_sample(self.session.trajectory, reward=reward)
        except SampleError:  # the reward is not a finite number; the labels still have it
            rows = each_trajectory_sample(self.session.trajectory)
        for number, sample in enumerate(rows):
            samples.append(sample)
            places.append(self._row(sample, number))
            tokens += len(sample)
            if tokens >= _TABLE_TOKENS or len(samples) >= _TABLE_ROWS:
                yield samples_table(samples, COLUMNS, places)
                samples, places, tokens = [], [], 0
        if samples:
            yield samples_table(samples, COLUMNS, places)

    def _reward(self, turn: int | None) -> Any:
        return next((one.value for one in self.labels if one.name == REWARD and one.turn == turn), None)

    def _row(self, sample: Sample, number: int) -> dict[str, Any]:
        trajectory = self.session.trajectory
        branch = trajectory.branches[sample.branch]
        along = trajectory.turns(sample.branch)
        writes = [turn.write for turn in along if turn.branch == sample.branch]
        turns = [self.session.turns[self._numbers[write]] for write in writes]
        cause, last = turns[0].cause, turns[-1]
        channels: dict[str, list[tuple[int, Any]]] = {}
        for turn in along:  # those of rollouts are in the trajectory
            packed = self._channels.get(self._numbers[turn.write], b"")
            for name, values in unpack_channels(packed).items():
                channels.setdefault(name, []).append((turn.start, values[: len(turn)]))
        stored = {name: Channel(len(sample), tuple(each)) for name, each in channels.items()}
        tools = self.session.roots[last.root][0]
        return {
            "source": self.info.id,
            "row": 1,
            "sample": number,
            "session": self.info.id,
            "state": str(self.info.state),
            "cause": branch.cause,
            "cause_detail": _utf8(cause.words) if cause is not None and branch.cause else "",
            "parent": branch.parent,
            "shared": branch.start,
            "turns": [self._turn(recorded) for recorded in turns],
            "metadata": _text(self.info.metadata),
            "session_labels": _text([asdict(label) for label in self.labels]),
            "messages": _text(self.session.conversation(last.number)),
            "tools": None if tools is None else _text(tools),
            "tokenizer": last.tokenizer,
            "template": last.template,
            **channel_values({**sample.channels, **stored}),
        }

    def _turn(self, turn: RecordedTurn) -> dict[str, Any]:
        reward = self._reward(turn.number)
        return {
            **{name: _utf8(getattr(turn, name)) for name in _TURN_FIELDS},
            "reward": as_float32(reward),
            **{name: [_utf8(text) for text in getattr(turn, name)] for name in _TURN_LISTS},
        }


_TURN_FIELDS = {
    **dict.fromkeys(("number", "start", "stop"), "int32"),
    **dict.fromkeys(("finish_reason", "dialect", "model", "response"), "string"),
    "choice": "int32",
    "stopped_by": "string",
    "reused": "int32",
    **dict.fromkeys(("time", "seconds"), "float64"),
}
_TURN_LISTS = ("calls", "repairs", "notes", "unenforced")

COLUMNS = {
    **sample_columns("labels", "logprobs", *ROLLOUT),
    **dict.fromkeys(("session", "state", "cause", "cause_detail"), "string"),
    **dict.fromkeys(("parent", "shared"), "int32"),
    "turns": [{**_TURN_FIELDS, "reward": "float64", **{name: ["string"] for name in _TURN_LISTS}}],
    **dict.fromkeys(("metadata", "session_labels", "messages", "tools", "tokenizer", "template"), "string"),
    **CHANNELS,
}


def _text(value: Any) -> str:
    return str(_utf8(json.dumps(value, ensure_ascii=False, separators=(",", ":"))))


def _utf8(value: Any) -> Any:
    """Escape lone surrogates, which agents can send."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value


class ExportFormat(StrEnum):
    JSONL = "jsonl"
    ARROW = "arrow"
    PARQUET = "parquet"

    @property
    def media_type(self) -> str:
        kinds = {"jsonl": "x-ndjson", "arrow": "vnd.apache.arrow.stream", "parquet": "vnd.apache.parquet"}
        return f"application/{kinds[self]}"


class Export:
    def __init__(self, store: Store, sessions: Infos) -> None:
        self._store, self._sessions = store, sessions
        self._sealed: list[str] = []
        self.sessions = self.rows = self.tokens = self.trained = self.longest = self.marked = 0
        self.causes: Counter[str] = Counter()

    async def tables(self) -> AsyncGenerator[Any]:
        async for info in _each(self._sessions):
            session = await self._read(info)
            if session is None:
                continue
            tables = session.tables()
            while (table := await asyncio.to_thread(next, tables, None)) is not None:
                lengths = table.column("num_tokens").to_pylist()
                self.rows += table.num_rows
                self.tokens += sum(lengths)
                self.longest = max([self.longest, *lengths])
                self.trained += sum(table.column("num_trained").to_pylist())
                yield table
            self.sessions += 1
            self.causes.update(session.causes)
            if info.state is State.SEALED:
                self._sealed.append(info.id)

    async def _read(self, info: SessionInfo) -> SessionRows | None:
        if info.state is State.DROPPED:
            return None
        session = SessionRows(info, await self._store.labels(info.id))
        turns = [turn async for turn in self._store.turns(info.id)]
        await asyncio.to_thread(session.add, *turns)
        if len(turns) >= info.turns:
            return session
        now = await self._store.session(info.id)
        if now is not None and now.state is not State.DROPPED:
            problem = f"it has {len(turns)} of its {info.turns} turns"
            raise StoreError(f"session {info.id!r} is damaged: {problem}")
        return None

    async def mark(self) -> None:
        """Mark sessions as exported that were sealed when read."""
        while self._sealed:
            with suppress(Closed):  # dropped meanwhile
                await self._store.set_state(self._sealed.pop(), State.EXPORTED)
                self.marked += 1


async def export_rows(
    store: Store, sessions: Infos, format: ExportFormat, *, keep_state: bool = False
) -> AsyncGenerator[bytes]:
    """Yield a file of rows; then, unless `keep_state`, mark sealed sessions exported."""
    export, pipe = Export(store, sessions), io.BytesIO()

    def take() -> bytes:
        data = pipe.getvalue()
        pipe.seek(0)
        pipe.truncate()
        return data

    writer = await asyncio.to_thread(TableWriter, f".{format}", pipe, COLUMNS)
    async with aclosing(export.tables()) as tables:
        async for table in tables:
            await asyncio.to_thread(writer.write, table)
            if piece := take():
                yield piece
    await asyncio.to_thread(writer.close)
    if piece := take():
        yield piece
    if not keep_state:
        await export.mark()


async def _each(sessions: Infos) -> AsyncIterator[SessionInfo]:
    if isinstance(sessions, AsyncIterable):
        async for info in sessions:
            yield info
    else:
        for info in sessions:
            yield info
