"""Training rows beside TRL's way (a tagged template under transformers) and `renderers`; ids and masks asserted equal.

A row is ids and loss mask of one conversation. TRL swaps in a training template of its own, so it is measured on that
one, and we with it; `renderers` has the shipped template written out by hand.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import tokentrace
from bench import cpu_time, peer_renderer, transformers_tokenizer
from bench.conversations import sources
from tests.assets import family_dir, trl_templates

MESSAGES = (2, 12, 40)
ROUNDS = 60
QUICK_ROUNDS = 8
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


def contenders(family: str) -> dict[str, tuple[Callable[..., Row], Callable[..., Row]]]:
    """For each peer: theirs and ours, on the same template."""
    found: dict[str, tuple[Callable[..., Row], Callable[..., Row]]] = {}
    hf = transformers_tokenizer(family)
    if family in TRL:
        source = trl_templates()[TRL[family]]

        def tagged(messages: list[dict[str, Any]]) -> Row:
            made = hf.apply_chat_template(
                messages, chat_template=source, return_dict=True, return_assistant_tokens_mask=True
            )
            return made["input_ids"], made["assistant_masks"]

        found["TRL"] = tagged, ours(tokentrace.create_renderer(str(family_dir(family)), chat_template=source))
    peer = peer_renderer(family, hf)
    if peer is not None:
        from renderers.base import build_training_sample

        def sample(messages: list[dict[str, Any]]) -> Row:
            made = build_training_sample(peer, messages)
            return made.token_ids, [int(one) for one in made.loss_mask]

        found["renderers"] = sample, ours(tokentrace.create_renderer(str(family_dir(family))))
    return found


def is_same(found: Row, expected: Row) -> bool:
    """Whether two rows are equal, but for a token after the stop token that TRL's tags of Qwen enclose as well.

    It is the newline between turns: the template writes it, and no model samples it.
    """
    ids, mask = np.asarray(found[0]), np.asarray(found[1], np.bool_)
    if not np.array_equal(ids, expected[0]):
        return False
    more = np.asarray(expected[1], np.bool_) != mask
    return bool((more[1:] <= (mask[:-1] & ~mask[1:])).all()) and not more[:1].any()


def measure(family: str, rounds: int, count: int, lines: Iterator[str]) -> list[dict[str, Any]]:
    """One row a peer: medians of CPU time over conversations that nobody has seen before."""
    rows = []
    for name, (theirs, mine) in contenders(family).items():
        times: dict[str, list[float]] = {"theirs": [], "ours": []}
        differ = tokens = 0
        for round_ in range(rounds + 1):
            messages = chat(count, lines)
            spent, expected = cpu_time(theirs, messages)
            own, found = cpu_time(mine, messages)
            differ += not is_same(found, expected)
            tokens = len(found[0])
            if round_:  # the first one compiles and warms
                times["theirs"].append(spent)
                times["ours"].append(own)
        medians = {which: statistics.median(values) for which, values in times.items()}
        rows.append({"family": family, "peer": name, "messages": count, "tokens": tokens, "differ": differ, **medians})
    return rows


def run(families: Sequence[str], rounds: int, counts: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """Measure, and print what came out."""
    lines = itertools.cycle(sources())
    rows = [row for family in families for count in counts for row in measure(family, rounds, count, lines)]
    table = Table(title="A training row: medians of CPU time, first-seen text, ids and masks equal (or no ratio)")
    for name in ("family", "messages", "tokens", "peer", "theirs", "tokentrace", "ratio"):
        table.add_column(name, justify="left" if name in ("family", "peer") else "right")
    for row in rows:
        ratio = f"{row['differ']} differ" if row["differ"] else f"{row['theirs'] / row['ours']:.1f}x"
        cells = [row["family"], row["messages"], f"{row['tokens']:,}", row["peer"]]
        table.add_row(*map(str, cells), f"{row['theirs'] * 1e3:.2f} ms", f"{row['ours'] * 1e3:.2f} ms", ratio)
    console.print(table)
    return rows
