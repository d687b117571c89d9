"""A random walk: legal operations are applied to a trajectory and its model; illegal ones must change nothing."""

import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.trajectory.model import Model, assert_same, check_trajectory
from tokentrace.errors import ExtensionError, TrajectoryError
from tokentrace.rendering import BridgedTokens
from tokentrace.tokens.kinds import Kind
from tokentrace.tokens.table import TokenTable
from tokentrace.trajectory import LogprobKind, Trajectory, from_bytes, to_bytes

VOCABULARY = 6  # few ids, so that prompts share prefixes by chance
LATER = [Kind.CONTEXT, Kind.SCAFFOLD, Kind.SYNTHETIC]


def bridged(stream: list[int], completion: list[int], ids: Any, kinds: Any, owners: Any, messages: int) -> Any:
    new = TokenTable.of(np.array(ids, np.int32), np.array(kinds, np.uint8), np.array(owners, np.int32))
    return BridgedTokens(stream[: len(stream) - len(completion)], completion, new, messages)


class Walk:
    def __init__(self, seed: int, *, rewards: bool = True) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.trajectory = Trajectory(
            name=f"walk {seed}",
            vocab_size=VOCABULARY,
            logprobs=self.random.random() < 0.8,
            metadata={"seed": seed, "nested": {"list": [1, 2.5, None, True]}},
        )
        self.legal: list[Callable[[], None]] = [*[self.context] * 2, *[self.completion] * 3, self.continuation]
        self.legal += [self.bridge, self.extend, self.branch, self.read]
        self.legal += [self.reward] if rewards else []  # rewards are no writes

    def step(self) -> int:
        """Apply random operations and return their number."""
        if not self.model.branches:
            self.begin()
        elif self.random.random() < 0.1:
            return self.illegal()
        else:
            self.random.choice(self.legal)()
        return 1

    def verify(self) -> None:
        if self.model.branches:
            assert_same(self.model, self.trajectory)

    def verify_storage(self) -> None:
        check_trajectory(self.trajectory)
        loaded = from_bytes(to_bytes(self.trajectory))
        assert not loaded.truncated
        assert_same(self.model, loaded.trajectory)
        assert to_bytes(loaded.trajectory) == to_bytes(self.trajectory)
        assert loaded.trajectory.metadata == self.trajectory.metadata

    # -- pieces

    def ids(self, low: int = 1, high: int = 5) -> list[int]:
        return [self.random.randrange(VOCABULARY) for _ in range(self.random.randint(low, high))]

    def shaped(self, ids: list[int]) -> Any:
        shape = self.random.choice([list, tuple, np.int32, np.int64, np.uint8])
        return shape(ids) if shape in (list, tuple) else np.array(ids, shape)

    def new_kinds(self, count: int, allowed: list[Kind] = LATER) -> list[Kind]:
        return [self.random.choice(allowed) for _ in range(count)]

    def spans(self, count: int, messages: int) -> list[tuple[int, int, int]]:
        if not messages:
            return []
        cuts = sorted(self.random.sample(range(count + 1), min(count + 1, 2 * self.random.randint(0, 2))))
        return [
            (start, stop, self.random.randrange(messages)) for start, stop in zip(cuts[::2], cuts[1::2], strict=False)
        ]

    def target(self) -> tuple[int, int | None]:
        if self.random.random() < 0.7:
            return self.model.current, None
        index = self.random.randrange(len(self.model.branches))
        return index, index

    def sampled(self, count: int) -> tuple[Any, list[float] | None]:
        if not self.trajectory.has_logprobs:
            return None, None
        exact = np.array([-self.random.expovariate(1) for _ in range(count)], np.float32)
        return (exact if self.random.random() < 0.5 else exact.tolist()), exact.tolist()

    def turn(self, count: int) -> dict[str, Any]:
        version: Any = self.random.choice([None, 3, "step-7", "spans"])
        by_token = [] if version is None else [version] * count
        if version == "spans":
            cuts = sorted({0, count, *(self.random.randint(0, count) for _ in range(2))})
            version = [(k, a, b) for k, (a, b) in enumerate(pairwise(cuts))]
            by_token = [k for k, a, b in version for _ in range(a, b)]
        return {
            "finish_reason": self.random.choice(["stop", "length", "tool_calls", "abort"]),
            "version": version,
            "sampling": self.random.choice([None, {"temperature": 1.0, "stop": ["x"]}, {"seed": 5}]),
            "logprobs_kind": self.random.choice([*LogprobKind] if self.trajectory.has_logprobs else ["unknown"]),
            "cached_tokens": self.random.choice([None, 0, 7]),
            "by_token": by_token,
            "channels": self.channels(count),
            "rewards": {},
        }

    def channels(self, count: int) -> dict[str, list[Any]]:
        whole = self.random.choice([200, 60_000, 2**40])
        values = {
            "experts": [[[self.random.randrange(whole) for _ in range(2)] for _ in range(3)] for _ in range(count)],
            "mask": [self.ids(0, 4) for _ in range(count)],
            "top": [[[1, -0.5], [2, -1.25]] for _ in range(count)],
            "seldom": [self.random.choice([None, {"a": [1, True]}]) for _ in range(count)],
        }
        return {name: values[name] for name in self.random.sample(sorted(values), self.random.choice([0, 0, 0, 1, 4]))}

    def as_accepted(self, name: str, entries: list[Any]) -> Any:
        if name == "experts" and entries and self.random.random() < 0.5:
            return np.array(entries, np.int64)
        return self.random.choice([tuple, list])(entries)

    # -- legal operations

    def begin(self) -> None:
        ids = self.ids(1, 8)
        kinds: Any = self.random.choice([Kind.PROMPT, self.new_kinds(len(ids), [Kind.PROMPT, Kind.SCAFFOLD])])
        messages = self.random.randint(0, 3)
        spans = self.spans(len(ids), messages)
        self.trajectory.begin(self.shaped(ids), kinds=kinds, messages=messages, message_spans=spans)
        index = self.model.open(-1, 0, "")
        self.model.context(index, ids, kinds or [Kind.PROMPT] * len(ids), spans, messages)

    def context(self) -> None:
        index, branch = self.target()
        ids = self.ids()
        messages = self.random.randint(0, 2)
        spans = self.spans(len(ids), messages)
        kinds: Any = self.new_kinds(len(ids))
        shaped = self.random.choice([kinds, np.array(kinds, np.uint8)])
        self.trajectory.append_context(self.shaped(ids), shaped, message_spans=spans, messages=messages, branch=branch)
        self.model.context(index, ids, kinds, spans, messages)

    def bridge(self) -> None:
        index, branch = self.target()
        ids = self.ids()
        messages = self.random.randint(0, 2)
        spans = self.spans(len(ids), messages)
        kinds = self.new_kinds(len(ids))
        owners = np.full(len(ids), -1, np.int32)
        for start, stop, message in spans:
            owners[start:stop] = message
        stream = self.trajectory.stream(index).tolist()
        end = stream[len(stream) - self.random.randint(0, min(4, len(stream))) :]
        self.trajectory.append_bridge(bridged(stream, end, ids, kinds, owners, messages), branch=branch)
        self.model.context(index, ids, kinds, spans, messages)

    def complete(self, index: int, branch: int | None, continues: bool) -> None:
        ids = self.ids(0, 5)
        logprobs, exact = self.sampled(len(ids))
        turn = self.turn(len(ids))
        names = ("finish_reason", "version", "sampling", "logprobs_kind", "cached_tokens")
        settings = {name: turn[name] for name in names}
        channels = {name: self.as_accepted(name, entries) for name, entries in turn["channels"].items()}
        returned = self.trajectory.append_completion(
            self.shaped(ids), logprobs, continues=continues, channels=channels, branch=branch, **settings
        )
        self.model.completion(index, ids, exact, turn, continues)
        assert returned == self.trajectory.turns(index)[-1]

    def reward(self) -> None:
        """Set a reward for a turn of some branch, or for the rollout; the last one counts, None removes it."""
        index, _ = self.target()
        pieces = [piece for piece in self.model.branches[index].pieces if piece.turn is not None]
        value = self.random.choice([0, -1.5, 2.25, None])
        if not pieces or self.random.random() < 0.2:
            self.trajectory.set_reward(value)
            self.model.reward = value
            return
        at = self.random.randrange(len(pieces))
        self.trajectory.set_reward(value, self.trajectory.turns(index)[at])
        turn = pieces[at].turn
        assert turn is not None
        turn["rewards"]["reward"] = value  # shared by all branches that the turn is on

    def completion(self, continues: bool = False) -> None:
        index, branch = self.target()
        if self.model.can_continue(index) if continues else self.model.can_complete(index):
            self.complete(index, branch, continues)
        else:
            self.refused(lambda: self.complete(index, branch, continues))

    def continuation(self) -> None:
        self.completion(continues=True)

    def extend(self) -> None:
        index, branch = self.target()
        model_branch = self.model.branches[index]
        ids = self.ids(0, 4)
        added = self.random.randint(0, 2) if ids else 0
        total = model_branch.messages + added
        spans = self.spans(len(ids), added)
        shift = len(model_branch.tokens)
        absolute = [(start + shift, stop + shift, message + model_branch.messages) for start, stop, message in spans]
        kinds = self.new_kinds(len(ids))
        whole = [*(token.kind for token in model_branch.tokens), *kinds]
        count = self.trajectory.extend_to(
            self.shaped(model_branch.ids + ids), whole, message_spans=absolute, messages=total, branch=branch
        )
        assert count == len(ids)
        if ids:
            self.model.context(index, ids, kinds, spans, added)

    def branch(self) -> None:
        """Branch at a prefix of some stream with new ids after it."""
        chosen = self.model.branches[self.random.randrange(len(self.model.branches))]
        prompt = chosen.ids[: self.random.randint(0, len(chosen.tokens))] + self.ids(0, 4)
        source, shared, extends = self.model.longest(prompt)
        if prompt:
            match = self.trajectory.shared_prefix(prompt)
            assert (match.length, match.extends >= 0) == (shared, extends)
        cause = self.random.choice(["", "compaction", "thinking dropped"])

        def act() -> int:
            return self.trajectory.branch(self.shaped(prompt), cause=cause)

        if extends or not prompt:
            self.refused(act)
            return
        index = act()
        assert index == self.model.open(source, shared, cause)
        fresh = prompt[shared:]
        self.model.context(index, fresh, [Kind.CONTEXT] * len(fresh), [], 0)

    def read(self) -> None:
        index, branch = self.target()
        assert self.trajectory.prompt(branch).tolist() == self.model.branches[index].ids

    # -- illegal operations

    def refused(self, act: Callable[[], object], error: type[TrajectoryError] = TrajectoryError) -> None:
        before = repr(self.trajectory), self.trajectory.current
        with pytest.raises(error):
            act()
        assert before == (repr(self.trajectory), self.trajectory.current)

    def illegal(self, count: int = 4) -> int:
        """Try several illegal operations; as none changes anything, one list is valid for all of them."""
        for name, act, error in self.random.sample(illegal_operations(self), count):
            try:
                self.refused(act, error)
            except BaseException as failure:
                failure.add_note(f"illegal operation: {name}")
                raise
        return count


def illegal_operations(walk: Walk) -> list[tuple[str, Callable[[], object], type[TrajectoryError]]]:
    trajectory, random_ = walk.trajectory, walk.random
    ids = walk.ids(2, 4)
    count = len(ids)
    valid = [-0.5] * count if trajectory.has_logprobs else None
    index = random_.randrange(len(walk.model.branches))
    stream = walk.model.branches[index].ids
    where = random_.randrange(len(stream))
    other = [*stream]
    other[where] = (other[where] + 1) % VOCABULARY
    bad_index = random_.randrange(count)

    def context(new_ids: Any = ids, kinds: Any = Kind.CONTEXT, **more: Any) -> Callable[[], object]:
        return lambda: trajectory.append_context(new_ids, kinds, **({"branch": index} | more))

    def complete(new_ids: Any = ids, logprobs: Any = valid, **more: Any) -> Callable[[], object]:
        settings = {"finish_reason": "stop", "branch": index} | more
        return lambda: trajectory.append_completion(new_ids, logprobs, **settings)

    def extend(prompt: Any, **more: Any) -> Callable[[], object]:
        return lambda: trajectory.extend_to(prompt, branch=index, **more)

    def bridge(before: list[int], last: int, kinds: Any = (2, 2), messages: int = 1) -> Callable[[], object]:
        one = bridged([*before, last], [last], [1, 2], kinds, [0, 0], messages)
        return lambda: trajectory.append_bridge(one, branch=index)

    def spoil(values: list[Any], *bad: Any) -> list[Any]:
        return [[*values[:bad_index], one, *values[bad_index + 1 :]] for one in bad]

    bad_ids: list[Any] = [
        *spoil(ids, -1, VOCABULARY, 2**31, 2**70, True, 1.0, None, "1", [1]),
        *(np.array(ids, np.float64), np.array([True, False]), np.array([ids]), np.array(ids) - 10, "12", {1, 2}, 7),
    ]
    bad_logprobs: list[Any] = [[-0.5] * count]
    if valid is not None:
        bad_logprobs = spoil(valid, math.nan, math.inf, -math.inf, 0.01, None, "0", True, -1e300, -(10**400))
        bad_logprobs += [None, valid[:-1], [*valid, -1.0], np.zeros((1, count)), -1.0, np.zeros(count, bool)]
    per_token = [[1] * (count + 1), np.zeros((count - 1, 2)), np.zeros((), np.int32), 3, "x" * count]
    per_token += [np.array(["x"] * count), [object()] * count, [math.nan] * count]
    tables: dict[str, tuple[Sequence[Any], Callable[[Any], Callable[[], object]]]] = {
        "context": ([*bad_ids, []], context),
        "completion": (bad_ids, complete),
        "extend_to": (bad_ids, extend),
        "branch": (bad_ids, lambda bad: lambda: trajectory.branch(bad)),
        "logprobs": (bad_logprobs, lambda bad: complete(ids, bad)),
        "kinds": (
            [
                *(Kind.SAMPLED, Kind.PROMPT, 5, -1, True, 10**30, None, [Kind.CONTEXT] * (count + 1)),
                *([Kind.CONTEXT] * (count - 1) + [Kind.SAMPLED], np.full(count, 255, np.uint8), np.zeros(count)),
            ],
            lambda bad: context(kinds=bad),
        ),
        "spans": (
            [
                *([(0, 0, 0)], [(0, count + 1, 0)], [(-1, 1, 0)], [(0, 1, 1)], [(1, 2, 0), (0, 1, 0)]),
                *([(0, 2, 0), (1, 2, 0)], [(0, 1)], [(0, 1.0, 0)], [None], 5, np.zeros((1, 2), np.int32)),
            ],
            lambda bad: context(message_spans=bad, messages=1),
        ),
        "version": (
            [
                *(1.5, True, 2**64, [("a", 0, count - 1)], [("a", 0, 1), ("b", 0, count)], {"a": 1}),
                *([("a", 0, count), ("b", count, count)], [("a", 0)], []),
            ],
            lambda bad: complete(version=bad),
        ),
        "channels": (
            [[1], {"": [1] * count}, {1: [1] * count}, {"a": [{1: 2}] * count}, *({"a": bad} for bad in per_token)],
            lambda bad: complete(channels=bad),
        ),
        "reward": ([math.nan, math.inf, "1", True, 1e39, 10**400], lambda bad: lambda: trajectory.set_reward(bad)),
        "sampling": ([{"x": math.nan}, {"stop": ("a",)}, {1: 2}, [1]], lambda bad: complete(sampling=bad)),
        "messages": ([-1, True, 2**31], lambda bad: context(messages=bad)),
        "finish reason": (["", None], lambda bad: complete(finish_reason=bad)),
        "kind of logprobs": (["cooked", None, 1, ["raw"], ""], lambda bad: complete(logprobs_kind=bad)),
        "cached tokens": ([-1, 1.0, True, "3", 2**31], lambda bad: complete(cached_tokens=bad)),
        "messages of a prompt": ([-1, 10**6], lambda bad: extend(stream, messages=bad)),
    }
    operations = [(f"{name} {bad!r}", act(bad)) for name, (values, act) in tables.items() for bad in values]
    operations += [
        ("begin again", lambda: trajectory.begin(ids)),
        ("unknown branch", context(branch=len(walk.model.branches))),
        ("negative branch", complete(branch=-1)),
        ("continues that is no bool", complete(continues=1)),
        ("sampled in the next prompt", extend([*stream, 1], kinds=Kind.SAMPLED)),
        ("a cause that is no text", lambda: trajectory.branch([VOCABULARY - 1] * 99, cause=None)),  # type: ignore[arg-type]
        ("a bridge for a longer stream", bridge(stream, 1)),
        ("a bridge for another completion", bridge(stream[:-1], (stream[-1] + 1) % VOCABULARY)),
        ("a bridge with a message too many", bridge(stream[:-1], stream[-1], messages=0)),
        ("a bridge that samples", bridge(stream[:-1], stream[-1], kinds=(1, 1))),
    ]
    breaks = {"another id": extend([*other, 1]), "a shorter prompt": extend(stream[:where])}
    return [
        *((name, act, TrajectoryError) for name, act in operations),
        *((name, act, ExtensionError) for name, act in breaks.items()),
    ]


def walk(seed: int, operations: int) -> None:
    choose = random.Random(seed)
    done = 0
    while done < operations:
        one = Walk(choose.randrange(2**40))
        stop = min(done + choose.choice([5, 40, 150]), operations)
        verified = done
        try:
            while done < stop:
                done += one.step()
                if done - verified >= 30:
                    one.verify()
                    verified = done
            one.verify()
            one.verify_storage()
        except BaseException as failure:
            failure.add_note(f"{one.trajectory.name}, {one.trajectory!r}")
            raise
