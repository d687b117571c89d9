"""After any sequence of operations a store returns what a model of plain dictionaries does."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test

from tests.support import FULL
from tokentrace.store import store as stores
from tokentrace.store.store import Label, SessionInfo, State, Store, StoreError, TurnRecord, open_store

IDS = st.sampled_from(["a", "b", "A-2", "ü"])
KEYS = st.none() | st.sampled_from(["k1", "k2", "k3"])
REQUESTS = st.sampled_from(["r1", "r2", "r3"])
NAMES = st.lists(st.sampled_from(["n1", "n2", "n3"]), max_size=3)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
OBJECTS = st.dictionaries(st.text(max_size=3), JSON, max_size=2)
ORDER = list(State)


async def collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


def fits(search: str, id: str) -> bool:
    return search.lower() in id.lower() if search.isascii() else search in id


@dataclass
class SessionModel:
    """The expected contents of a session."""

    info: Any
    key: str | None
    turns: list[tuple[str, TurnRecord]] = field(default_factory=list)
    names: dict[str, int] = field(default_factory=dict)
    requests: dict[str, tuple[Any, str | None]] = field(default_factory=dict)
    labels: dict[tuple[int, str], Label] = field(default_factory=dict)


class StoreMachine(RuleBasedStateMachine):
    """A store and its model. Every rule checks the outcome that the model predicts, including errors."""

    new_place: Callable[[], str]
    loop: asyncio.AbstractEventLoop

    def __init__(self) -> None:
        super().__init__()
        self.where = self.new_place()
        self.store: Store = open_store(self.where)
        self.models: dict[str, SessionModel] = {}
        self.clock = 0.0

    sent = Bundle("sent")

    def do(self, work: Awaitable[Any], error: type[StoreError] | None = None) -> Any:
        if error is None:
            return self.loop.run_until_complete(work)
        with pytest.raises(error) as caught:
            self.loop.run_until_complete(work)
        assert type(caught.value) is error
        return None

    def expected_error(self, id: str, *allowed: State) -> type[StoreError] | None:
        if id not in self.models:
            return stores.Missing
        return None if self.models[id].info.state in allowed else stores.Closed

    @rule(id=IDS, key=KEYS, metadata=OBJECTS, options=OBJECTS)
    def create(self, id: str, key: str | None, metadata: Any, options: Any) -> None:
        self.clock += 1
        info = SessionInfo(id, State.OPEN, self.clock, metadata, options)
        model = self.models.get(id)
        key_is_taken = key is not None and any(other.key == key and name != id for name, other in self.models.items())
        if key_is_taken or (model is not None and key not in (None, model.key)):
            self.do(self.store.create(info, key=key), stores.KeyConflict)
            return
        if model is None:
            model = self.models[id] = SessionModel(info, key)
        assert self.do(self.store.create(info, key=key)) == model.info

    @rule(id=IDS, metadata=st.none() | OBJECTS, options=st.none() | OBJECTS)
    def update(self, id: str, metadata: Any, options: Any) -> None:
        work = self.store.update(id, metadata=metadata, settings=options)
        if id not in self.models:
            self.do(work, stores.Missing)
            return
        model, new = self.models[id], {"metadata": metadata, "settings": options}
        model.info = replace(model.info, **{name: value for name, value in new.items() if value is not None})
        assert self.do(work) == model.info

    @rule(id=IDS, state=st.sampled_from(State))
    def set_state(self, id: str, state: State) -> None:
        error = self.expected_error(id, *ORDER[: ORDER.index(state) + 1])
        self.do(self.store.set_state(id, state), error)
        if error is None:
            model = self.models[id]
            model.info = replace(model.info, state=state)
            self.models[id] = SessionModel(model.info, model.key) if state is State.DROPPED else model

    @rule(id=IDS, request=REQUESTS, info=OBJECTS)
    def begin(self, id: str, request: str, info: Any) -> None:
        error = self.expected_error(id, State.OPEN)
        self.do(self.store.begin(id, request, info), error)
        if error is None:
            requests = self.models[id].requests
            requests.pop(request, None)
            requests[request] = (info, None)

    @rule(id=IDS, request=REQUESTS, why=st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=5))
    def abandon(self, id: str, request: str, why: str) -> None:
        self.do(self.store.abandon(id, request, why))
        requests = self.models[id].requests if id in self.models else {}
        if request in requests and requests[request][1] is None:
            requests[request] = (requests[request][0], why)

    @rule(
        target=sent,
        id=IDS,
        request=REQUESTS,
        names=NAMES,
        records=st.lists(st.binary(max_size=200), max_size=3),
        channels=st.binary(max_size=100),
        info=OBJECTS,
        offsets=st.sampled_from([(0, 0)] * 6 + [(1, 0), (0, 1), (-1, 0)]),
        counts=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    )
    def append(
        self, id: str, request: str, names: Any, records: Any, channels: bytes, info: Any, offsets: Any, counts: Any
    ) -> Any:
        number, first = offsets
        if id in self.models:
            number, first = number + self.models[id].info.turns, first + self.models[id].info.records
        turn = TurnRecord(max(number, 0), first, tuple(records), info, channels, *counts)
        self.check_append(id, request, names, turn)
        return multiple((id, request, names, turn))

    @rule(arguments=sent)
    def append_again(self, arguments: Any) -> None:
        self.check_append(*arguments)

    def check_append(self, id: str, request: str, names: list[str], turn: TurnRecord) -> None:
        work = self.store.append(id, turn, request=request, names=names)
        turns = self.models[id].turns if id in self.models else []
        if turn.number < len(turns):
            writer, stored = turns[turn.number]
            if (writer, stored.records) == (request, turn.records):
                self.do(work)  # already stored: no error
                return
        error = self.expected_error(id, State.OPEN)
        if error is None and (turn.number, turn.first) != (self.models[id].info.turns, self.models[id].info.records):
            error = stores.Conflict
        self.do(work, error)
        if error is None:
            model = self.models[id]
            model.turns.append((request, turn))
            model.names.update(dict.fromkeys(names, turn.number))
            model.requests.pop(request, None)
            model.info = model.info.grown(turn)

    @rule(id=IDS, names=NAMES, turn=st.none() | st.integers(0, 2), value=JSON)
    def label(self, id: str, names: list[str], turn: int | None, value: Any) -> None:
        error = self.expected_error(id, State.OPEN, State.SEALED, State.EXPORTED)
        labels = [Label(name, value, turn) for name in names]
        self.do(self.store.label(id, labels), error)
        if error is None:
            self.models[id].labels.update({(-1 if turn is None else turn, one.name): one for one in labels})

    @rule()
    def reopen(self) -> None:
        self.do(self.store.close())
        self.store = open_store(self.where)

    @rule(search=st.sampled_from(["", "A", "ü", "0", '"', "\\", "%"]), state=st.none() | st.sampled_from(State))
    def listed(self, search: str, state: State | None) -> None:
        newest = sorted((one.info for one in self.models.values()), key=lambda info: -info.created)
        listed = self.do(collected(self.store.sessions(search=search, state=state)))
        # the search may match metadata, too
        expected = [one for one in newest if state in (None, one.state) and (one in listed or fits(search, one.id))]
        assert listed == expected

    @invariant()
    def agrees_with_the_model(self) -> None:
        for id in ("a", "b", "A-2", "ü"):
            model: Any = self.models.get(id) or SessionModel(None, None)
            assert self.do(self.store.session(id)) == model.info
            assert self.do(collected(self.store.turns(id))) == [turn for _, turn in model.turns]
            for name in ("n1", "n2", "n3"):
                assert self.do(self.store.turn_named(id, name)) == model.names.get(name)
            incomplete = {one["request"]: one for one in self.do(self.store.incomplete(id))}
            ages = {name: one["began"] for name, one in incomplete.items()}
            expected = {name: {**info, "request": name, "ended": why} for name, (info, why) in model.requests.items()}
            assert incomplete == {name: {**one, "began": ages[name]} for name, one in expected.items()}
            assert self.do(self.store.labels(id)) == [label for _, label in sorted(model.labels.items())]
        for key in ("k1", "k2", "k3"):
            owner = [one.info for one in self.models.values() if one.key == key]
            assert self.do(self.store.session_of_key(key)) == (owner[0] if owner else None)
        for state in State:
            count = sum(one.info.state is state for one in self.models.values())
            assert self.do(self.store.count(state)) == count

    def teardown(self) -> None:
        self.do(self.store.close())


@pytest.mark.parametrize(("kind", "examples"), [("sqlite", 8), ("postgres", 4)])
def test_a_store_agrees_with_a_model_of_dictionaries(
    kind: str, examples: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    names = (str(tmp_path / f"{number}.db") for number in itertools.count())
    new_place = names.__next__ if kind == "sqlite" else request.getfixturevalue("postgres").fresh
    limits = settings(max_examples=examples * (60 if FULL else 1), stateful_step_count=25, deadline=None)
    with closing(asyncio.new_event_loop()) as loop:  # one for all machines: separate loops sometimes stayed open
        machine = type("Machine", (StoreMachine,), {"new_place": staticmethod(new_place), "loop": loop})
        run_state_machine_as_test(machine, settings=limits)
