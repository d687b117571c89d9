"""Training rows beside TRL's way (a tagged template under transformers) and `renderers`; ids and masks asserted equal.

A row is ids and loss mask of one conversation; what else a row of ours knows of each token is worked out when it is
asked for. TRL swaps in its own training template, so it is measured on that one, and we with it; `renderers` has
the shipped template written out by hand. TRL asks the encoder where in the text each token lies, which fastokens does
not tell: there is no TRL with fastokens. The limit is one raw encode of the text.
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
"""TRL's training template of a family."""

Row = tuple[list[int], list[int]]


def chat(count: int, lines: Iterator[str]) -> list[dict[str, Any]]:
    """A conversation of so many messages, half of them a user's, about what somebody's code says."""
    messages: list[dict[str, Any]] = []
    for at in range(count // 2):
        code = "".join(itertools.islice(lines, 8)).strip() or "pass"
        said = "".join(itertools.islice(lines, 6)).strip() or "pass"
        messages.append({"role": "user", "content": f"What does part {at} do?\n{code}"})
        messages.append({"role": "assistant", "content": f"It is easier in other words.\n{said}"})
    return messages


def ours(renderer: Any) -> Callable[[list[dict[str, Any]]], Row]:
    def build(messages: list[dict[str, Any]]) -> Row:
        ids, mask = tokentrace.build_supervised_sample(renderer, messages, past="template")
        return ids, mask

    return build


class Contenders:
    """Who makes rows, each loaded beforehand: rivals, ours on the same template, and the limit."""

    def __init__(self, family: str) -> None:
        self.family = family
        self._hf, fast = transformers_tokenizer(family), transformers_tokenizer(family, fast=True)
        self._raw = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
        self._source = trl_templates()[TRL[family]] if family in TRL else None
        self._ours = {"shipped": our_renderer(family)}
        if self._source is not None:
            self._ours["TRL's"] = our_renderer(family, chat_template=self._source)
        found = {"renderers": peer_renderer(family, self._hf), "renderers + fastokens": peer_renderer(family, fast)}
        self._peers = {name: peer for name, peer in found.items() if peer is not None}

    @property
    def templates(self) -> dict[str, list[str]]:
        """The rivals, by the template that they have."""
        return {"TRL's": ["TRL"], "shipped": list(self._peers)} if self._source else {"shipped": list(self._peers)}

    def calls(self, messages: list[dict[str, Any]], template: str) -> dict[str, Call]:
        """Everybody's row of a conversation."""
        source = self._source if template == "TRL's" else None
        text = self._hf.apply_chat_template(messages, chat_template=source, tokenize=False)
        found: dict[str, Call] = {
            "tokentrace": partial(ours(self._ours[template]), messages),
            "limit": lambda: self._raw.encode_batch_flat([text]),
        }
        if template == "TRL's":
            found["TRL"] = lambda: self._tagged(messages)
            return found
        for name, peer in self._peers.items():
            found[name] = partial(_sample, peer, messages)
        return found

    def _tagged(self, messages: list[dict[str, Any]]) -> Row:
        made = self._hf.apply_chat_template(
            messages, chat_template=self._source, return_dict=True, return_assistant_tokens_mask=True
        )
        return made["input_ids"], made["assistant_masks"]


def _sample(peer: Any, messages: list[dict[str, Any]]) -> Row:
    from renderers.base import build_training_sample

    made = build_training_sample(peer, messages)
    return made.token_ids, [int(one) for one in made.loss_mask]


def is_same(found: Row, expected: Row) -> bool:
    """Whether two rows are equal, but for a token after the stop token that TRL's tags of Qwen enclose as well.

    It is the newline between turns: the template writes it, and no model samples it.
    """
    ids, mask = np.asarray(found[0]), np.asarray(found[1], np.bool_)
    if not np.array_equal(ids, expected[0]):
        return False
    more = np.asarray(expected[1], np.bool_) != mask
    return bool((more[1:] <= (mask[:-1] & ~mask[1:])).all()) and not more[:1].any()


@dataclass(slots=True)
class Measured:
    """What was measured on conversations of one length."""

    family: str
    template: str
    tokens: int = 0
    spent: dict[str, Spent] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)


def measure(
    contenders: Contenders, template: str, rounds: int, count: int, lines: Iterator[str], progress: Progress
) -> Measured:
    """One row: `rounds` times some conversations that nobody has seen before."""
    found = Measured(contenders.family, template)
    order = random.Random(0)
    task = progress.add_task(f"{contenders.family}: rows of {count} messages", total=rounds + 1)
    with settled():
        for number in range(rounds + 1):
            jobs = [contenders.calls(chat(count, lines), template) for _ in range(IN_A_ROW)]
            for made in take_turns(jobs, order):
                mine = made["tokentrace"][1]
                for name, (spent, row) in made.items():
                    if name not in ("tokentrace", "limit"):
                        found.differ[name] = found.differ.get(name, 0) + (not is_same(mine, row))
                    if number:  # the first round compiles and warms
                        found.spent.setdefault(name, Spent()).values.append(spent)
                found.tokens = len(mine[0])
            progress.advance(task)
    return found


def run(families: Sequence[str], rounds: int, counts: Sequence[int], progress: Progress) -> list[Block]:
    """Measure, and say what came out."""
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
        own, limit = row.spent["tokentrace"], row.spent["limit"]
        for name in row.differ or [""]:
            other = None if not name or row.differ[name] else row.spent[name]
            cells.append(
                [
                    row.family,
                    row.template,
                    str(count),
                    f"{row.tokens:,}",
                    name or "none",
                    milli(other.median) if other else f"{row.differ[name]} differ" if name else "–",
                    f"**{milli(own.median)}**",
                    milli(own.mean),
                    milli(own.worst),
                    milli(limit.median),
                    times(other.median / own.median) if other else "–",
                    times(other.first / own.first) if other else "–",
                    times(own.median / limit.median),
                ]
            )
    said = "Milliseconds of CPU time, medians unless noted."
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
    return [Block("rows", "\n\n".join([said, table(heads, cells, left=2), where(load)])), Block("rows-short", short)]
