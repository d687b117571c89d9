"""Helpers for several integrations: rollouts of pocket and of scripts, and rows for a trainer."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from click.testing import CliRunner

from tests.data.generate import write_conversations
from tests.integrations.rollouts import QUESTION, RENDERER, calculator
from tokentrace.cli import main
from tokentrace.engines import Engine, SamplingParams
from tokentrace.engines.scripted import ScriptedEngine
from tokentrace.pocket import POCKET
from tokentrace.rollout import Agent, Rollout, Task


def pocket_rollout(engine: Engine, close: Callable[[], Any], **settings: Any) -> Rollout:
    """A rollout with a calculator on an engine that samples with pocket."""

    async def run() -> Rollout:
        agent = Agent(engine, RENDERER, tools=[calculator], sampling=SamplingParams(256), **settings)
        try:
            return await agent.run(Task(QUESTION, name="one"), seed=5)
        finally:
            await close()

    return asyncio.run(run())


def scripted(*turns: str) -> ScriptedEngine:
    """An engine that samples these turns in order."""
    texts, size = iter(turns), RENDERER.tokenizer.vocabulary.size
    return ScriptedEngine(lambda *_: RENDERER.tokenizer.encode(f"{next(texts)}<|end|>"), vocab_size=size)


def call(name: str, /, **arguments: Any) -> str:
    """A tool call in pocket's format."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def rows_for(trainer: str, folder: Path) -> tuple[dict[str, Any], list[Any]]:
    """The configuration that our command prints for a trainer, and the samples in its file."""
    from tokentrace.data import read_samples

    chats = str(write_conversations(folder / "chats.jsonl", 12, seed=4))

    def tokenize(name: str, *options: str) -> str:
        done = CliRunner().invoke(main, ["tokenize", chats, "-o", str(folder / name), "-t", str(POCKET), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    tokenize("all.parquet")
    advice = tokenize("rows.parquet", "--for", trainer).partition(f"for {trainer}:\n")[2]
    return yaml.safe_load(advice), list(read_samples(folder / "all.parquet"))
