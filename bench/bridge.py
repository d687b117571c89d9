"""One bridge over a tool result of 1 KB after histories of 1k to 1M tokens.

Rivals on the same histories: the bridge of `renderers`, and a client that renders the whole conversation with
transformers, both also with our encoder. Figures count only if ids are equal. The limit is one raw encode of the new
text.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import fastokens
import numpy as np
from rich.progress import Progress

import tokentrace
from bench.conversations import conversation, sources, tools
from bench.report import Block, micro, table, times, where
from bench.rivals import Message, our_renderer, peer_renderer, transformers_tokenizer
from bench.timing import IN_A_ROW, Spent, cpu_time, settled
from tests.assets import family_dir
from tokentrace.tokens.tokenizer import Ids
from tokentrace.trajectory import Trajectory, Turn

LENGTHS = (1_000, 8_000, 32_000, 128_000, 1_000_000)
ROUNDS, QUICK_ROUNDS = 200, 20
FULL_RENDERS = {"transformers": 500_000, "transformers + fastokens": 10_000_000}
"""transformers renders each history at least once, and again up to about this many tokens in total."""
CHECKED_FULL = 32_000
"""Up to this length of history, bridges of all shapes are compared with full renders by transformers."""
LINES_PER_RESULT = (20, 60, 40, 120)
RESULT_BYTES = 1024

Times = dict[str, Spent]
"""By name of the call; empty if its ids differ."""
Timed = tuple[float, Any]


@dataclass(frozen=True, slots=True)
class Rollout:
    """An agent's rollout that waits for the result of its last call."""

    length: int
    trajectory: Trajectory
    messages: list[Message]
    turn: Turn

    @property
    def stream(self) -> tuple[Ids, Ids]:
        """The last prompt and its completion, as views."""
        return self.trajectory.stream()[: self.turn.start], self.turn.tokens.ids

    def result(self, text: str) -> Message:
        """A tool result for its last call."""
        call = self.messages[-1]["tool_calls"][0]
        return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}


@dataclass(frozen=True, slots=True)
class Row:
    """The measurements at one length."""

    rollout: Rollout
    times: Times


# -- histories


def grow(length: int, renderer: tokentrace.Renderer, lines: Iterator[str], schemas: list[Message]) -> Rollout:
    """A rollout of at least `length` tokens, bridged turn by turn."""
    messages = conversation(length + length // 4 + 1_000, lines, LINES_PER_RESULT)[:-1]
    trajectory = Trajectory()
    first = renderer.render(messages[:2], tools=schemas, add_generation_prompt=True)
    trajectory.begin(first.ids, messages=2)
    for at in range(2, len(messages), 2):
        # rendered with its result, since some models stop at the token that begins the next message
        rendered = renderer.render([messages[1], *messages[at : at + 2]], tools=schemas)
        ids = rendered.ids[rendered.mask]
        turn = trajectory.append_completion(ids, [-0.5] * len(ids), finish_reason="tool_calls", version=1)
        rollout = Rollout(length, trajectory, messages[: at + 1], turn)
        if len(trajectory) >= length:
            return rollout
        bridge = renderer.bridge(*rollout.stream, [messages[at + 1]], tools=schemas)
        if not bridge:
            raise SystemExit(f"{renderer.family}: no bridge over a tool's result: {bridge}")
        trajectory.append_bridge(bridge)
    raise AssertionError(f"the conversation for {length} tokens came to {len(trajectory)}")


def results(control_tokens: Sequence[str]) -> Iterator[str]:
    """Texts of exactly 1 KB, nearly all different, from the standard library's packages (histories use its modules).

    None contains a control token: ids would differ, since `renderers` encodes it as the token and tokentrace as text.
    None begins or ends with whitespace, which some templates strip.
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
    """All contenders, loaded beforehand, and the rollouts to bridge. The calls return new ids."""

    def __init__(self, family: str, lengths: Sequence[int], progress: Progress) -> None:
        task = progress.add_task(f"{family}: loading", total=len(lengths) + 1)
        self.schemas = tools()
        hf, fast = transformers_tokenizer(family), transformers_tokenizer(family, fast=True)
        self.ours = our_renderer(family)
        self._raw = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        lines = itertools.cycle(sources())
        self.rollouts: list[Rollout] = []
        for length in lengths:
            progress.update(task, description=f"{family}: a rollout of {length:,} tokens, turn by turn", advance=1)
            self.rollouts.append(grow(length, self.ours, lines, self.schemas))
        progress.advance(task)
        # Clients of `renderers` have lists, so creating them is not timed.
        self._lists = {rollout.length: tuple(part.tolist() for part in rollout.stream) for rollout in self.rollouts}
        self.texts = results(list(hf.get_added_vocab()))
        self._shapes = random.Random(2)
        self.calls = {
            "bridge": self.bridge,
            "encode": self.encode,
            "shapes": self.shapes,
            "transformers": partial(self.transformers, hf),
            "transformers + fastokens": partial(self.transformers, fast),
        }
        for name, tokenizer in (("renderers", hf), ("renderers + fastokens", fast)):
            if (peer := peer_renderer(family, tokenizer)) is not None:
                self.calls[name] = partial(self.renderers, peer)

    def expected(self, rollout: Rollout, new: list[Message], *, is_full: bool = False) -> Any:
        """The ids that must be added: our bridge's, or with `is_full` those of transformers for short histories."""
        if is_full and rollout.length <= CHECKED_FULL:
            return self.calls["transformers + fastokens"](rollout, new)[1]
        return self.ours.bridge_to_next_turn(*rollout.stream, new, tools=self.schemas).new_ids

    def bridge(self, rollout: Rollout, new: list[Message]) -> Timed:
        """Our bridge alone, on views of the stream."""
        prompt, completion = rollout.stream
        spent, bridge = cpu_time(lambda: self.ours.bridge_to_next_turn(prompt, completion, new, tools=self.schemas))
        return spent, bridge.new_ids

    def shapes(self, rollout: Rollout, new: list[Message]) -> Timed:
        """Our bridge for up to three results without optional keys: shapes that come up now and then."""
        for _ in range(self._shapes.randint(0, 2)):
            new.append(dict(new[0]))
        for message in new:
            for key in ("name", "tool_call_id"):
                if self._shapes.random() < 0.5:
                    message.pop(key, None)
        return self.bridge(rollout, new)

    def encode(self, rollout: Rollout, new: list[Message]) -> Timed:
        """The limit: one raw encode of the new rendered text."""
        text = self._raw.decode(self.expected(rollout, new).tolist())
        spent, ids = cpu_time(lambda: np.frombuffer(self._raw.encode_batch_flat([text])[0], np.uint32))
        return spent, ids

    def renderers(self, peer: Any, rollout: Rollout, new: list[Message]) -> Timed:
        """The peer's bridge: lists of ids in and out."""
        prompt, completion = self._lists[rollout.length]
        spent, bridge = cpu_time(lambda: peer.bridge_to_next_turn(prompt, completion, new, tools=self.schemas))
        ids = [] if bridge is None else bridge.token_ids
        same = ids[: len(prompt)] == prompt and ids[len(prompt) :][: len(completion)] == completion
        return spent, ids[len(prompt) + len(completion) :] if same else []

    def transformers(self, hf: Any, rollout: Rollout, new: list[Message]) -> Timed:
        """Render the whole conversation. It has one user message, so its renders only append."""
        messages = [*rollout.messages, *new]
        settings = {"tools": self.schemas, "add_generation_prompt": True, "return_dict": False}
        spent, ids = cpu_time(lambda: hf.apply_chat_template(messages, **settings))
        stream = rollout.trajectory.stream()
        same = np.array_equal(np.asarray(ids[: len(stream)], np.int32), stream)
        return spent, ids[len(stream) :] if same else []


def measure(contest: Contest, rounds: int, progress: Progress) -> dict[int, Times]:
    """Every call at every length, `IN_A_ROW` at a time in random order, so that disturbances hit all alike."""
    times_by_length: dict[int, Times] = {
        rollout.length: {name: Spent() for name in contest.calls} for rollout in contest.rollouts
    }
    order = random.Random(0)
    wrong: set[str] = set()
    task = progress.add_task("bridges", total=rounds)
    with settled():
        for number in range(-2, rounds // IN_A_ROW):  # the first two warm up
            jobs = list(itertools.product(contest.calls, contest.rollouts))
            order.shuffle(jobs)
            for name, rollout in jobs:
                limit = FULL_RENDERS.get(name)
                if limit and number % max(1, rounds // IN_A_ROW * rollout.length // limit):
                    continue
                additions = [[rollout.result(next(contest.texts))] for _ in range(1 if limit else IN_A_ROW)]
                for new, (spent, ids) in [(new, contest.calls[name](rollout, new)) for new in additions]:
                    if not np.array_equal(ids, contest.expected(rollout, new, is_full=name == "shapes")):
                        wrong.add(name)
                    if number >= 0:
                        times_by_length[rollout.length][name].values.append(spent)
            gc.collect()
            progress.update(task, completed=max(number + 1, 0) * IN_A_ROW)
    if wrong - {"renderers", "renderers + fastokens"}:
        raise SystemExit(f"ids differ between the bridge and {', '.join(sorted(wrong))}; no figure counts")
    for by_name, name in itertools.product(times_by_length.values(), wrong):
        by_name[name].values.clear()
    return times_by_length


# -- report


def run(families: Sequence[str], rounds: int, lengths: Sequence[int], progress: Progress) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    texts, short = [], ""
    for family in families:
        contest = Contest(family, lengths, progress)
        times_by_length = measure(contest, rounds, progress)
        rows = [Row(rollout, times_by_length[rollout.length]) for rollout in contest.rollouts]
        texts += [f"**{family}**, microseconds of CPU time, medians of {rounds} unless noted:", _table(rows, contest)]
        texts.append("\n".join(f"- {line}" for line in _verdicts(rows)))
        short = short or _short(family, rows)
    return [Block("bridge", "\n\n".join([*texts, where(load)])), Block("bridge-short", short)]


def _table(rows: list[Row], contest: Contest) -> str:
    lines = [
        ["**bridge**", *(f"**{_micro(row.times['bridge'])}**" for row in rows)],
        ["– 99 of 100 within", *(_micro(row.times["bridge"], "worst") for row in rows)],
        ["one raw encode of the new text", *(_micro(row.times["encode"]) for row in rows)],
        ["bridge, shapes that come up now and then", *(_micro(row.times["shapes"]) for row in rows)],
        ["– 99 of 100 within", *(_micro(row.times["shapes"], "worst") for row in rows)],
    ]
    for name in ("renderers", "renderers + fastokens", "transformers", "transformers + fastokens"):
        if name in contest.calls:
            how = "bridge" if name.startswith("renderers") else "full render"
            lines.append([f"{name}: {how}", *(_micro(row.times[name]) for row in rows)])
            lines.append(["– over our bridge", *(_ratio(row, name) for row in rows)])
            if how == "bridge":
                lines.append(["– first of a row", *(_ratio(row, name, "first") for row in rows)])
    return table(["tokens of history", *(f"{len(row.rollout.trajectory):,}" for row in rows)], lines)


def _verdicts(rows: list[Row]) -> Iterator[str]:
    first, last = rows[0], rows[-1]
    ratio = last.times["bridge"].median / first.times["bridge"].median
    yield f"After {last.rollout.length:,} tokens a bridge takes {ratio:.2f}x as long as after {first.rollout.length:,}."


def _short(family: str, rows: list[Row]) -> str:
    last = max((row for row in rows if row.rollout.length <= 128_000), key=lambda row: row.rollout.length)
    ends = " and ".join(
        f"{micro(row.times['bridge'].median)} after {row.rollout.length:,}" for row in (rows[0], rows[-1])
    )
    rivals = {name: _ratio(last, name) for name in ("renderers + fastokens", "transformers + fastokens")}
    return (
        f"- **A bridge** over a tool result of 1 KB ({family}): {micro(last.times['bridge'].median)} µs after "
        f"{last.rollout.length:,} tokens, {ends}; one raw encode of the new text takes "
        f"{micro(last.times['encode'].median)} µs. `renderers` with our encoder takes "
        f"{rivals['renderers + fastokens']} as long there, transformers with it, which renders everything, "
        f"{rivals['transformers + fastokens']}."
    )


def _micro(spent: Spent, of: str = "median") -> str:
    return micro(getattr(spent, of)) if spent.values else "ids differ"


def _ratio(row: Row, name: str, of: str = "median") -> str:
    spent = row.times.get(name)
    return times(getattr(spent, of) / getattr(row.times["bridge"], of)) if spent and spent.values else "–"
