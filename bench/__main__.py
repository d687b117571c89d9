"""``make bench``: full renders, bridges after ever longer histories, parses, training rows; rollouts; the gateway.

Ids are asserted equal before a figure counts.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import fastokens
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import tokentrace
from bench import bridge, cpu_time, gateway, parse, peer_renderer, rollout, rows, transformers_tokenizer
from bench.conversations import LINES_PER_RESULT, conversation, sources, tools
from tests.assets import family_dir

SIZES = (8_000, 32_000, 128_000)
TARGETS = {8_000: 15, 32_000: 25, 128_000: 40}

Render = Callable[[list[dict[str, Any]]], Any]


def contenders(family: str, schemas: list[dict[str, Any]]) -> dict[str, Render]:
    """Who renders, each made ready beforehand. All but the limit return a list or an array of ids."""
    hf = transformers_tokenizer(family)
    ours = tokentrace.create_renderer(str(family_dir(family)))
    found: dict[str, Render] = {
        "tokentrace": lambda messages: ours.render(messages, tools=schemas).ids,
        "transformers": lambda messages: hf.apply_chat_template(messages, tools=schemas, return_dict=False),
    }
    peer = peer_renderer(family, hf)
    if peer is not None:
        found["renderers"] = lambda messages: peer.render(messages, tools=schemas).token_ids
    return found


def measure(family: str, repeats: int, sizes: Sequence[int], progress: Progress) -> list[dict[str, Any]]:
    """One row a size: medians over conversations that nobody has seen before."""
    schemas = tools()
    renders = contenders(family, schemas)
    limit = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
    limit.encode_batch_flat(["warm"])
    lines = itertools.cycle(sources())
    for render in renders.values():  # compile templates, learn turns, warm caches
        render(conversation(2_000, lines))
    found = []
    for size in SIZES:
        times: dict[str, list[float]] = {name: [] for name in (*renders, "limit")}
        wrong: set[str] = set()
        count = messages_in = 0
        task = progress.add_task(f"{family} at {size:,} tokens", total=repeats)
        for _ in range(repeats):
            messages = conversation(size, lines, sizes)
            results = {}
            for name, render in renders.items():
                spent, results[name] = cpu_time(render, messages)
                times[name].append(spent)
            expected = np.asarray(results["transformers"])
            wrong |= {name for name, ids in results.items() if not np.array_equal(np.asarray(ids), expected)}
            count, messages_in = len(expected), len(messages)
            text = tokentrace.template.ChatTemplate((family_dir(family) / "chat_template.jinja").read_text())
            rendered = text.render(messages, tokentrace.template.wrap_tools(schemas)).text
            spent, _ = cpu_time(lambda _, rendered=rendered: limit.encode_batch_flat([rendered]), messages)
            times["limit"].append(spent)
            progress.advance(task)
        if "tokentrace" in wrong:
            raise SystemExit(f"{family}: tokentrace's ids differ from transformers'; no figure counts")
        medians = {name: statistics.median(values) for name, values in times.items() if name not in wrong}
        found.append({"family": family, "size": size, "tokens": count, "messages": messages_in, **medians})
        for name in wrong:
            found[-1][name] = None
    return found


def render(families: Sequence[str], repeats: int, sizes: Sequence[int], console: Console) -> None:
    """Measure full renders, and print what came out."""
    with Progress(console=console, transient=True) as progress:
        measured = [row for family in families for row in measure(family, repeats, sizes, progress)]
    table = Table(title="A full render: medians of CPU time, first-seen text, ids equal (or no figure)")
    for name in ("family", "tokens", "messages", "transformers", "renderers", "tokentrace", "limit", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in measured:
        best = min(row[name] for name in ("transformers", "renderers") if row.get(name))
        table.add_row(
            row["family"],
            f"{row['tokens']:,}",
            str(row["messages"]),
            *(_milliseconds(row, name) for name in ("transformers", "renderers", "tokentrace", "limit")),
            f"{best / row['tokentrace']:.0f}x",
            f"{TARGETS[row['size']]}x",
        )
    console.print(table)
    console.print("limit: one fastokens call on the finished text. ratio: the better peer over tokentrace.")


def _milliseconds(row: dict[str, Any], name: str) -> str:
    if name not in row:
        return "-"
    return "ids differ" if row[name] is None else f"{row[name] * 1e3:.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "what",
        nargs="?",
        choices=("render", "bridge", "parse", "rows", "rollout", "gateway", "all"),
        default="all",
        help="default: all",
    )
    parser.add_argument("--family", nargs="+", default=["qwen3"], help="families of the asset list (default: qwen3)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats: an idea of it, not a measurement")
    parser.add_argument("--repeats", type=int, help="renders (default: 7) and bridges (default: 200) a length")
    default = ",".join(map(str, LINES_PER_RESULT))
    parser.add_argument("--lines", default=default, help=f"lines of a tool result to render, in turn ({default})")
    arguments = parser.parse_args()
    sizes = [int(count) for count in arguments.lines.split(",")]
    console = Console()
    if arguments.what in ("render", "all"):
        render(arguments.family, arguments.repeats or (2 if arguments.quick else 7), sizes, console)
    if arguments.what in ("bridge", "all"):
        rounds = arguments.repeats or (bridge.QUICK_ROUNDS if arguments.quick else bridge.ROUNDS)
        for family in arguments.family:
            bridge.run(family, rounds, bridge.LENGTHS, console)
    if arguments.what in ("parse", "all"):
        rounds = arguments.repeats or (parse.QUICK_ROUNDS if arguments.quick else parse.ROUNDS)
        parse.run(arguments.family, rounds, parse.LENGTHS, console)
    if arguments.what in ("rows", "all"):
        rounds = arguments.repeats or (rows.QUICK_ROUNDS if arguments.quick else rows.ROUNDS)
        rows.run(arguments.family, rounds, rows.MESSAGES, console)
    if arguments.what in ("rollout", "all"):
        count = arguments.repeats or (rollout.QUICK_ROLLOUTS if arguments.quick else rollout.ROLLOUTS)
        rollout.run(list(dict.fromkeys([*arguments.family, "pocket"])), count, console)
    if arguments.what in ("gateway", "all"):
        for family in arguments.family:
            gateway.run(family, arguments.quick, console)


if __name__ == "__main__":
    main()
