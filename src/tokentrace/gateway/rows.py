"""Training rows of a session, with what a trainer wants to know of them beside their tokens. Pure.

docs/rows.md is the specification of the columns.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from ..data.channel_columns import channel_columns, channel_fields
from ..data.sources import pyarrow
from ..data.tables import Layout, SampleOrigin, samples_table
from ..errors import SampleError, shown
from ..samples.sample import Sample
from ..samples.trajectories import each_trajectory_sample
from ..settings import as_float, is_number
from ..store.packing import unpack_channels
from ..store.store import Label, SessionInfo, TurnRecord
from ..trajectory.channels import Channel
from ..trajectory.trajectory import Trajectory
from ..trajectory.turns import Turn
from .session import SessionRecord
from .turns import Recorded

LAYOUT: Final = Layout(parts=False, logprobs=True, rollout=True)
REWARD: Final = "reward"
_TABLE_TOKENS: Final = 1 << 18
_TABLE_ROWS: Final = 256
"""So many tokens or rows make a table."""


@dataclass(slots=True)
class SessionRows:
    """A session as it was read from a store: its record, and what was said of it."""

    info: SessionInfo
    labels: Sequence[Label] = ()
    session: SessionRecord = field(init=False)
    _numbers: dict[int, int] = field(default_factory=dict)
    """The number of a turn by the number of the write that its completion is in the trajectory."""
    _channels: dict[int, bytes] = field(default_factory=dict)
    """Packed, by the number of the turn."""

    def __post_init__(self) -> None:
        # nobody looks for a turn here, so that messages need not be compared
        self.session = SessionRecord(Trajectory(name=self.info.id), lambda message: None)

    def add(self, record: TurnRecord) -> None:
        """Add the next turn of the store."""
        self.session.replay(record)
        self._numbers[record.first + len(record.records) - 1] = record.number
        if record.channels:
            self._channels[record.number] = record.channels

    @property
    def causes(self) -> list[str]:
        """Why each branch after the first that makes a row began."""
        return [branch.cause for branch in self.session.trajectory.branches[1:] if branch.sampled]

    def tables(self) -> Iterator[Any]:
        """The rows as Arrow tables of some rows each, in the order of branches."""
        if not self.session.trajectory.num_writes:
            return
        found, problem = self._samples()
        samples: list[Sample] = []
        tokens = made = 0
        for sample in found:
            samples.append(sample.replace(notes=(*sample.notes, problem)) if problem else sample)
            tokens += len(sample)
            if tokens >= _TABLE_TOKENS or len(samples) >= _TABLE_ROWS:
                yield self._table(samples, made)
                samples, tokens, made = [], 0, made + len(samples)
        if samples:
            yield self._table(samples, made)

    def _samples(self) -> tuple[Iterator[Sample], str]:
        """The rows with the session's reward; without it, and with what is wrong with it, where it is not a number."""
        given = next((label.value for label in self.labels if label.name == REWARD and label.turn is None), None)
        trajectory = self.session.trajectory
        try:
            return each_trajectory_sample(trajectory, reward=given), ""
        except SampleError:
            problem = f"the session's reward is {shown(given)}, which is not a finite number: left out"
            return each_trajectory_sample(trajectory), problem

    def _table(self, samples: Sequence[Sample], made: int) -> Any:
        id = self.info.id
        places = [
            SampleOrigin(id, 1, made + at, int(sample.messages.max(initial=-1)) + 1)
            for at, sample in enumerate(samples)
        ]
        table = samples_table(samples, places, LAYOUT)
        rows = [self._row(sample) for sample in samples]
        along = (self.session.trajectory.turns(sample.branch) for sample in samples)
        told = channel_columns(
            [(len(sample), self._channels_of(turns, len(sample))) for sample, turns in zip(samples, along, strict=True)]
        )
        for each in session_fields():
            column = told.get(each.name)
            if column is None:
                column = pyarrow().array([row[each.name] for row in rows], each.type)
            table = table.append_column(each, column)
        return table

    def _row(self, sample: Sample) -> dict[str, Any]:
        trajectory = self.session.trajectory
        branch = trajectory.branches[sample.branch]
        along = trajectory.turns(sample.branch)
        own = [self._recorded(turn) for turn in along if turn.branch == sample.branch]
        cause, last = own[0].cause, own[-1]
        tools = self.session.roots[last.root][0]
        return {
            "session": self.info.id,
            "state": str(self.info.state),
            "cause": branch.cause,
            "cause_detail": _utf8(cause.words) if cause is not None and branch.cause else "",
            "parent": branch.parent,
            "shared": branch.start,
            "turns": [self._turn(recorded) for recorded in own],
            "metadata": _text(self.info.metadata),
            "session_labels": _text([asdict(label) for label in self.labels]),
            "messages": _text(self.session.conversation(last.number)),
            "tools": None if tools is None else _text(tools),
            "tokenizer": last.notes.get("tokenizer"),
            "template": last.notes.get("template"),
        }

    def _recorded(self, turn: Turn) -> Recorded:
        return self.session.turns[self._numbers[turn.write]]

    def _turn(self, recorded: Recorded) -> dict[str, Any]:
        notes = recorded.notes
        reward = next(
            (each.value for each in self.labels if each.name == REWARD and each.turn == recorded.number), None
        )
        return {
            **{name: getattr(recorded, name) for name in _OF_TURN},
            "reward": as_float(reward) if is_number(reward) else None,
            **{name: _utf8(notes.get(name)) for name in _NOTED},
            **{name: [_utf8(str(each)) for each in notes.get(name) or ()] for name in _LISTS},
        }

    def _channels_of(self, along: Sequence[Turn], length: int) -> dict[str, Channel]:
        """What engines said of the tokens of a row beside logprobs."""
        pieces: dict[str, list[tuple[int, Any]]] = {}
        for turn in along:
            for name, values in unpack_channels(self._channels.get(self._numbers[turn.write]) or b"").items():
                pieces.setdefault(name, []).append((turn.start, values[: len(turn)]))
        return {name: Channel(length, tuple(found)) for name, found in pieces.items()}


_OF_TURN: Final = {"number": "int32", "start": "int32", "stop": "int32", "finish_reason": "string"}
_NOTED: Final = {
    "dialect": "string",
    "model": "string",
    "response": "string",
    "choice": "int32",
    "stopped_by": "string",
    "reused": "int32",
    "time": "float64",
    "seconds": "float64",
}
_LISTS: Final = ("calls", "repairs", "notes", "wishes")
"""What a row says of each turn: of its place, of its notes, and of its notes that are lists of texts."""


def session_fields() -> list[Any]:
    """The columns that rows of sessions have beside those of all trajectories, as fields of an Arrow schema."""
    pa = pyarrow()

    def columns(kinds: Mapping[str, str]) -> list[Any]:
        return [pa.field(name, getattr(pa, kind)()) for name, kind in kinds.items()]

    def texts(*names: str) -> list[Any]:
        return columns(dict.fromkeys(names, "string"))

    lists = [pa.field(name, pa.list_(pa.string())) for name in _LISTS]
    turn = pa.struct([*columns(_OF_TURN), pa.field("reward", pa.float64()), *columns(_NOTED), *lists])
    return [
        *texts("session", "state", "cause", "cause_detail"),
        *columns({"parent": "int32", "shared": "int32"}),
        pa.field("turns", pa.list_(turn)),
        *texts("metadata", "session_labels", "messages", "tools", "tokenizer", "template"),
        *channel_fields(),
    ]


def _text(value: Any) -> str:
    """JSON for people; with escapes where it has half of a surrogate pair, which UTF-8 cannot hold."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def _utf8(value: Any) -> Any:
    """A text as columns can hold it: half surrogate pairs, which agents can send, are written as escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
