"""The gateway over HTTP: CPU time per turn compared with a direct call of the engine, the first byte, many sessions.

A real ``tokentrace serve`` with a store on disk talks to `bench.fake_engine`, each in its own process. An agent with
tools sends its whole, growing conversation with every request. Figures count only if every prompt that the engine got
is a prefix of a stream in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import socket
import statistics
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

import tokentrace
from bench.conversations import CHARACTERS_PER_TOKEN, sources, tools
from bench.processes import Client, Reply, Server, python, running
from bench.report import Block, milli, table, where
from tests.assets import family_dir
from tokentrace.engines.protocol import SamplingParams, collected
from tokentrace.engines.vllm import VLLMEngine
from tokentrace.gateway.session import SessionRecord
from tokentrace.store.sqlite import sqlite_store
from tokentrace.trajectory import Trajectory

LENGTHS = (1_000, 8_000, 25_000, 50_000)
RESULT = 1_900
"""Characters of a tool result: about 480 tokens."""
SESSIONS, QUICK_SESSIONS = 200, 50
TURNS = 4
"""Turns per session in the part with many sessions."""
STREAMS, QUICK_STREAMS = 100, 30
_CHAT = "/v1/chat/completions"
_SETTLING = 0.005
_WARM = 5_000
"""Tokens of the first session, which warms up and is not measured."""
_TURNS_STREAMED = 10
_GROWN, _NEAR = 3, 27
"""The number of growing sessions, and of their turns per median."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of one session: CPU time of the gateway, and of a direct call of the engine."""

    tokens: int
    gateway: float
    raw: float
    seconds: float
    raw_seconds: float


@dataclass(slots=True)
class Conversation:
    """An agent's conversation, sent whole with every request."""

    lines: Iterator[str]
    messages: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.messages.append({"role": "user", "content": "One of these modules leaks a file handle. Find it."})

    def body(self, stream: bool) -> bytes:
        """The body of the next request."""
        return json.dumps({"model": "bench", "messages": self.messages, "tools": tools(), "stream": stream}).encode()

    def add_reply(self, reply: Reply, stream: bool) -> None:
        """Append the reply, as agents do, and the result of its call."""
        if reply.status != 200:
            raise SystemExit(f"the gateway said {reply.status}: {reply.body[:500]!r}")
        message = streamed_message(reply.body) if stream else json.loads(reply.body)["choices"][0]["message"]
        call = message["tool_calls"][0]["id"]
        text = "".join(next(self.lines) for _ in range(80))[:RESULT]
        self.messages += [message, {"role": "tool", "tool_call_id": call, "content": text}]


def streamed_message(body: bytes) -> dict[str, Any]:
    """Join a stream of Chat Completions into one message."""
    message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for line in body.decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        for choice in json.loads(line[6:])["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                if call.get("id"):
                    calls.append({"id": call["id"], "type": "function", "function": dict(call["function"])})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
    return message | {"tool_calls": calls}


def scripted_answer(renderer: tokentrace.Renderer) -> list[int]:
    """The ids of the model's only answer: reasoning and a tool call."""
    question = [{"role": "user", "content": "Look."}]
    arguments = {"path": "lib/module.py", "first_line": "80", "last_line": "120"}
    call = {"id": "call00001", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
    thought = "Nothing leaks so far. The next module opens files too, so its cleanup is worth a look."
    reply = {"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]}
    prompt = renderer.render_ids(question, tools=tools(), add_generation_prompt=True)
    whole = renderer.render_ids([*question, reply], tools=tools())
    stops = set(renderer.get_stop_token_ids())
    end = next(at for at in range(len(prompt), len(whole)) if whole[at] in stops)
    return whole[len(prompt) : end + 1]


@contextlib.asynccontextmanager
async def served(family: str, store: Path, *, delay: float = 0.0) -> AsyncIterator[tuple[Server, Server]]:
    """Run the engine and the gateway."""
    answer = scripted_answer(tokentrace.create_renderer(str(family_dir(family))))
    engine_command = python("bench.fake_engine", "--answers", json.dumps([answer]), "--delay", str(delay))
    async with running(*engine_command) as engine:
        serve = ("serve", "--dev", "--engine", engine.url, "-t", str(family_dir(family)), "--port", "0", "-q")
        async with running(*python("tokentrace", *serve, "--store", str(store))) as gateway:
            yield engine, gateway


# -- (a) CPU time per turn


async def turns(family: str, store: Path, length: int, stream: bool) -> list[Turn]:
    """Grow sessions to a length, and after each turn call the engine directly with as many ids.

    A shorter session comes first to warm up.
    """
    all_turns: list[Turn] = []
    async with served(family, store) as (engine, gateway):
        direct = await VLLMEngine.connect(engine.url)
        client = Client(gateway.url)
        prompts: Counter[tuple[int, int]] = Counter()
        for number in range(1 + _GROWN):
            conversation = Conversation(itertools.cycle(sources()))
            session_turns: list[Turn] = []
            while not session_turns or session_turns[-1].tokens < (length if number else min(length, _WARM)):
                before = gateway.cpu()
                reply = await client.post(f"/sessions/grown{number}{_CHAT}", conversation.body(stream))
                await asyncio.sleep(_SETTLING)  # work after the response counts as well
                spent = gateway.cpu() - before
                conversation.add_reply(reply, stream)
                count, checksum, _ = map(int, (await _request_log(engine))[-1])
                prompts[count, checksum] += 1
                raw, seconds = await _raw(direct, count, stream)
                session_turns.append(Turn(count, spent, raw, reply.seconds, seconds))
                if len(session_turns) < 4:
                    await gateway.wait_idle()
            all_turns += session_turns if number else []
        await direct.close()
        client.close()
    await check(store, prompts)
    return all_turns


async def _raw(engine: VLLMEngine, count: int, stream: bool) -> tuple[float, float]:
    """CPU time and wall time of a direct call of the engine."""
    ids = np.arange(count, dtype=np.int32) % 50_000
    began, start = time.perf_counter(), time.process_time()
    if stream:
        await collected(engine.stream(ids, SamplingParams(1_000)))
    else:
        await engine.generate(ids, SamplingParams(1_000))
    return time.process_time() - start, time.perf_counter() - began


async def _request_log(engine: Server) -> list[list[float]]:
    client = Client(engine.url)
    try:
        log: list[list[float]] = json.loads((await client.get("/asked")).body)
        return log
    finally:
        client.close()


async def check(store: Path, seen: Mapping[tuple[int, int], int]) -> int:
    """Count the stored tokens. Raises AssertionError if the engine's prompts are not those of the store."""
    expected: Counter[tuple[int, int]] = Counter()
    tokens = 0
    database = sqlite_store(store)
    try:
        async for info in database.sessions():
            session = SessionRecord(Trajectory(name=info.id))
            async for turn in database.turns(info.id):
                session.replay(turn)
            assert len(session.trajectory.branches) == 1, f"{info.id} branched: {session.turns[-1].cause}"
            stream = session.trajectory.stream(0)
            tokens += len(stream)
            for recorded in session.turns:
                text = repr(stream[: recorded.start].tolist()).replace(" ", "").encode()
                expected[recorded.start, zlib.crc32(text)] += 1
    finally:
        await database.close()
    wrong = sum((Counter(seen) - expected).values())
    assert expected == Counter(seen), f"{wrong} of {sum(seen.values())} prompts differ from the store"
    return tokens


# -- (b) the first streamed byte


async def first_bytes(family: str, store: Path, count: int, length: int) -> list[float]:
    """Seconds from the engine's first event to the agent's first byte, in sessions that begin at `length` tokens."""
    delays: list[float] = []
    async with served(family, store, delay=0.002) as (engine, gateway):
        lines, client = itertools.cycle(sources()), Client(gateway.url)
        for session in range(-(-count // _TURNS_STREAMED)):
            conversation = Conversation(lines)
            while len(conversation.messages[0]["content"]) < length * CHARACTERS_PER_TOKEN:
                conversation.messages[0]["content"] += next(lines)
            for _ in range(_TURNS_STREAMED):
                reply = await client.post(f"/sessions/streamed{session}{_CHAT}", conversation.body(stream=True))
                delays.append(reply.first - (await _request_log(engine))[-1][2])
                conversation.add_reply(reply, stream=True)
        client.close()
    return delays[1:]  # the first one includes the analysis of the template


# -- (c) many sessions


@dataclass(frozen=True, slots=True)
class Load:
    """The measurements of many concurrent sessions."""

    sessions: int
    turns: int
    seconds: float
    cpu: float
    times: list[float]
    memory: int
    tokens: int
    stored: int


async def many(family: str, store: Path, sessions: int) -> Load:
    """Run all sessions concurrently, `TURNS` turns each."""
    times: list[float] = []

    async def run_session(gateway: Server, number: int, lines: Iterator[str]) -> None:
        conversation, client = Conversation(lines), Client(gateway.url)
        try:
            for _ in range(TURNS):
                reply = await client.post(f"/sessions/many{number}{_CHAT}", conversation.body(stream=False))
                conversation.add_reply(reply, stream=False)
                times.append(reply.seconds)
        finally:
            client.close()

    async with served(family, store) as (engine, gateway):
        lines = itertools.cycle(sources())
        await run_session(gateway, -1, lines)  # analyzes the template, warms the tokenizer up
        times.clear()
        skipped, memory, before = len(await _request_log(engine)) - TURNS, gateway.memory(), gateway.cpu()
        began = time.perf_counter()
        await asyncio.gather(*(run_session(gateway, number, lines) for number in range(sessions)))
        seconds, cpu = time.perf_counter() - began, gateway.cpu() - before
        growth = gateway.memory() - memory
        seen = Counter((int(count), int(crc)) for count, crc, _ in (await _request_log(engine))[skipped:])
    tokens = await check(store, seen)
    stored = sum(os.path.getsize(path) for path in store.parent.glob(f"{store.name}*"))
    return Load(sessions, len(times), seconds, cpu, times, growth, tokens, stored)


# -- (d) a proxy that records nothing


async def proxied(command: str, folder: Path, length: int) -> list[tuple[int, float]]:
    """Request size in bytes and CPU time of each turn of LiteLLM's proxy, in a conversation of the same kind."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    costs: list[tuple[int, float]] = []
    async with running(*python("bench.fake_engine")) as engine:
        model = {"model": "openai/fake", "api_base": f"{engine.url}/v1", "api_key": "none"}
        config = folder / "litellm.yaml"
        config.write_text(json.dumps({"model_list": [{"model_name": "bench", "litellm_params": model}]}))
        arguments = (command, "--config", str(config), "--host", "127.0.0.1", "--port", str(port))
        flags = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        async with running(*arguments, url=f"http://127.0.0.1:{port}", environment=flags) as proxy:
            conversation, client = Conversation(itertools.cycle(sources())), Client(proxy.url)
            while len(body := conversation.body(stream=False)) < length * CHARACTERS_PER_TOKEN:
                before = proxy.cpu()
                reply = await client.post(_CHAT, body)
                await asyncio.sleep(10 * _SETTLING)  # it counts and logs after the response
                costs.append((len(body), proxy.cpu() - before))
                conversation.add_reply(reply, stream=False)
            client.close()
    return costs


# -- report


def run(families: Sequence[str], quick: bool, progress: Progress) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    paragraphs = []
    for family in families:
        task = progress.add_task(f"{family}: the gateway", total=None)
        paragraphs += [f"**{family}**", *_paragraphs(family, LENGTHS[:2] if quick else LENGTHS, quick)]
        progress.remove_task(task)
    return [Block("gateway", "\n\n".join([*paragraphs, where(load)]))]


def _paragraphs(family: str, lengths: Sequence[int], quick: bool) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        for stream in (False, True):
            measured = asyncio.run(turns(family, Path(folder) / f"grown{stream}.db", lengths[-1], stream))
            yield f"{'Streamed' if stream else 'Whole'} answers: milliseconds of CPU time a turn, medians of {_NEAR}:"
            yield _turns_table(measured, lengths)
        waits = asyncio.run(
            first_bytes(family, Path(folder) / "first.db", QUICK_STREAMS if quick else STREAMS, lengths[-1])
        )
        yield (
            f"First streamed byte after the engine's, {len(waits)} streams of {lengths[-1]:,} tokens: median "
            f"{_quantile(waits, 0.5)}, 99 of 100 within {_quantile(waits, 0.99)}."
        )
        load = asyncio.run(many(family, Path(folder) / "many.db", QUICK_SESSIONS if quick else SESSIONS))
    yield (
        f"{load.sessions} sessions at once, {TURNS} turns each, all prompts exact: "
        f"{load.turns / load.seconds:.0f} turns a second, "
        f"{load.cpu / load.turns * 1e3:.1f} ms of CPU time a turn, "
        f"median {_quantile(load.times, 0.5)}, 99 of 100 within {_quantile(load.times, 0.99)}, "
        f"{load.memory / load.sessions / 1024:.0f} KiB of memory a session; "
        f"{load.stored / load.tokens:.1f} bytes a token in the store."
    )
    command = shutil.which("litellm")
    if command is None:
        yield "LiteLLM: not measured, there was no command litellm on the PATH."
        return
    with tempfile.TemporaryDirectory() as folder:
        costs = asyncio.run(proxied(command, Path(folder), lengths[-1]))
    for part in (costs[:9], costs[-9:]):
        size, spent = (statistics.median(values) for values in zip(*part, strict=True))
        yield f"LiteLLM, which records nothing: {spent * 1e3:.2f} ms of CPU time a turn of {size:,.0f} bytes."


def _turns_table(measured: Sequence[Turn], lengths: Sequence[int]) -> str:
    cells = []
    for length in lengths:
        near = sorted(measured, key=lambda turn: abs(turn.tokens - length))[:_NEAR]
        middle = [statistics.median(values) for values in zip(*(_columns(turn) for turn in near), strict=True)]
        cells.append([f"{statistics.median(turn.tokens for turn in near):,.0f}", *map(milli, middle)])
    return table(["tokens", "gateway process", "raw engine call", "overhead", "time", "raw time"], cells)


def _columns(turn: Turn) -> tuple[float, ...]:
    return turn.gateway, turn.raw, turn.gateway - turn.raw, turn.seconds, turn.raw_seconds


def _quantile(values: Sequence[float], part: float) -> str:
    return f"{sorted(values)[min(len(values) - 1, int(part * len(values)))] * 1e3:.1f} ms"
