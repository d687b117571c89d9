"""``make bench``: a full render beside `renderers` and transformers. Ids are asserted equal before a figure counts."""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import fastokens
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import PreTrainedTokenizerFast

import tokentrace
from bench.conversations import LINES_PER_RESULT, conversation, sources, tools
from tests.assets import family_dir

SIZES = (8_000, 32_000, 128_000)
PEERS = {"qwen3": "Qwen3", "qwen3.5": "Qwen35", "glm-4.5": "GLM45", "minimax-m2": "MiniMaxM2", "kimi-k2.5": "KimiK25"}
TARGETS = {8_000: 15, 32_000: 25, 128_000: 40}

Render = Callable[[list[dict[str, Any]]], Any]


def contenders(family: str, schemas: list[dict[str, Any]]) -> dict[str, Render]:
    """Who renders, each made ready beforehand. All but the limit return a list or an array of ids."""
    folder = str(family_dir(family))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hf = PreTrainedTokenizerFast.from_pretrained(folder)
    ours = tokentrace.create_renderer(folder)
    found: dict[str, Render] = {
        "tokentrace": lambda messages: ours.render(messages, tools=schemas).ids,
        "transformers": lambda messages: hf.apply_chat_template(messages, tools=schemas, return_dict=False),
    }
    if family in PEERS:
        import renderers

        config = getattr(renderers.configs, f"{PEERS[family]}RendererConfig")()
        peer = renderers.create_renderer(hf, config)
        found["renderers"] = lambda messages: peer.render(messages, tools=schemas).token_ids
    return found


def cpu_time(render: Render, messages: list[dict[str, Any]]) -> tuple[float, Any]:
    start = time.process_time()
    result = render(messages)
    return time.process_time() - start, result


def measure(family: str, repeats: int, sizes: Sequence[int], progress: Progress) -> list[dict[str, Any]]:
    """One row a size: medians over conversations that nobody has seen before."""
    schemas = tools()
    renders = contenders(family, schemas)
    limit = fastokens.Tokenizer.from_file(str(family_dir(family) / "tokenizer.json"))
    limit.encode_batch_flat(["warm"])
    lines = itertools.cycle(sources())
    for render in renders.values():  # compile templates, learn turns, warm caches
        render(conversation(2_000, lines))
    rows = []
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
            text = tokentrace.ChatTemplate((family_dir(family) / "chat_template.jinja").read_text())
            rendered = text.render(messages, tokentrace.template.wrap_tools(schemas)).text
            spent, _ = cpu_time(lambda _, rendered=rendered: limit.encode_batch_flat([rendered]), messages)
            times["limit"].append(spent)
            progress.advance(task)
        if "tokentrace" in wrong:
            raise SystemExit(f"{family}: tokentrace's ids differ from transformers'; no figure counts")
        medians = {name: statistics.median(values) for name, values in times.items() if name not in wrong}
        rows.append({"family": family, "size": size, "tokens": count, "messages": messages_in, **medians})
        for name in wrong:
            rows[-1][name] = None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("families", nargs="*", default=["qwen3"], help="families of the asset list (default: qwen3)")
    parser.add_argument("--repeats", type=int, default=7)
    default = ",".join(map(str, LINES_PER_RESULT))
    parser.add_argument("--lines", default=default, help=f"lines of each tool result, in turn (default: {default})")
    arguments = parser.parse_args()
    sizes = [int(count) for count in arguments.lines.split(",")]
    console = Console()
    with Progress(console=console, transient=True) as progress:
        rows = [row for family in arguments.families for row in measure(family, arguments.repeats, sizes, progress)]
    table = Table(title="A full render: medians of CPU time, first-seen text, ids equal (or no figure)")
    for name in ("family", "tokens", "messages", "transformers", "renderers", "tokentrace", "limit", "ratio", "wanted"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in rows:
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


if __name__ == "__main__":
    main()
