"""One bridge with a tool result of 1 KB after histories of 1k to 1M tokens, and the memory that those take.

Beside it, on the same histories: the bridge of `renderers`, and a client that renders the whole conversation anew with
transformers. Ids are asserted equal before a figure counts.
"""

from __future__ import annotations

import copy
import gc
import itertools
import os
import random
import statistics
import sysconfig
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tokentrace
from bench import cpu_time, peer_renderer, transformers_tokenizer
from bench.conversations import conversation, sources, tools
from tests.assets import family_dir
from tokentrace.tokens.kinds import Kind
from tokentrace.tokens.tokenizer import Ids
from tokentrace.trajectory import Trajectory, Turn

LENGTHS = (1_000, 8_000, 32_000, 128_000, 1_000_000)
ROUNDS, QUICK_ROUNDS = 200, 20
RENDERED_ANEW = 500_000
"""transformers renders a history so often that it comes to about so many tokens, and at least once."""
LINES_PER_RESULT = (20, 60, 40, 120)
RESULT_BYTES = 1024
FLAT, BYTES_A_TOKEN = 1.2, 10.0
"""What is wanted: the cost after the longest history over that after the shortest, and the memory of a token."""
GROWTH = 0.1
"""How much longer a trajectory may become by the turns that are measured on it, before it is taken back."""

Message = dict[str, Any]
Times = dict[str, list[float]]
"""Seconds, by call; empty where its ids differ."""
Timed = tuple[float, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """An agent's rollout that awaits the result of its last call."""

    length: int
    trajectory: Trajectory
    messages: list[Message]
    turn: Turn

    @property
    def stream(self) -> tuple[Ids, Ids]:
        """The last prompt and its completion, as views."""
        return self.trajectory.stream()[: self.turn.start], self.trajectory.completion(self.turn)

    def result(self, text: str) -> Message:
        """An answer to its last call."""
        call = self.messages[-1]["tool_calls"][0]
        return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes a token."""

    record: float
    most: float
    """The most that it was on the way, right after a buffer grew."""
    wire: float
    """The wire text, kept beside the record once it is asked for."""
    traced: float
    """The record as tracemalloc counts it, Python's objects and all."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was measured at one length."""

    rollout: Rollout
    memory: Memory
    times: Times


# -- histories


def grow(length: int, renderer: tokentrace.Renderer, lines: Iterator[str], schemas: list[Message]) -> Rollout:
    """A rollout of `length` tokens or little more, bridged turn by turn."""
    said = conversation(length + length // 4 + 1_000, lines, LINES_PER_RESULT)[:-1]
    trajectory = Trajectory()
    first = renderer.render(said[:2], tools=schemas, add_generation_prompt=True)
    trajectory.begin(first.ids, messages=2)
    for at in range(2, len(said), 2):
        # with its result, since some models stop at the token that begins the next message
        rendered = renderer.render([said[1], *said[at : at + 2]], tools=schemas)
        ids = rendered.ids[rendered.mask]
        turn = trajectory.append_completion(ids, [-0.5] * len(ids), finish_reason="tool_calls", version=1)
        rollout = Rollout(length, trajectory, said[: at + 1], turn)
        if len(trajectory) >= length:
            return rollout
        bridge = renderer.bridge(*rollout.stream, [said[at + 1]], tools=schemas)
        if not bridge:
            raise SystemExit(f"{renderer.family}: no bridge over a tool's result: {bridge}")
        trajectory.append_bridge(bridge)
    raise AssertionError(f"the conversation for {length} tokens came to {len(trajectory)}")


def _copy(rollout: Rollout) -> Rollout:
    """The same in a trajectory of its own, whose stream was sent before."""
    trajectory = copy.deepcopy(rollout.trajectory)
    trajectory.wire_parts()
    return Rollout(rollout.length, trajectory, rollout.messages, rollout.turn)


def results(control_tokens: Sequence[str]) -> Iterator[str]:
    """Texts of exactly 1 KB, next to none twice: of the standard library's packages, as histories are of its modules.

    None of them spells a control token: there the ids rightly differ, since `renderers` makes the token of it and
    tokentrace leaves it text. None begins or ends with whitespace, which some templates strip.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = [path for path in sorted(folder.glob("*/*.py")) if path.parent.name != "site-packages"]
    text = "".join(path.read_text(encoding="ascii", errors="ignore") for path in paths)
    start = 0
    while start + RESULT_BYTES <= len(text):
        piece = text[start : start + RESULT_BYTES]
        if piece == piece.strip() and not any(token in piece for token in control_tokens):
            yield piece
            start += RESULT_BYTES
        else:
            start += 1


# -- time


class Contest:
    """Who bridges, each made ready beforehand, and the rollouts to bridge. The calls return new ids."""

    def __init__(self, family: str, lengths: Sequence[int], progress: Progress) -> None:
        task = progress.add_task(f"{family}: loading", total=len(lengths) + 1)
        self._schemas = tools()
        self._hf = transformers_tokenizer(family)
        self._peer = peer_renderer(family, self._hf)
        self._ours = tokentrace.create_renderer(str(family_dir(family)))
        lines = itertools.cycle(sources())
        self.rollouts: list[Rollout] = []
        for length in lengths:
            progress.update(task, description=f"{family}: a rollout of {length:,} tokens, turn by turn", advance=1)
            self.rollouts.append(grow(length, self._ours, lines, self._schemas))
        progress.advance(task)
        # Clients of `renderers` have lists, so making them is not counted.
        self._lists = {rollout.length: tuple(part.tolist() for part in rollout.stream) for rollout in self.rollouts}
        self._turning = {rollout.length: _copy(rollout) for rollout in self.rollouts}
        self.texts = results(list(self._hf.get_added_vocab()))
        self.calls = {"bridge": self.bridge, "turn": self.turn, "transformers": self.transformers}
        if self._peer is not None:
            self.calls["renderers"] = self.renderers

    def bridge(self, rollout: Rollout, result: Message) -> Timed:
        """Our bridge by itself, on views of the stream."""
        prompt, completion = rollout.stream
        spent, bridge = cpu_time(
            lambda: self._ours.bridge_to_next_turn(prompt, completion, [result], tools=self._schemas)
        )
        return spent, bridge.new_ids

    def turn(self, rollout: Rollout, result: Message) -> Timed:
        """All that tokentrace does in a turn: bridge, record it, give the next request's text, record the answer."""
        at = self._turning[rollout.length]
        sampled = at.stream[1].tolist()  # what an engine's answer holds
        logprobs = [-0.5] * len(sampled)

        def take() -> tuple[tokentrace.BridgedTokens, Turn]:
            bridge = self._ours.bridge_to_next_turn(*at.stream, [result], tools=self._schemas)
            at.trajectory.append_bridge(bridge)
            at.trajectory.wire_parts()
            return bridge, at.trajectory.append_completion(sampled, logprobs, finish_reason="tool_calls", version=1)

        spent, (bridge, turn) = cpu_time(take)
        if len(at.trajectory) > len(rollout.trajectory) * (1 + GROWTH):
            self._turning[rollout.length] = _copy(rollout)
        else:
            self._turning[rollout.length] = Rollout(rollout.length, at.trajectory, rollout.messages, turn)
        return spent, bridge.new_ids

    def renderers(self, rollout: Rollout, result: Message) -> Timed:
        """The peer's bridge: lists of ids in and out."""
        prompt, completion = self._lists[rollout.length]
        spent, found = cpu_time(
            lambda: self._peer.bridge_to_next_turn(prompt, completion, [result], tools=self._schemas)
        )
        ids = [] if found is None else found.token_ids
        same = ids[: len(prompt)] == prompt and ids[len(prompt) :][: len(completion)] == completion
        return spent, ids[len(prompt) + len(completion) :] if same else []

    def transformers(self, rollout: Rollout, result: Message) -> Timed:
        """The whole conversation rendered anew. The agent's rollout has one user's message, so it is append-only."""
        messages = [*rollout.messages, result]
        spent, ids = cpu_time(
            lambda: self._hf.apply_chat_template(
                messages, tools=self._schemas, add_generation_prompt=True, return_dict=False
            )
        )
        stream = rollout.trajectory.stream()
        same = np.array_equal(np.asarray(ids[: len(stream)], np.int32), stream)
        return spent, ids[len(stream) :] if same else []


def measure(contest: Contest, rounds: int, progress: Progress) -> dict[int, Times]:
    """Every call at every length, in an order that is drawn anew each round: what disturbs, disturbs all alike."""
    times: dict[int, Times] = {rollout.length: {name: [] for name in contest.calls} for rollout in contest.rollouts}
    order = random.Random(0)
    wrong: set[str] = set()
    task = progress.add_task("bridges", total=rounds)
    gc.collect()
    gc.freeze()  # or a collection walks the peers' lists of a million ids, at whoever's cost
    gc.disable()
    try:
        for number in range(-2, rounds):  # the first two warm up
            jobs = list(itertools.product(contest.calls, contest.rollouts))
            order.shuffle(jobs)
            for name, rollout in jobs:
                every = max(1, rounds * rollout.length // RENDERED_ANEW)
                if name == "transformers" and number % every:
                    continue
                result = rollout.result(next(contest.texts))
                spent, ids = contest.calls[name](rollout, result)
                if not np.array_equal(ids, contest.bridge(rollout, result)[1]):
                    wrong.add(name)
                if number >= 0:
                    times[rollout.length][name].append(spent)
            gc.collect()
            progress.update(task, completed=max(number + 1, 0))
    finally:
        gc.enable()
        gc.unfreeze()
    if wrong - {"renderers"}:
        raise SystemExit(f"ids differ between the bridge and {', '.join(sorted(wrong))}; no figure counts")
    for of_calls, name in itertools.product(times.values(), wrong):
        of_calls[name].clear()
    return times


# -- memory


def memory(trajectory: Trajectory) -> Memory:
    """What a trajectory takes, made anew by the same writes."""
    gc.collect()
    tracemalloc.start()
    made = Trajectory()
    most = 0.0
    for write in trajectory.writes():
        made.replay(write)
        if len(made) >= LENGTHS[0]:
            most = max(most, made.nbytes / len(made))
    del write
    gc.collect()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    made.wire_parts()
    return Memory(made.nbytes / len(made), most, made.cache_nbytes / len(made), traced / len(made))


def mostly_sampled(length: int) -> Trajectory:
    """A trajectory of turns with 8,000 sampled tokens, 9 bytes each, and 200 of context, 5 bytes each."""
    trajectory = Trajectory()
    trajectory.begin([1] * 200, messages=1)
    while len(trajectory) < length:
        trajectory.append_completion([1] * 8_000, [-0.5] * 8_000, finish_reason="stop", version=1)
        trajectory.append_context([1] * 200, Kind.CONTEXT, messages=1, message_spans=[(0, 200, 0)])
    return trajectory


# -- report


def run(family: str, rounds: int, lengths: Sequence[int], console: Console) -> None:
    """Measure, and print what came out."""
    load = os.getloadavg()[0]
    with Progress(console=console, transient=True) as progress:
        contest = Contest(family, lengths, progress)
        times = measure(contest, rounds, progress)
    # without the progress bar, which has a thread and memory of its own
    rows = [Row(rollout, memory(rollout.trajectory), times[rollout.length]) for rollout in contest.rollouts]
    console.print(_table(family, rows, load))
    for line in _verdicts(rows, memory(mostly_sampled(lengths[-1]))):
        console.print(line, highlight=False, soft_wrap=True)


def _table(family: str, rows: list[Row], load: float) -> Table:
    table = Table(
        title=f"One bridge with a 1 KB tool result, {family}: µs of CPU time, first-seen text, ids equal",
        caption=f"Medians of {len(rows[0].times['bridge'])} unless said. Load average {load:.1f} to "
        f"{os.getloadavg()[0]:.1f}.\nturn: bridge, append_bridge, wire_parts, append_completion. most: right after a "
        "buffer grew.\nwire text: kept beside the record. list: the ids as a list of ints, and nothing else.",
    )
    trajectories = [row.rollout.trajectory for row in rows]
    table.add_column("tokens of history")
    for trajectory in trajectories:
        table.add_column(f"{len(trajectory):,}", justify="right")
    table.add_row("turns", *(f"{len(trajectory.turns()):,}" for trajectory in trajectories), end_section=True)
    table.add_row("bridge", *(_micro(row, "bridge") for row in rows))
    table.add_row("  fastest", *(_micro(row, "bridge", min) for row in rows))
    table.add_row("turn", *(_micro(row, "turn") for row in rows))
    table.add_row("  mean", *(_micro(row, "turn", statistics.fmean) for row in rows))
    table.add_row("  fastest", *(_micro(row, "turn", min) for row in rows), end_section=True)
    for name, how in (("renderers", "bridge"), ("transformers", "render anew")):
        table.add_row(f"{name}: {how}", *(_micro(row, name) for row in rows))
        table.add_row("  over our bridge", *(_ratio(row, name) for row in rows))
        table.add_row("  repeats", *(str(len(row.times.get(name, ()))) for row in rows), end_section=True)
    table.add_row("bytes a token: record", *(f"{row.memory.record:.2f}" for row in rows))
    table.add_row("  most", *(f"{row.memory.most:.2f}" for row in rows))
    table.add_row("  tracemalloc", *(f"{row.memory.traced:.2f}" for row in rows))
    table.add_row("  record + wire text", *(f"{row.memory.record + row.memory.wire:.2f}" for row in rows))
    table.add_row("  list", *(f"{_list_bytes(trajectory.stream()):.1f}" for trajectory in trajectories))
    return table


def _verdicts(rows: list[Row], sampled: Memory) -> Iterator[str]:
    first, last = rows[0], rows[-1]
    lengths = f"{last.rollout.length:,} tokens over {first.rollout.length:,}"
    for name, wanted in (("bridge", FLAT), ("turn", None)):
        median = statistics.median(last.times[name]) / statistics.median(first.times[name])
        least = min(last.times[name]) / min(first.times[name])
        line = f"{name}, {lengths}: {median:.2f} x (fastest: {least:.2f} x)"
        yield line if wanted is None else f"{line}; wanted: at most {wanted} x: {_met(median <= wanted)}"
    most = max(row.memory.most for row in rows)
    for what, value in (("these rollouts", most), ("a rollout that is 98 % sampled", sampled.most)):
        verdict = _met(value <= BYTES_A_TOKEN)
        yield f"memory, {what}: {value:.1f} bytes a token at most; wanted: at most {BYTES_A_TOKEN:.0f}: {verdict}"


def _met(is_met: bool) -> str:
    return "met" if is_met else "NOT MET"


def _micro(row: Row, name: str, of: Callable[[list[float]], float] = statistics.median) -> str:
    if name not in row.times:
        return "-"
    return f"{of(row.times[name]) * 1e6:,.0f}" if row.times[name] else "differ"


def _ratio(row: Row, name: str) -> str:
    if not row.times.get(name):
        return "-"
    ratio = statistics.median(row.times[name]) / statistics.median(row.times["bridge"])
    return f"{ratio:,.0f}x" if ratio >= 10 else f"{ratio:.1f}x"


def _list_bytes(ids: Ids) -> float:
    tracemalloc.start()
    kept = ids.tolist()
    traced, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return traced / len(kept)
