"""Training rows of a session, and what a trainer wants to know besides their tokens. Pure.

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
from .turns import RecordedTurn

LAYOUT: Final = Layout(parts=False, logprobs=True, rollout=True)
REWARD: Final = "reward"
_TABLE_TOKENS: Final = 1 << 18
_TABLE_ROWS: Final = 256
"""So many tokens or rows make a table."""


@dataclass(slots=True)
class SessionRows:
    """A session as it was read from a store: its record and its labels."""

    info: SessionInfo
    labels: Sequence[Label] = ()
    session: SessionRecord = field(init=False)
    _numbers: dict[int, int] = field(default_factory=dict)
    """The number of a turn by the number of the write that its completion is in the trajectory."""
    _channels: dict[int, bytes] = field(default_factory=dict)
    """Packed, by the number of the turn."""

    def __post_init__(self) -> None:
        # no request is placed here, so that messages need not be compared
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
        rows, problem = self._samples()
        samples: list[Sample] = []
        tokens = count = 0
        for sample in rows:
            samples.append(sample.replace(notes=(*sample.notes, problem)) if problem else sample)
            tokens += len(sample)
            if tokens >= _TABLE_TOKENS or len(samples) >= _TABLE_ROWS:
                yield self._table(samples, count)
                samples, tokens, count = [], 0, count + len(samples)
        if samples:
            yield self._table(samples, count)

    def _samples(self) -> tuple[Iterator[Sample], str]:
        """The rows with the session's reward. If that is not a number, without it, and the problem."""
        reward = next((label.value for label in self.labels if label.name == REWARD and label.turn is None), None)
        trajectory = self.session.trajectory
        try:
            return each_trajectory_sample(trajectory, reward=reward), ""
        except SampleError:
            problem = f"the session's reward is {shown(reward)}, which is not a finite number: left out"
            return each_trajectory_sample(trajectory), problem

    def _table(self, samples: Sequence[Sample], count: int) -> Any:
        id = self.info.id
        places = [
            SampleOrigin(id, 1, count + at, int(sample.messages.max(initial=-1)) + 1)
            for at, sample in enumerate(samples)
        ]
        table = samples_table(samples, places, LAYOUT)
        rows = [self._row(sample) for sample in samples]
        along = (self.session.trajectory.turns(sample.branch) for sample in samples)
        channels = channel_columns(
            [(len(sample), self._channels_of(turns, len(sample))) for sample, turns in zip(samples, along, strict=True)]
        )
        for each in session_fields():
            column = channels.get(each.name)
            if column is None:
                column = pyarrow().array([row[each.name] for row in rows], each.type)
            table = table.append_column(each, column)
        return table

    def _row(self, sample: Sample) -> dict[str, Any]:
        trajectory = self.session.trajectory
        branch = trajectory.branches[sample.branch]
        along = trajectory.turns(sample.branch)
        turns = [self._recorded(turn) for turn in along if turn.branch == sample.branch]
        cause, last = turns[0].cause, turns[-1]
        tools = self.session.roots[last.root][0]
        return {
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
        }

    def _recorded(self, turn: Turn) -> RecordedTurn:
        return self.session.turns[self._numbers[turn.write]]

    def _turn(self, recorded: RecordedTurn) -> dict[str, Any]:
        reward = next(
            (each.value for each in self.labels if each.name == REWARD and each.turn == recorded.number), None
        )
        return {
            **{name: _utf8(getattr(recorded, name)) for name in _TURN_FIELDS},
            "reward": as_float(reward) if is_number(reward) else None,
            **{name: [_utf8(text) for text in getattr(recorded, name)] for name in _TURN_LISTS},
        }

    def _channels_of(self, along: Sequence[Turn], length: int) -> dict[str, Channel]:
        """What engines reported about the tokens of a row besides logprobs."""
        pieces: dict[str, list[tuple[int, Any]]] = {}
        for turn in along:
            for name, values in unpack_channels(self._channels.get(self._numbers[turn.write]) or b"").items():
                pieces.setdefault(name, []).append((turn.start, values[: len(turn)]))
        return {name: Channel(length, tuple(spans)) for name, spans in pieces.items()}


_TURN_FIELDS: Final = {
    "number": "int32",
    "start": "int32",
    "stop": "int32",
    "finish_reason": "string",
    "dialect": "string",
    "model": "string",
    "response": "string",
    "choice": "int32",
    "stopped_by": "string",
    "reused": "int32",
    "time": "float64",
    "seconds": "float64",
}
_TURN_LISTS: Final = ("calls", "repairs", "notes", "wishes")
"""The fields of a `RecordedTurn` that a row has: single values, and lists of texts."""


def session_fields() -> list[Any]:
    """The columns that rows of sessions have besides those of all trajectories, as fields of an Arrow schema."""
    pa = pyarrow()

    def columns(kinds: Mapping[str, str]) -> list[Any]:
        return [pa.field(name, getattr(pa, kind)()) for name, kind in kinds.items()]

    def texts(*names: str) -> list[Any]:
        return columns(dict.fromkeys(names, "string"))

    lists = [pa.field(name, pa.list_(pa.string())) for name in _TURN_LISTS]
    turn = pa.struct([*columns(_TURN_FIELDS), pa.field("reward", pa.float64()), *lists])
    return [
        *texts("session", "state", "cause", "cause_detail"),
        *columns({"parent": "int32", "shared": "int32"}),
        pa.field("turns", pa.list_(turn)),
        *texts("metadata", "session_labels", "messages", "tools", "tokenizer", "template"),
        *channel_fields(),
    ]


def _text(value: Any) -> str:
    """JSON for people; with escapes if it has half of a surrogate pair, which UTF-8 cannot encode."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value, separators=(",", ":"))
    return text


def _utf8(value: Any) -> Any:
    """A text for a column: half surrogate pairs, which agents can send, become escapes."""
    return value.encode("utf-8", "backslashreplace").decode("utf-8") if isinstance(value, str) else value
