"""Parsing completions, compared with `renderers`, which decodes and searches the text, and with one raw decode.

tokentrace returns reasoning, content and calls with their tokens and statuses; `renderers` and tml-renderers the same
without tokens. Their results are compared with ours, up to white space around the first two.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fastokens
from rich.progress import Progress

from bench.conversations import sources
from bench.report import Block, micro, milli, table, times, where
from bench.rivals import native_parsed_fields, native_renderer, our_renderer, peer_renderer, transformers_tokenizer
from bench.timing import IN_A_ROW, Call, Spent, settled, take_turns
from tests.assets import family_dir
from tokentrace.errors import TemplateError

LENGTHS = (500, 4_000, 32_000)
ROUNDS, QUICK_ROUNDS = 25, 2
CHUNK = 16
"""Tokens that an engine sends at a time if it does not stream single tokens."""
RIVALS = ("renderers", "renderers + fastokens", "tml-renderers")
STREAMED = ("one by one", "with events", f"{CHUNK} at a time")

USER = {"role": "user", "content": "Go."}
TOOL = {
    "type": "function",
    "function": {
        "name": "edit_file",
        "description": "Write a file.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "text": {"type": "string"}, "line": {"type": "integer"}},
        },
    },
}


def completion(renderer: Any, length: int, lines: Sequence[str], round_: int) -> tuple[list[int], list[int]]:
    """Prompt and completion of about `length` tokens: reasoning, content and two calls."""
    chosen = [lines[(round_ * 997 + at) % len(lines)].strip() or "pass" for at in range(length // 12 + 4)]
    third = len(chosen) // 3
    calls = [
        {
            "id": f"functions.edit_file:{at}",
            "type": "function",
            "function": {"name": "edit_file", "arguments": {"path": f"src/{at}.py", "text": text, "line": at}},
        }
        for at, text in enumerate(("\n".join(chosen[:third]), "x = 1"))
    ]
    message = {
        "role": "assistant",
        "reasoning_content": "\n".join(chosen[third : 2 * third]),
        "content": "\n".join(chosen[2 * third :]),
        "tool_calls": calls,
    }
    try:
        rendered = renderer.render([USER, message], tools=[TOOL])
    except TemplateError:  # gpt-oss writes no content beside reasoning and calls
        rendered = renderer.render([USER, {**message, "content": ""}], tools=[TOOL])
    turn = rendered.turns[-1]
    return rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]


def parsed_fields(parsed: Any) -> tuple[Any, ...]:
    """Content, reasoning and calls of a parse, in a form that both libraries share."""
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    return (parsed.content or "").strip(), (parsed.reasoning_content or "").strip(), calls


@dataclass(slots=True)
class Row:
    """The measurements at one length."""

    family: str
    tokens: int = 0
    spent: dict[str, Spent] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)
    """By rival, the number of completions with another result than ours."""

    def figure(self, name: str, of: str = "median") -> float | None:
        """Seconds, or None if it has no parser or its results differ."""
        spent = self.spent.get(name)
        return None if spent is None or self.differ.get(name) else float(getattr(spent, of))


class Contenders:
    """All parsers, loaded beforehand."""

    def __init__(self, family: str) -> None:
        self.family = family
        self.ours = our_renderer(family)
        self._raw = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        hf, fast = transformers_tokenizer(family), transformers_tokenizer(family, fast=True)
        peers = {"renderers": peer_renderer(family, hf), "renderers + fastokens": peer_renderer(family, fast)}
        self.peers = {name: peer for name, peer in peers.items() if peer is not None}
        self._native = native_renderer(family)

    def calls(self, ids: list[int], prompt: list[int]) -> dict[str, Call]:
        """The parse of a completion by each contender."""
        settings = {"tools": [TOOL], "prompt_ids": prompt}
        calls: dict[str, Call] = {
            "tokentrace": lambda: self.ours.parse_response(ids, **settings),
            "decode": lambda: self._raw.decode(ids),
            "one by one": partial(self._stream, ids, settings, 1, False),
            "with events": partial(self._stream, ids, settings, 1, True),
            f"{CHUNK} at a time": partial(self._stream, ids, settings, CHUNK, True),
        }
        for name, peer in self.peers.items():
            calls[name] = lambda peer=peer: peer.parse_response(ids, tools=[TOOL])
        if self._native is not None:
            calls["tml-renderers"] = partial(self._native.parser([USER], [TOOL]).parse_tokens, ids)
        return calls

    def _stream(self, ids: list[int], settings: dict[str, Any], size: int, is_reading: bool) -> Any:
        parser = self.ours.streaming_parser(**settings)
        for at in range(0, len(ids), size):
            events = parser.feed(ids[at : at + size])
            if is_reading:
                list(events)
        return parser.response


def measure(contenders: Contenders, rounds: int, length: int, lines: Sequence[str], progress: Progress) -> Row:
    """One row: `rounds` rounds of different completions."""
    row = Row(contenders.family)
    order = random.Random(0)
    task = progress.add_task(f"{contenders.family}: completions of {length:,} tokens", total=rounds + 1)
    with settled():
        for number in range(rounds + 1):
            jobs = []
            for at in range(number * IN_A_ROW, (number + 1) * IN_A_ROW):
                prompt, ids = completion(contenders.ours, length, lines, at)
                jobs.append(contenders.calls(ids, prompt))
            for results in take_turns(jobs, order):
                _compare(results, row)
                for name, (spent, _) in results.items():
                    if number:  # the first round compiles and warms up
                        row.spent.setdefault(name, Spent()).values.append(spent)
            row.tokens = len(ids)
            progress.advance(task)
    return row


def _compare(results: dict[str, tuple[float, Any]], row: Row) -> None:
    """Count the rivals whose results differ from ours. Raises SystemExit if our own streaming differs."""
    parsed = results["tokentrace"][1]
    for name, (_, other) in results.items():
        if name in RIVALS:
            fields = native_parsed_fields(other) if name == "tml-renderers" else parsed_fields(other)
            row.differ[name] = row.differ.get(name, 0) + (fields != parsed_fields(parsed))
        elif name != "decode" and other != parsed:
            raise SystemExit(f"{row.family}: streamed and whole parses differ, so no figure counts")


def run(families: Sequence[str], rounds: int, lengths: Sequence[int], progress: Progress) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    lines = sources()
    rows = []
    for family in families:
        contenders = Contenders(family)
        rows += [measure(contenders, rounds, length, lines, progress) for length in lengths]
    heads = ["family", "tokens", *RIVALS, "**tokentrace**", "mean", "99 %", "raw decode"]
    heads += ["fastest rival over ours", "first of a row", "ours over decode", "streamed, µs a token", "with events"]
    heads += [f"{CHUNK} at a time"]
    cells = []
    for row in rows:
        ours, decode = row.figure("tokentrace") or 0.0, row.figure("decode") or 0.0
        cells.append(
            [
                row.family,
                f"{row.tokens:,}",
                *(_cell(row, name) for name in RIVALS),
                f"**{milli(ours)}**",
                *(milli(row.figure("tokentrace", of) or 0.0) for of in ("mean", "worst")),
                milli(decode),
                _ahead(row, "median"),
                _ahead(row, "first"),
                times(ours / decode),
                *(micro((row.figure(name) or 0.0) / row.tokens) for name in STREAMED),
            ]
        )
    text = "\n\n".join(["Milliseconds of CPU time, medians unless noted.", table(heads, cells), where(load)])
    return [Block("parse", text)]


def _ahead(row: Row, of: str) -> str:
    peers = [one for name in RIVALS if (one := row.figure(name, of))]
    return times(min(peers) / (row.figure("tokentrace", of) or 1.0)) if peers else "–"


def _cell(row: Row, name: str) -> str:
    if row.differ.get(name):
        return f"{row.differ[name]} differ"
    return "–" if name not in row.spent else milli(row.figure(name) or 0.0)
