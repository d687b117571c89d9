"""Training rows, compared with TRL (a tagged template under transformers) and `renderers`; ids and masks must be equal.

A row is ids and loss mask of one conversation; other attributes of our tokens are computed lazily. TRL uses its own
training template, so both TRL and tokentrace are measured on that one; `renderers` implements the shipped template by
hand. TRL needs the encoder's character offsets, which fastokens does not provide, so there is no TRL with fastokens.
The limit is one raw encode of the text.
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

import tokentrace
from bench.conversations import sources
from bench.report import Block, milli, table, times, where
from bench.rivals import our_renderer, peer_renderer, transformers_tokenizer
from bench.timing import IN_A_ROW, Call, Spent, settled, take_turns
from tests.assets import family_dir, trl_templates

MESSAGES = (2, 8, 28, 180)
ROUNDS, QUICK_ROUNDS = 20, 2
TRL = {"qwen3": "qwen3_training", "glm-4.5": "glm4moe_training"}
"""TRL's training template for each family."""

Row = tuple[list[int], list[int]]


def chat(count: int, lines: Iterator[str]) -> list[dict[str, Any]]:
    """A conversation of `count` messages about code: a user asks, an assistant explains."""
    messages: list[dict[str, Any]] = []
    for at in range(count // 2):
        code = "".join(itertools.islice(lines, 8)).strip() or "pass"
        answer = "".join(itertools.islice(lines, 6)).strip() or "pass"
        messages.append({"role": "user", "content": f"What does part {at} do?\n{code}"})
        messages.append({"role": "assistant", "content": f"It is easier in other words.\n{answer}"})
    return messages


def row_builder(renderer: Any) -> Callable[[list[dict[str, Any]]], Row]:
    def build(messages: list[dict[str, Any]]) -> Row:
        ids, mask = tokentrace.build_supervised_sample(renderer, messages, past="template")
        return ids, mask

    return build


class Contenders:
    """All builders of rows, loaded beforehand: rivals, ours on the same templates, and the limit."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._hf, fast = transformers_tokenizer(family), transformers_tokenizer(family, fast=True)
        self._raw = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        self._source = trl_templates()[TRL[family]] if family in TRL else None
        self._ours = {"shipped": our_renderer(family)}
        if self._source is not None:
            self._ours["TRL's"] = our_renderer(family, chat_template=self._source)
        peers = {"renderers": peer_renderer(family, self._hf), "renderers + fastokens": peer_renderer(family, fast)}
        self._peers = {name: peer for name, peer in peers.items() if peer is not None}

    @property
    def templates(self) -> dict[str, list[str]]:
        """The rivals on each template."""
        return {"TRL's": ["TRL"], "shipped": list(self._peers)} if self._source else {"shipped": list(self._peers)}

    def calls(self, messages: list[dict[str, Any]], template: str) -> dict[str, Call]:
        """The row of a conversation by each contender."""
        source = self._source if template == "TRL's" else None
        text = self._hf.apply_chat_template(messages, chat_template=source, tokenize=False)
        calls: dict[str, Call] = {
            "tokentrace": partial(row_builder(self._ours[template]), messages),
            "limit": lambda: self._raw.encode_batch_flat([text]),
        }
        if template == "TRL's":
            calls["TRL"] = lambda: self._tagged(messages)
            return calls
        for name, peer in self._peers.items():
            calls[name] = partial(_sample, peer, messages)
        return calls

    def _tagged(self, messages: list[dict[str, Any]]) -> Row:
        encoding = self._hf.apply_chat_template(
            messages, chat_template=self._source, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoding["input_ids"], encoding["assistant_masks"]


def _sample(peer: Any, messages: list[dict[str, Any]]) -> Row:
    from renderers.base import build_training_sample

    sample = build_training_sample(peer, messages)
    return sample.token_ids, [int(value) for value in sample.loss_mask]


def is_same(row: Row, rival_row: Row) -> bool:
    """Whether two rows are equal, except for a token after the stop token, which TRL's tags for Qwen include.

    That token is the newline between turns: the template writes it, and no model samples it.
    """
    ids, mask = np.asarray(row[0]), np.asarray(row[1], np.bool_)
    if not np.array_equal(ids, rival_row[0]):
        return False
    more = np.asarray(rival_row[1], np.bool_) != mask
    return bool((more[1:] <= (mask[:-1] & ~mask[1:])).all()) and not more[:1].any()


@dataclass(slots=True)
class Measured:
    """The measurements on conversations of one length."""

    family: str
    template: str
    tokens: int = 0
    spent: dict[str, Spent] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)


def measure(
    contenders: Contenders, template: str, rounds: int, count: int, lines: Iterator[str], progress: Progress
) -> Measured:
    """One row: `rounds` rounds of new conversations."""
    measured = Measured(contenders.family, template)
    order = random.Random(0)
    task = progress.add_task(f"{contenders.family}: rows of {count} messages", total=rounds + 1)
    with settled():
        for number in range(rounds + 1):
            jobs = [contenders.calls(chat(count, lines), template) for _ in range(IN_A_ROW)]
            for results in take_turns(jobs, order):
                our_row = results["tokentrace"][1]
                for name, (spent, row) in results.items():
                    if name not in ("tokentrace", "limit"):
                        measured.differ[name] = measured.differ.get(name, 0) + (not is_same(our_row, row))
                    if number:  # the first round compiles and warms up
                        measured.spent.setdefault(name, Spent()).values.append(spent)
                measured.tokens = len(our_row[0])
            progress.advance(task)
    return measured


def run(families: Sequence[str], rounds: int, counts: Sequence[int], progress: Progress) -> list[Block]:
    """Measure, and return the blocks of the report."""
    load = os.getloadavg()[0]
    lines = itertools.cycle(sources())
    rows = []
    for family in families:
        contenders = Contenders(family)
        for template, count in itertools.product(contenders.templates, counts):
            rows.append((count, measure(contenders, template, rounds, count, lines, progress)))
    heads = ["family", "template", "messages", "tokens", "rival", "theirs", "**tokentrace**", "mean", "99 %"]
    heads += ["one raw encode", "theirs over ours", "first of a row", "ours over the encode"]
    cells = []
    for count, row in rows:
        ours, limit = row.spent["tokentrace"], row.spent["limit"]
        for name in row.differ or [""]:
            rival = None if not name or row.differ[name] else row.spent[name]
            cells.append(
                [
                    row.family,
                    row.template,
                    str(count),
                    f"{row.tokens:,}",
                    name or "none",
                    milli(rival.median) if rival else f"{row.differ[name]} differ" if name else "–",
                    f"**{milli(ours.median)}**",
                    milli(ours.mean),
                    milli(ours.worst),
                    milli(limit.median),
                    times(rival.median / ours.median) if rival else "–",
                    times(rival.first / ours.first) if rival else "–",
                    times(ours.median / limit.median),
                ]
            )
    note = "Milliseconds of CPU time, medians unless noted."
    firsts = [
        row for _, row in rows if row.family == rows[0][1].family and "TRL" in row.spent and not row.differ["TRL"]
    ]
    short = "- **A training row** has no rival to be compared with here."
    if firsts:
        ratios = [times(row.spent["TRL"].median / row.spent["tokentrace"].median) for row in firsts]
        short = (
            f"- **A training row** of {' / '.join(f'{row.tokens:,}' for row in firsts)} tokens ({firsts[0].family}): "
            f"{' / '.join(ratios)} as fast as TRL's tokenization, whose encoder cannot be swapped."
        )
    return [Block("rows", "\n\n".join([note, table(heads, cells, left=2), where(load)])), Block("rows-short", short)]
