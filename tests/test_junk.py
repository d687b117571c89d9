"""Junk arguments to every public entry point: a call returns a result or raises a `TokentraceError`."""

import asyncio
import contextlib
import functools
import random
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokentrace as tt
from tests.conversations import assistant, call, result, system, tool, user
from tokentrace.data import TokenizeSettings, read_samples, tokenize_rows, write_samples
from tokentrace.diagnose import tokenize_incrementally
from tokentrace.engines import EngineReply, ScriptedEngine
from tokentrace.engines.protocol import SamplingParams
from tokentrace.errors import brief
from tokentrace.formats import DIALECTS
from tokentrace.pocket import POCKET
from tokentrace.rollout.loading import load_tools
from tokentrace.samples import build_prompt_response_sample
from tokentrace.template import ChatTemplate
from tokentrace.trajectory import from_bytes, to_bytes

RENDERER = tt.create_renderer(POCKET)
TOOL = tool("add", "Adds.", {"a": {"type": "integer"}, "b": {"type": "integer"}}, [])
CHAT: list[dict[str, Any]] = [
    system("Be brief."),
    user("What is 2+2?"),
    assistant("", call("add", {"a": 2, "b": 2}, "c1"), reasoning="add"),
    result("4", "c1", "add"),
    assistant("It is 4."),
]
PROMPT = RENDERER.render_ids(CHAT[:2], tools=[TOOL], add_generation_prompt=True)
RENDERED = RENDERER.render(CHAT, tools=[TOOL])
SAMPLED = RENDERED.ids[RENDERED.turns[0].start : RENDERED.turns[0].stop].tolist()
SAMPLE = tt.build_supervised_sample(RENDERER, CHAT, tools=[TOOL])


def started_trajectory() -> tt.Trajectory:
    record = tt.Trajectory(name="one")
    record.begin(PROMPT, messages=2)
    return record


def recorded_trajectory() -> tt.Trajectory:
    record = started_trajectory()
    record.append_completion(SAMPLED, [-0.5] * len(SAMPLED), finish_reason="stop", version="1")
    return record


RECORD = recorded_trajectory()
RECORD_BYTES = to_bytes(RECORD)


class Odd:
    """An object that raises when it is measured, iterated or compared, and has no attributes."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def __len__(self) -> int:
        raise ValueError("no length")

    def __iter__(self) -> Any:
        raise ValueError("not to be walked")

    def __eq__(self, other: object) -> bool:
        raise ValueError("not to be compared")

    __hash__ = object.__hash__


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)
DEEP = [functools.reduce(lambda value, _: {"k": value}, range(depth), "x") for depth in (5, 200, 5_000)]
MAKERS: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([0, -1, 1, 7, 2**31, 2**63, -(2**70), 10**400]),
    lambda r: r.choice([0.0, -0.5, 1e308, float("nan"), float("inf"), -float("inf")]),
    lambda r: r.choice(["", "x", "\ud800", "<|end|>", "a\0b", "../../x", "{", "[1, 2", "null", "é" * 50, "x" * 5000]),
    lambda r: r.choice([b"", b"\xff\xfe", bytearray(b"x"), memoryview(b"abc")]),
    lambda r: r.choice([[], (), {}, set(), frozenset({1}), [None], [[]], {"": None}, {1: 2}, range(3)]),
    lambda r: r.choice([np.int64(3), np.float32(0.5), np.bool_(True), np.str_("x"), np.datetime64("2026-01-01")]),
    lambda r: r.choice([np.zeros(0), np.zeros((2, 2), np.int32), np.array(5), np.array(["a"]), np.array([None])]),
    lambda r: r.choice(
        [np.array([1.5, 2.0]), np.array([2**40]), np.array([-1, 2], np.int8), np.zeros(3, np.complex64)]
    ),
    lambda r: r.choice(DEEP),
    lambda r: ENDLESS,
    lambda r: object(),
    lambda r: Odd(),
    lambda r: r.choice([int, print, lambda *a, **k: None, iter([1]), Exception("x"), Path("/nowhere"), NotImplemented]),
    lambda r: {"role": r.choice(["user", "assistant", "tool", "toool", None]), "content": junk(r)},
    lambda r: [{"type": r.choice(["text", "image", "x", None]), "text": junk(r)}],
    lambda r: [junk(r) for _ in range(r.randrange(4))],
    lambda r: {r.choice(["name", "arguments", "type", "x"]): junk(r) for _ in range(r.randrange(3))},
    lambda r: [r.randrange(-5, 2**33) for _ in range(r.randrange(5))],
]


def junk(r: random.Random) -> Any:
    return r.choice(MAKERS)(r)


def corrupted(value: Any, r: random.Random) -> Any:
    """The value, with all of it or one value inside it replaced by junk."""
    if isinstance(value, dict) and value and r.random() < 0.8:
        key = r.choice(list(value))
        if r.random() < 0.1:
            return {name: inner for name, inner in value.items() if name != key}
        return {**value, key: corrupted(value[key], r)}
    if isinstance(value, list) and value and r.random() < 0.8:
        at = r.randrange(len(value))
        return [*value[:at], corrupted(value[at], r), *value[at + 1 :]]
    return junk(r)


EntryPoint = tuple[str, Callable[..., Any], dict[str, Any]]


def run(engine: Any, prompt: Any, params: Any) -> Any:
    return asyncio.run(engine.generate(prompt, params))


def in_folder(use: Callable[[Path], Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return use(Path(folder))


def write_rows(samples: Any, metadata: Any) -> Any:
    return in_folder(lambda folder: write_samples(folder / "rows.parquet", samples, metadata))


def load_content(content: Any) -> Any:
    def use(folder: Path) -> Any:
        (folder / "one.tt").write_bytes(content)
        return tt.load_trajectory(folder / "one.tt")

    return in_folder(use) if isinstance(content, (bytes, bytearray)) else from_bytes(content)


def load_config(text: Any) -> Any:
    def use(folder: Path) -> Any:
        (folder / "run.yaml").write_text(text if isinstance(text, str) else brief(text), errors="replace")
        return load_tools(folder / "run.yaml")

    return in_folder(use)


def task_run(**settings: Any) -> Any:
    engine = ScriptedEngine(lambda prompt, sampling: EngineReply(SAMPLED, [-0.5] * len(SAMPLED)))
    budget = settings.pop("budget")
    if isinstance(budget, dict):  # Python itself refuses other names
        budget = tt.Budget(**{name: budget[name] for name in budget if name in tt.Budget.__dataclass_fields__})
    agent = tt.Agent(engine, RENDERER, tools=settings.pop("agent_tools"), budget=budget)
    return asyncio.run(agent.run(tt.Task(**settings)))


IDS = {"token_ids": SAMPLED, "tools": [TOOL], "prompt_ids": PROMPT}
TALK = {"messages": CHAT, "tools": [TOOL]}

ENTRY_POINTS: list[EntryPoint] = [
    ("render", RENDERER.render, {**TALK, "add_generation_prompt": True}),
    ("find_unreadable", RENDERER.find_unreadable, TALK),
    ("check_messages", RENDERER.check_messages, TALK),
    (
        "bridge",
        RENDERER.bridge,
        {"prev_prompt_ids": PROMPT, "prev_completion_ids": SAMPLED, "new_messages": [CHAT[3]], **TALK},
    ),
    ("parse_response", RENDERER.parse_response, IDS),
    ("streaming_parser", lambda token_ids, **options: RENDERER.streaming_parser(**options).feed(token_ids), IDS),
    ("decode", RENDERER.decode, {"token_ids": SAMPLED}),
    ("grammar", RENDERER.grammar, {"tools": [TOOL]}),
    ("select", RENDERED.select, {"message": 1, "role": "user", "field": "content", "sampled": False}),
    ("decode", RENDERED.decode, {"chosen": slice(0, 3)}),
    (
        "create_renderer",
        tt.create_renderer,
        {
            "tokenizer": RENDERER.tokenizer,
            "renderer": "default",
            "control_tokens": "literal",
            "chat_template": "{{ messages[0].content }}",
            "history": "train",
            "truncation": "close",
            "tool_parser": "hermes",
            "reasoning_parser": "think",
            "trusted": ["system"],
            "preserve_all_thinking": False,
            "use_patched": False,
        },
    ),
    ("create_renderer_pool", tt.create_renderer_pool, {"name_or_path": RENDERER.tokenizer, "size": 2}),
    ("load_tokenizer", tt.load_tokenizer, {"source": RENDERER.tokenizer}),
    ("ChatTemplate", ChatTemplate, {"source": "{{ messages }}"}),
    (
        "Dialect.format",
        lambda calls, content: DIALECTS["hermes"].format(calls, content=content),
        {"calls": [{"name": "f", "arguments": {"a": 1}}], "content": "x"},
    ),
    (
        "build_supervised_sample",
        lambda **kwargs: tt.build_supervised_sample(RENDERER, **kwargs),
        {**TALK, "turns": "all", "parts": ["content"], "roles": ["assistant"], "past": "template", "since": 0},
    ),
    (
        "build_supervised_samples",
        lambda **kwargs: tt.build_supervised_samples(RENDERER, **kwargs),
        {**TALK, "past": "expand", "since": 0, "turns": "all"},
    ),
    (
        "build_prompt_response_sample",
        lambda **kwargs: build_prompt_response_sample(RENDERER, **kwargs),
        {"prompt": CHAT[:2], "response": "4", "tools": [TOOL], "eos": "<|end|>"},
    ),
    ("compare_histories", lambda **kwargs: tt.compare_histories(RENDERER, **kwargs), TALK),
    (
        "tokenize_incrementally",
        lambda **kwargs: tokenize_incrementally(RENDERER, **kwargs),
        {**TALK, "mode": "fixed_base", "sanity_check": "off"},
    ),
    (
        "explain_break",
        lambda **kwargs: tt.explain_break(tokenizer=RENDERER, **kwargs),
        {
            "stream": [*PROMPT, *SAMPLED],
            "next_prompt": [*PROMPT, *SAMPLED[1:]],
            "sampled": [False] * len(PROMPT) + [True] * len(SAMPLED),
            "anchor": PROMPT,
            "before": TALK,
            "after": TALK,
        },
    ),
    ("Trajectory", tt.Trajectory, {"name": "x", "vocab_size": 1000, "logprobs": True, "metadata": {"a": 1}}),
    (
        "begin",
        lambda **kwargs: tt.Trajectory().begin(**kwargs),
        {"prompt_ids": PROMPT, "messages": 2, "message_spans": []},
    ),
    (
        "append_completion",
        lambda **kwargs: started_trajectory().append_completion(**kwargs),
        {
            "ids": SAMPLED,
            "logprobs": [-0.5] * len(SAMPLED),
            "finish_reason": "stop",
            "version": "1",
            "sampling": {"temperature": 1.0},
            "continues": False,
            "branch": 0,
        },
    ),
    (
        "append_context",
        lambda **kwargs: recorded_trajectory().append_context(**kwargs),
        {"new_ids": [1, 2], "kinds": [2, 2], "message_spans": [], "messages": 0, "branch": 0},
    ),
    ("append_bridge", lambda bridge: recorded_trajectory().append_bridge(bridge), {"bridge": None}),
    ("extend_to", lambda **kwargs: recorded_trajectory().extend_to(**kwargs), {"prompt_ids": [*PROMPT, *SAMPLED, 5]}),
    ("branch", lambda **kwargs: recorded_trajectory().branch(**kwargs), {"prompt_ids": [*PROMPT[:5], 7], "cause": "x"}),
    ("stream", RECORD.stream, {"branch": 0}),
    ("load_trajectory", load_content, {"content": RECORD_BYTES}),
    ("trajectory_samples", lambda **kwargs: tt.trajectory_samples(RECORD, **kwargs), {"reward": 1.0, "advantage": 0.5}),
    ("collate", tt.collate, {"samples": [SAMPLE, SAMPLE], "pad_id": 0, "side": "left", "length": 512}),
    ("truncate", tt.truncate, {"sample": SAMPLE, "length": 20, "policy": "drop"}),
    ("Sample.slice", SAMPLE.slice, {"start": 0, "stop": 5}),
    ("write_samples", write_rows, {"samples": [SAMPLE], "metadata": {"a": "b"}}),
    ("read_samples", lambda path: list(read_samples(path)), {"path": "/nowhere/rows.parquet"}),
    (
        "tokenize_rows",
        lambda rows, **kwargs: list(tokenize_rows(TokenizeSettings(str(POCKET), **kwargs), rows)),
        {"rows": [{"messages": CHAT, "tools": [TOOL]}], "max_length": 100, "overlong": "drop", "renderer": "auto"},
    ),
    (
        "SamplingParams",
        SamplingParams,
        {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 1, "stop_token_ids": (1,)}
        | {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1, "stop": ("x",)},
    ),
    (
        "ScriptedEngine",
        lambda answer, prompt: run(ScriptedEngine(lambda *_: answer), prompt, SamplingParams(64)),
        {"answer": EngineReply(SAMPLED, [-0.5] * len(SAMPLED)), "prompt": PROMPT},
    ),
    ("Budget", tt.Budget, {"turns": 2, "turn_tokens": 8, "tokens": 100, "tool_timeout": 1.0, "result_keep": "middle"}),
    (
        "Agent",
        task_run,
        {
            "messages": CHAT[:2],
            "name": "x",
            "metadata": {"a": 1},
            "tool_settings": {},
            "agent_tools": [],
            "budget": {"turns": 2, "turn_tokens": 64, "tokens": 500},
        },
    ),
    ("load_tools", load_config, {"text": "tools: []\n"}),
]


def attempt(seed: int) -> str | None:
    """Make one call with junk in it; return a description of its failure, or None."""
    r = random.Random(seed)
    name, entry_point, valid = r.choice(ENTRY_POINTS)
    parameter = r.choice(list(valid))
    arguments = {**valid, parameter: corrupted(valid[parameter], r)}
    try:
        with contextlib.redirect_stdout(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            entry_point(**arguments)
    except tt.TokentraceError as error:
        return None if str(error).strip() else f"seed {seed}: {name}({parameter}=…): an error without words"
    except Exception as error:
        summary = f"{type(error).__name__}: {str(error)[:120]}"
        return f"seed {seed}: {name}({parameter}={_short(arguments[parameter])}): {summary}"
    return None


def _short(value: Any) -> str:
    try:
        return repr(value)[:120]
    except Exception as error:
        return f"<{type(value).__name__}: {error}>"


@pytest.mark.parametrize("entry_point", ENTRY_POINTS, ids=lambda entry_point: entry_point[0])
def test_every_entry_point_accepts_a_valid_call(entry_point: EntryPoint) -> None:
    """Else junk would be refused for a reason other than the junk."""
    name, use, valid = entry_point
    if name in ("append_bridge", "read_samples", "load_tools"):
        pytest.skip("has no valid call here: tried with junk alone")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use(**valid)


@pytest.mark.parametrize("seeds", [range(5_000), pytest.param(range(5_000, 105_000), marks=pytest.mark.long)], ids=len)
def test_junk_gives_typed_errors(seeds: range) -> None:
    assert [problem for seed in seeds if (problem := attempt(seed)) is not None] == []
