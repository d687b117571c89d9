"""Many rollouts at once against a scripted engine: what the agent loop itself costs a turn, by stage and length.

The engine answers when all rollouts have asked, so that they grow side by side: the CPU time of the whole process
between two answers is one turn of each of them. What the script and the tool cost is measured and taken off. Each
prompt that the engine saw is compared with the stream that was recorded before a figure counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import itertools
import multiprocessing
import os
import resource
import statistics
import time
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

from rich.progress import Progress

import tokentrace
from bench.conversations import sources
from bench.report import Block, micro, milli, table, where
from bench.rivals import our_renderer
from tokentrace.engines import scripted
from tokentrace.engines.protocol import SamplingParams
from tokentrace.parsing.response import ParsedResponse
from tokentrace.pocket import POCKET
from tokentrace.rollout import loop
from tokentrace.rollout.batch import Summary, run_rollouts
from tokentrace.rollout.loop import Agent, Budget, End, Rollout, Task
from tokentrace.rollout.tools import as_tools
from tokentrace.trajectory import Trajectory

ROLLOUTS, QUICK_ROLLOUTS = 400, 100
LENGTH = 34_000
LENGTHS = (1_000, 8_000, 32_000)
WANTED = 2e-3
"""Seconds of CPU time a turn, at the longest length."""
GIVEN_OFF = ("script", "tool")
STAGES = ("parse", "cut", "bridge", "record", "wire text", "prompt check", "answer check")


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Rollouts of one kind: how long they begin, and how many tokens a tool's result has."""

    first: int
    result: int
    length: int = LENGTH

    @property
    def turns(self) -> int:
        """How many turns it takes, with those of about 150 tokens that the model writes."""
        return max(2, (self.length - self.first) // (self.result + 150) + 1)


MODEST, LARGE = Shape(first=600, result=500), Shape(first=4_000, result=4_000)


@dataclasses.dataclass(frozen=True, slots=True)
class Round:
    """One turn of all rollouts."""

    tokens: float
    """How long their prompts were before it, on average."""
    total: float
    """Seconds of CPU time of the whole process."""
    stages: dict[str, float]

    @property
    def own(self) -> float:
        """The loop's own part."""
        return self.total - sum(self.stages.get(name, 0.0) for name in GIVEN_OFF)

    @property
    def rest(self) -> float:
        """What no stage has: the event loop, tasks and timeouts of the tools, the loop's own lines."""
        return self.own - sum(self.stages.get(name, 0.0) for name in STAGES)


class Watch:
    """Adds up the CPU time of stages, and closes a round whenever all rollouts have asked the engine."""

    def __init__(self, count: int) -> None:
        self.rounds: list[Round] = []
        self.seen: Counter[tuple[int, int]] = Counter()
        """The prompts that the engine was given: length and checksum."""
        self._count = count
        self._stages: defaultdict[str, float] = defaultdict(float)
        self._tokens = self._waiting = 0
        self._began: float | None = None
        self._going = asyncio.Event()

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, with its CPU time added to a stage."""
        clock, stages = time.process_time, self._stages

        def call(*arguments: Any, **options: Any) -> Any:
            start = clock()
            try:
                return function(*arguments, **options)
            finally:
                stages[stage] += clock() - start

        return call

    def see(self, prompt: Any) -> None:
        """Keep what the engine was given."""
        self._tokens += len(prompt)
        self.seen[len(prompt), zlib.crc32(prompt)] += 1

    async def latency(self, _: int) -> None:
        """Wait until all rollouts have asked."""
        self._waiting += 1
        going = self._going
        if self._waiting < self._count:
            await going.wait()
            return
        now = time.process_time()
        if self._began is not None:
            stages = {name: spent / self._count for name, spent in self._stages.items()}
            self.rounds.append(Round(self._tokens / self._count, (now - self._began) / self._count, stages))
        self._stages.clear()
        self._tokens = self._waiting = 0
        self._going = asyncio.Event()
        self._began = time.process_time()
        going.set()

    @contextlib.contextmanager
    def watching(self, renderer: tokentrace.Renderer) -> Iterator[None]:
        """Time the stages of the loop, where they are called."""
        with contextlib.ExitStack() as stack:
            for owner, name, stage in (
                (renderer, "parse_response", "parse"),
                (ParsedResponse, "to_message", "parse"),
                (loop, "cut_text", "cut"),
                (renderer, "bridge", "bridge"),
                (Trajectory, "append_completion", "record"),
                (Trajectory, "append_bridge", "record"),
                (Trajectory, "wire_parts", "wire text"),
                (scripted, "checked_request", "prompt check"),
                (scripted, "answered_ids", "answer check"),
                (scripted, "answered_logprobs", "answer check"),
            ):
                stack.enter_context(mock.patch.object(owner, name, self.timed(stage, getattr(owner, name))))
            yield


@dataclasses.dataclass(frozen=True, slots=True)
class Run:
    """What came of all rollouts of one shape."""

    shape: Shape
    summary: Summary
    rounds: list[Round]
    before: int
    """Bytes of memory that the process held before them."""
    peak: int
    """The most that it ever held."""

    def nearest(self, length: int) -> list[Round]:
        """The rounds whose prompts are about so long: up to nine within a tenth, or the nearest one."""
        by_distance = sorted(self.rounds, key=lambda one: abs(one.tokens - length))
        return [one for one in by_distance[:9] if abs(one.tokens - length) < length / 10] or by_distance[:1]

    def near(self, length: int) -> Round:
        """Medians of the rounds whose prompts are about so long."""
        nearest = self.nearest(length)
        names = {name for one in nearest for name in one.stages}
        return Round(
            statistics.median(one.tokens for one in nearest),
            statistics.median(one.total for one in nearest),
            {name: statistics.median(one.stages.get(name, 0.0) for one in nearest) for name in names},
        )


def pieces(text: str, size: int) -> Iterator[str]:
    """Pieces of a text without end. Each time round they begin elsewhere: no two are the same."""
    start = 0
    while True:
        if start + size > len(text):
            start = (start + 7919) % min(size, len(text) - size)
        yield text[start : start + size]
        start += size


def completions(renderer: tokentrace.Renderer, schemas: list[dict[str, Any]], count: int) -> list[Any]:
    """Turns that reason and call the tool, some 100 to 200 ids each."""
    found = []
    question = {"role": "user", "content": "Go on."}
    for at in range(count):
        thought = f"Nothing leaks so far. Module {at} opens files too, so its cleanup is worth a look. " * (2 + at % 4)
        arguments = {"path": f"lib/module_{at}.py", "first_line": at * 80}
        call = {"id": f"call{at:05d}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        said = {"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "name": "read_file", "content": "…"}
        prompt = renderer.render([question], tools=schemas, add_generation_prompt=True).ids
        rendered = renderer.render([question, said, result], tools=schemas)
        ids = rendered.ids[rendered.mask]
        assert renderer.parse_response(ids, tools=schemas, prompt_ids=prompt).tool_calls[0].ok
        found.append(ids)
    return found


def measure(family: str, shape: Shape, count: int) -> Run:
    """So many rollouts at once, after a few that warm up."""
    renderer = renderer_of(family)
    grown(renderer, dataclasses.replace(shape, length=shape.first + 2 * shape.result), 2)
    return grown(renderer, shape, count)


def grown(renderer: tokentrace.Renderer, shape: Shape, count: int) -> Run:
    """So many rollouts at once, from the first prompt to `shape.length` tokens; exact, or AssertionError."""
    text = "".join(line for line in sources() if line.isascii())
    sample = text[:400_000]
    per_token = len(sample) / len(renderer.tokenizer.encode_plain([sample])[0])
    firsts = pieces(text, max(400, int((shape.first - 300) * per_token)))
    results = pieces(text, int(shape.result * per_token))
    watch = Watch(count)
    read = watch.timed("tool", results.__next__)

    async def read_file(path: str, first_line: int = 0) -> str:
        """Read lines of a file and return them with nothing added.

        Args:
            path: The file to read.
            first_line: Where to begin.
        """
        return str(read())

    tools = as_tools([read_file])
    turns = itertools.cycle(completions(renderer, [tools[0].tool_schema], 64))

    def answer(prompt: Any, _: SamplingParams) -> Any:
        watch.see(prompt)
        return next(turns)

    engine = scripted.ScriptedEngine(
        watch.timed("script", answer),
        vocab_size=renderer.tokenizer.vocabulary.size,
        latency=watch.latency,
        version=1,
        record=False,
    )
    budget = Budget(turns=shape.turns, result_tokens=2 * shape.result)
    agent = Agent(engine, renderer, tools=tools, budget=budget)
    tasks = [
        Task([{"role": "user", "content": f"Find the leak.\n{next(firsts)}"}], name=f"{at:04d}") for at in range(count)
    ]
    rollouts: list[Rollout] = []
    gc.collect()
    before = held("VmRSS")
    with watch.watching(renderer):
        summary = asyncio.run(run_rollouts(agent, tasks, concurrency=count, done=rollouts.append))
    most = held("VmHWM")
    check(summary, rollouts, watch.seen)
    return Run(shape, summary, watch.rounds, before, most)


def check(summary: Summary, rollouts: Sequence[Rollout], seen: Counter[tuple[int, int]]) -> None:
    """AssertionError unless each rollout is exact: each of its turns has the prompt that the engine was given."""
    assert summary.ends == {str(End.TURNS): len(rollouts)}, (summary.ends, [one.notes for one in rollouts[:1]])
    assert (summary.breaks, summary.malformed_turns, summary.tool_errors) == (0, 0, 0), summary
    assert summary.samples == len(rollouts), summary
    expected: Counter[tuple[int, int]] = Counter()
    for rollout in rollouts:
        stream = rollout.trajectory.stream()
        reached = checksum = 0
        for turn in rollout.trajectory.turns():
            checksum = zlib.crc32(stream[reached : turn.start].data, checksum)
            reached = turn.start
            expected[reached, checksum] += 1
    assert expected == seen, f"{(expected - seen).total()} of {expected.total()} prompts were not what is recorded"


def held(what: str) -> int:
    """Bytes of memory that the process holds (VmRSS) or ever held (VmHWM); the latter if the system tells no more."""
    try:
        rows = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(f"{what}:"))


def renderer_of(family: str) -> tokentrace.Renderer:
    """That of a family of the asset list, or of the model that is shipped."""
    return tokentrace.create_renderer(str(POCKET)) if family == "pocket" else our_renderer(family)


# -- report


def run(families: Sequence[str], count: int, progress: Progress) -> list[Block]:
    """Measure, each in a process of its own, and say what came out."""
    load = os.getloadavg()[0]
    said = []
    for family, shape in itertools.product(families, (MODEST, LARGE)):
        task = progress.add_task(f"{family}, results of {shape.result:,} tokens", total=None)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            found = pool.submit(measure, family, shape, count).result()
        progress.remove_task(task)
        said.append(
            f"**{family}**, {found.summary.rollouts:,} rollouts, tool results of about {found.shape.result:,} tokens: "
            "microseconds of CPU time a turn, medians of the rounds next to a length."
        )
        said += [_table(found), "\n".join(f"- {line}" for line in _verdicts(found))]
    return [Block("rollout", "\n\n".join([*said, where(load)]))]


def _lengths(found: Run) -> list[int]:
    return [length for length in LENGTHS if length >= found.shape.first]


def _table(found: Run) -> str:
    near = [found.near(length) for length in _lengths(found)]
    fastest = (min(one.own for one in found.nearest(length)) for length in _lengths(found))
    lines = [
        *([stage, *(micro(one.stages.get(stage, 0.0)) for one in near)] for stage in STAGES),
        ["rest: event loop, tasks and timeouts of tools", *(micro(one.rest) for one in near)],
        ["**own**: the process without script and tool", *(f"**{micro(one.own)}**" for one in near)],
        ["– fastest round", *map(micro, fastest)],
        *([f"not in it: {stage}", *(micro(one.stages.get(stage, 0.0)) for one in near)] for stage in GIVEN_OFF),
    ]
    return table(["tokens of prompt", *(f"{one.tokens:,.0f}" for one in near)], lines)


def _verdicts(found: Run) -> Iterator[str]:
    first, last = (found.near(length) for length in (_lengths(found)[0], LENGTHS[-1]))
    yield f"own, {last.tokens:,.0f} tokens over {first.tokens:,.0f}: {last.own / first.own:.2f} x"
    if found.shape == MODEST:
        verdict = "met" if last.own < WANTED else "**not met**"
        yield f"own at {last.tokens:,.0f} tokens: {milli(last.own)} ms; wanted: under {WANTED * 1e3:.0f}: {verdict}"
    tokens = found.summary.tokens
    yield f"{tokens:,} tokens, {found.summary.turns:,} turns, every prompt as recorded, 0 breaks"
    yield (
        f"memory: {found.peak / 2**20:,.0f} MiB at most, {found.before / 2**20:,.0f} MiB before; for each token "
        f"{(found.peak - found.before) / tokens:.1f} bytes"
    )
