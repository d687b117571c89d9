"""A full render: the prompt of an agent's next turn, compared with the rivals and with the limit.

tokentrace's time includes ids, spans of the text, the check of control tokens, the report of lost text and the loss
mask; the spans of single tokens are computed lazily and not included. transformers and tml-renderers return ids,
`renderers` returns ids and message indices. The limit is one raw encode of the rendered text by fastokens, the encoder
of tokentrace.
"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import fastokens
import numpy as np
from rich.progress import Progress

from bench.conversations import many_tools, prompt, sources, tools, varied
from bench.report import Block, milli, table, times, where
from bench.rivals import Message, native_renderer, our_renderer, peer_renderer, transformers_tokenizer
from bench.timing import IN_A_ROW, Call, Spent, settled, take_turns
from tests.assets import family_dir

SIZES = (2_000, 8_000, 32_000, 128_000)
ROUNDS = {2_000: 25, 8_000: 20, 32_000: 8, 128_000: 4}
"""Rounds by size, of `IN_A_ROW` conversations each."""
QUICK_ROUNDS = 1
SLOW_TOKENS = 600_000
"""Rivals with a slow encoder render about this many tokens per size, in at least two rounds."""
SLOW = ("transformers", "renderers")
RIVALS = ("transformers", "transformers + fastokens", "renderers", "renderers + fastokens", "tml-renderers")
OURS, LIMIT = "tokentrace", "limit"

Make = Callable[[], list[Message]]


@dataclass(slots=True)
class Row:
    """The measurements on conversations of one kind."""

    family: str
    kind: str
    tokens: list[int] = field(default_factory=list)
    messages: int = 0
    spent: dict[str, Spent] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)
    """By rival, the number of conversations whose ids differ from the template's."""

    def figure(self, name: str, of: str = "median") -> float | None:
        """Seconds, or None if it was not measured or its ids differ."""
        spent = self.spent.get(name)
        return None if spent is None or self.differ.get(name) else float(getattr(spent, of))

    def ahead(self, of: str = "median") -> float:
        """The fastest rival's time divided by ours."""
        return min(one for name in RIVALS if (one := self.figure(name, of)) is not None) / (self.figure(OURS, of) or 1)


class Contenders:
    """All renderers, loaded and warmed up beforehand."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._hf = transformers_tokenizer(family)
        self._fast = transformers_tokenizer(family, fast=True)
        self._peers = {
            name: peer
            for name, tokenizer in (("renderers", self._hf), ("renderers + fastokens", self._fast))
            if (peer := peer_renderer(family, tokenizer)) is not None
        }
        self._native = native_renderer(family)
        self._ours = our_renderer(family)
        self._limit = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        lines = itertools.cycle(sources())
        for schemas in (tools(), []):
            for call in self.calls(prompt(2_000, lines), schemas).values():
                call()

    def calls(self, messages: list[Message], schemas: list[Message]) -> dict[str, Call]:
        """The render of a prompt by each contender. Inputs in a rival's own format are converted beforehand."""
        settings = {"tools": schemas or None, "add_generation_prompt": True}
        text = self._hf.apply_chat_template(messages, **settings, tokenize=False)
        calls: dict[str, Call] = {
            OURS: lambda: _ids_with_mask(self._ours.render(messages, **settings)),
            "transformers": lambda: self._hf.apply_chat_template(messages, **settings, return_dict=False),
            "transformers + fastokens": lambda: self._fast.apply_chat_template(messages, **settings, return_dict=False),
            LIMIT: lambda: np.frombuffer(self._limit.encode_batch_flat([text])[0], np.uint32),
        }
        for name, peer in self._peers.items():
            calls[name] = lambda peer=peer: peer.render(messages, **settings).token_ids
        if self._native is not None:
            native, converted = self._native, self._native.convert(messages, schemas)
            calls["tml-renderers"] = lambda: native.prompt(converted)
        return calls


def _ids_with_mask(rendered: Any) -> Any:
    """The ids, after reading the loss mask, so that computing the mask is timed as well."""
    if len(rendered.mask) != len(rendered.ids):
        raise SystemExit("the mask does not fit the ids; no figure counts")
    return rendered.ids


def measure(
    contenders: Contenders, kind: str, make: Make, schemas: list[Message], rounds: int, slow: int, progress: Progress
) -> Row:
    """One row: `rounds` rounds of new conversations, of which the `SLOW` rivals take part in about `slow`."""
    row = Row(contenders.family, kind)
    order = random.Random(0)
    task = progress.add_task(f"{contenders.family}, {kind}", total=rounds)
    with settled():
        for number in range(rounds):
            conversations = [make() for _ in range(IN_A_ROW)]
            jobs = [contenders.calls(messages, schemas) for messages in conversations]
            is_slow_turn = number % max(1, rounds // slow) == 0
            timed = [{name: job[name] for name in job if is_slow_turn or name not in SLOW} for job in jobs]
            for job, results in zip(jobs, take_turns(timed, order), strict=True):
                _compare(results, job["transformers"], row)
                for name, (spent, _) in results.items():
                    row.spent.setdefault(name, Spent()).values.append(spent)
                row.tokens.append(len(results[OURS][1]))
            row.messages = len(conversations[-1])
            progress.advance(task)
    return row


def _compare(results: dict[str, tuple[float, Any]], oracle: Call, row: Row) -> None:
    """Count results whose ids differ from those of transformers. Raises SystemExit if it is ours."""
    expected = np.asarray(results["transformers"][1] if "transformers" in results else oracle())
    for name, (_, ids) in results.items():
        if not np.array_equal(np.asarray(ids), expected):
            if name in (OURS, LIMIT):
                raise SystemExit(f"{row.family}, {row.kind}: {name} has other ids than transformers; no figure counts")
            row.differ[name] = row.differ.get(name, 0) + 1


def run(
    families: Sequence[str], repeats: int | None, lines_per_result: Sequence[int], progress: Progress
) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    rows: list[Row] = []
    other_rows: list[Row] = []
    lines = itertools.cycle(sources())
    for family in families:
        contenders = Contenders(family)
        for size in SIZES:
            rounds = repeats or ROUNDS[size]
            slow = min(rounds, max(2, SLOW_TOKENS // size // IN_A_ROW))
            make = partial(prompt, size, lines, lines_per_result)
            rows.append(measure(contenders, f"{size:,}", make, tools(), rounds, slow, progress))
        rounds = repeats or ROUNDS[8_000]
        slow = min(rounds, 2)
        make = partial(varied, 8_000, lines, random.Random(1))
        other_rows.append(measure(contenders, "first-seen shapes", make, tools(), rounds, slow, progress))
        for kind, schemas in (("no tools", []), ("200 tools", many_tools(200))):
            make = partial(prompt, 2_000, lines, lines_per_result)
            other_rows.append(measure(contenders, kind, make, schemas, rounds, slow, progress))
    paragraphs = [
        "Milliseconds of CPU time, medians unless noted. A dash means that the library has no renderer for the "
        "family, or gives other ids than the template (see below).",
        _table(rows, is_by_size=True),
        "Other conversations: 8k tokens in which every conversation has its own shape (reasoning or content, one "
        "call or two, arguments of all types); 2k tokens without tools; and with 200 tools, the same 200 each time:",
        _table(other_rows, is_by_size=False),
        *_differences([*rows, *other_rows]),
        where(load),
    ]
    return [Block("render", "\n\n".join(paragraphs)), Block("render-short", _short(rows))]


def _table(rows: Sequence[Row], *, is_by_size: bool) -> str:
    heads = ["family", "tokens" if is_by_size else "conversation", *RIVALS, "**tokentrace**", "mean", "99 %", "limit"]
    heads += ["fastest rival over ours", "first of a row", "ours over limit"]
    cells = []
    for row in rows:
        ours, limit = row.figure(OURS), row.figure(LIMIT)
        assert ours is not None
        assert limit is not None
        tokens = f"{sorted(row.tokens)[len(row.tokens) // 2]:,}"
        cells.append(
            [
                row.family,
                tokens if is_by_size else f"{row.kind}, {tokens}",
                *(_cell(row.figure(name)) for name in RIVALS),
                f"**{milli(ours)}**",
                *(_cell(row.figure(OURS, of)) for of in ("mean", "worst")),
                milli(limit),
                times(row.ahead()),
                times(row.ahead("first")),
                times(ours / limit),
            ]
        )
    return table(heads, cells, left=2)


def _cell(seconds: float | None) -> str:
    return "–" if seconds is None else milli(seconds)


def _differences(rows: Sequence[Row]) -> Iterator[str]:
    differences = [
        f"{name} on {row.family}, {row.kind} ({count} of {len(row.spent[name].values)} conversations)"
        for row in rows
        for name, count in row.differ.items()
    ]
    if differences:
        yield "Other ids than the template's, hence no figure: " + "; ".join(differences) + "."


def _short(rows: Sequence[Row]) -> str:
    firsts = [row for row in rows if row.family == rows[0].family]

    def each(describe: Callable[[Row], str]) -> str:
        return " / ".join(map(describe, firsts))

    def ratio(row: Row, over: str, under: str) -> str:
        return times((row.figure(over) or 0.0) / (row.figure(under) or 1.0))

    sizes = each(lambda row: f"{sorted(row.tokens)[len(row.tokens) // 2] / 1e3:.0f}k")
    return (
        f"- **A full render with mask** of {sizes} tokens "
        f"({rows[0].family}): {each(lambda row: milli(row.figure(OURS) or 0.0))} ms. That is "
        f"{each(lambda row: ratio(row, 'transformers', OURS))} as fast as transformers; "
        f"{each(lambda row: times(row.ahead()))} as fast as the fastest rival, also with our encoder; "
        f"and {each(lambda row: ratio(row, OURS, LIMIT))} the time of one raw encode of the text."
    )
