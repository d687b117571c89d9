"""A rollout of fifty turns to 128k tokens: what each library does between an engine's answers.

tokentrace bridges, records the turn, writes the body of the next request and parses the answer, with tools that are
made known once, as in its rollouts. `renderers` bridges and parses. A client of transformers renders the whole
conversation anew each turn, and is not asked to parse. The limit is one raw encode of what each turn adds.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import fastokens
import numpy as np
from rich.progress import Progress

from bench.conversations import conversation, sources, tools
from bench.report import Block, milli, table, times, where
from bench.rivals import Message, our_renderer, peer_renderer, transformers_tokenizer
from bench.timing import Spent, cpu_time, settled
from tests.assets import family_dir
from tokentrace.trajectory import Trajectory

LENGTH, TURNS = 128_000, 50
LINES = 250
ROUNDS, QUICK_ROUNDS = 5, 1
WANTED = 40.0
LIMIT = "raw encodes alone"
RIVALS = ("renderers + fastokens", "transformers + fastokens")


class Script:
    """A conversation with the prompt and the completion of each turn, by full renders, which transformers confirms."""

    def __init__(self, renderer: Any, lines: Any, length: int = LENGTH) -> None:
        self.schemas = tools()
        self.said = conversation(length, lines, (LINES,))[:-1][: 2 + 2 * TURNS]
        self.renderer = renderer
        rendered = renderer.render(self.said, tools=self.schemas, add_generation_prompt=True)
        self.ids = rendered.ids
        self.turns = [(turn.start, turn.stop) for turn in rendered.turns[: len(self.said) // 2 - 1]]
        self.prompts = [start for start, _ in self.turns[1:]] + [len(self.ids)]

    def new(self, turn: int) -> list[Message]:
        """What follows a turn: the result of its call."""
        return [self.said[3 + 2 * turn]]

    def check(self, turn: int, ids: Any) -> None:
        """SystemExit unless these are the ids of the prompt after a turn."""
        if not np.array_equal(np.asarray(ids, np.int32), self.ids[: self.prompts[turn]]):
            raise SystemExit(f"the prompt after turn {turn} is not what a full render gives; no figure counts")

    def ours(self) -> float:
        """All that tokentrace does."""
        asked = {"tools": self.schemas}
        trajectory = Trajectory()
        spent, first = cpu_time(
            lambda: self.renderer.render(self.said[:2], tools=self.schemas, add_generation_prompt=True).ids
        )
        trajectory.begin(first, messages=2)
        for turn, (start, stop) in enumerate(self.turns):
            sampled = self.ids[start:stop].tolist()  # what an engine's answer holds
            logprobs = [-0.5] * len(sampled)

            def take(turn: int = turn, sampled: list[int] = sampled, logprobs: list[float] = logprobs) -> None:
                recorded = trajectory.append_completion(sampled, logprobs, finish_reason="stop", version=1)
                prompt = trajectory.stream()[: recorded.start]
                self.renderer.parse_response(sampled, prompt_ids=prompt, **asked)
                bridge = self.renderer.bridge(prompt, trajectory.completion(recorded), self.new(turn), **asked)
                trajectory.append_bridge(bridge)
                b"".join((b'{"prompt":', *trajectory.wire_parts(), b"}"))

            spent += cpu_time(take)[0]
            self.check(turn, trajectory.stream())
        return spent

    def peer(self, renderer: Any) -> float:
        """The bridges and the parses of `renderers`."""
        prompt = self.ids[: self.turns[0][0]].tolist()
        spent = 0.0
        for turn, (start, stop) in enumerate(self.turns):
            sampled = self.ids[start:stop].tolist()

            def take(prompt: list[int] = prompt, sampled: list[int] = sampled, turn: int = turn) -> list[int]:
                renderer.parse_response(sampled, tools=self.schemas)
                bridged = renderer.bridge_to_next_turn(prompt, sampled, self.new(turn), tools=self.schemas)
                return bridged.token_ids if bridged is not None else []

            seconds, prompt = cpu_time(take)
            spent += seconds
            self.check(turn, prompt)
        return spent

    def anew(self, hf: Any) -> float:
        """The whole conversation rendered by transformers for every turn."""
        spent = 0.0
        for turn in range(len(self.turns)):
            said = self.said[: 4 + 2 * turn]
            asked = {"tools": self.schemas, "add_generation_prompt": True, "return_dict": False}
            seconds, ids = cpu_time(lambda said=said, asked=asked: hf.apply_chat_template(said, **asked))
            spent += seconds
            self.check(turn, ids)
        return spent

    def limit(self, raw: Any) -> float:
        """What is new in each prompt, encoded and nothing else."""
        ends = [0, *(stop for _, stop in self.turns)]
        bounds = zip(ends, [self.turns[0][0], *self.prompts], strict=True)
        texts = [raw.decode(self.ids[start:stop].tolist()) for start, stop in bounds]
        return sum(cpu_time(lambda text=text: raw.encode_batch_flat([text]))[0] for text in texts)


def run(families: Sequence[str], rounds: int, progress: Progress, length: int = LENGTH) -> list[Block]:
    """Measure, and say what came out."""
    load = os.getloadavg()[0]
    lines = itertools.cycle(sources())
    rows = []
    for family in families:
        ours = our_renderer(family)
        fast = transformers_tokenizer(family, fast=True)
        peer = peer_renderer(family, fast)
        raw = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        spent: dict[str, Spent] = {}
        order = random.Random(0)
        turns = tokens = 0
        with settled():
            for _ in progress.track(range(rounds + 1), description=f"{family}: {TURNS} turns to {length:,}"):
                script = Script(ours, lines, length)
                calls: dict[str, Callable[[], float]] = {
                    "tokentrace": script.ours,
                    "transformers + fastokens": partial(script.anew, fast),
                    LIMIT: partial(script.limit, raw),
                }
                if peer is not None:
                    calls["renderers + fastokens"] = partial(script.peer, peer)
                for name in order.sample(list(calls), len(calls)):
                    gc.collect()
                    spent.setdefault(name, Spent()).values.append(calls[name]())
                turns, tokens = len(script.turns), len(script.ids)
        for values in spent.values():
            del values.values[0]  # the first one compiles and warms
        own = spent["tokentrace"].median
        rivals = [name for name in RIVALS if name in spent]
        best = min(spent[name].median for name in rivals)
        cells = [milli(spent[name].median) if name in spent else "–" for name in (*RIVALS, "tokentrace", LIMIT)]
        most = times(best / spent[LIMIT].median)
        rows.append([family, str(turns), f"{tokens:,}", *cells, f"{times(best / own)} ({WANTED:g})", most])
    heads = [
        "family",
        "turns",
        "tokens",
        *RIVALS,
        "**tokentrace**",
        LIMIT,
        "faster rival over ours",
        "over the encodes",
    ]
    said = "Milliseconds of CPU time for a whole rollout, medians; *wanted* in brackets. Every prompt is checked."
    return [Block("episode", "\n\n".join([said, table(heads, rows), where(load)]))]
