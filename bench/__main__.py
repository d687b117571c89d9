"""``make bench``: full renders, bridges after ever longer histories, parses, training rows, loading, the gateway.

Ids are asserted equal before a figure counts.
"""

from __future__ import annotations

import argparse
import warnings

from rich.console import Console
from rich.progress import Progress

from bench import bridge, gateway, load, parse, render, rows
from bench.conversations import LINES_PER_RESULT
from bench.report import Block, write
from tokentrace.errors import LostTextWarning

PARTS = ("render", "bridge", "parse", "rows", "load", "gateway")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("what", nargs="*", choices=[*PARTS, []], help=f"some of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--family", nargs="+", default=["qwen3"], help="families of the asset list (default: qwen3)")
    parser.add_argument("--quick", action="store_true", help="fewer repeats, for a rough idea only")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/benchmarks.md and README.md")
    parser.add_argument("--repeats", type=int, help="instead of each part's own number of repeats")
    default = ",".join(map(str, LINES_PER_RESULT))
    parser.add_argument("--lines", default=default, help=f"lines of a tool result to render, in turn ({default})")
    arguments = parser.parse_args()
    if arguments.write and arguments.quick:
        parser.error("--write with --quick: the docs are for measurements; leave one out")
    warnings.simplefilter("ignore", LostTextWarning)  # gpt-oss writes only one call per turn
    console = Console()
    for part in arguments.what or PARTS:
        with Progress(console=console, transient=True) as progress:
            blocks = run_part(part, arguments, progress)
        for block in blocks:
            console.print(block.text, markup=False, highlight=False, soft_wrap=True)
            console.print()
        if arguments.write:
            write(blocks)


def run_part(part: str, arguments: argparse.Namespace, progress: Progress) -> list[Block]:
    """Run one part of the benchmarks."""
    families, is_quick = arguments.family, arguments.quick

    def repeats(usual: int, quick: int) -> int:
        return arguments.repeats or (quick if is_quick else usual)

    match part:
        case "render":
            lines = [int(count) for count in arguments.lines.split(",")]
            return render.run(
                families, arguments.repeats or (render.QUICK_ROUNDS if is_quick else None), lines, progress
            )
        case "bridge":
            return bridge.run(families, repeats(bridge.ROUNDS, bridge.QUICK_ROUNDS), bridge.LENGTHS, progress)
        case "parse":
            return parse.run(families, repeats(parse.ROUNDS, parse.QUICK_ROUNDS), parse.LENGTHS, progress)
        case "rows":
            return rows.run(families, repeats(rows.ROUNDS, rows.QUICK_ROUNDS), rows.MESSAGES, progress)
        case "load":
            return load.run(families, repeats(load.ROUNDS, load.QUICK_ROUNDS), progress)
        case _:
            return gateway.run(families, is_quick, progress)


if __name__ == "__main__":
    main()
