"""Parsing completions beside `renderers`, which decodes and searches the text; what both find is asserted equal."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

import tokentrace
from bench import cpu_time, peer_renderer, transformers_tokenizer
from bench.conversations import sources
from tests.assets import family_dir

LENGTHS = (500, 4_000, 32_000)
ROUNDS = 60
QUICK_ROUNDS = 8

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
    rendered = renderer.render([{"role": "user", "content": "Go."}, message], tools=[TOOL])
    turn = rendered.turns[-1]
    return rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]


def story(parsed: Any) -> tuple[Any, ...]:
    """What a parse found, in the same terms for both."""
    calls = [(call.name, call.arguments) for call in parsed.tool_calls]
    return (parsed.content or "").strip(), (parsed.reasoning_content or "").strip(), calls


def measure(family: str, rounds: int, length: int, lines: Sequence[str]) -> dict[str, Any]:
    """Medians of CPU time over completions that differ."""
    ours = tokentrace.create_renderer(str(family_dir(family)))
    peer = peer_renderer(family, transformers_tokenizer(family))
    times: dict[str, list[float]] = {"tokentrace": [], "streamed": [], "renderers": []}
    count = differ = 0
    for round_ in range(rounds + 1):
        prompt, ids = completion(ours, length, lines, round_)
        spent, parsed = cpu_time(lambda: ours.parse_response(ids, tools=[TOOL], prompt_ids=prompt))  # noqa: B023
        streamed, response = cpu_time(_stream, ours, ids, prompt)
        if response != parsed:
            raise SystemExit(f"{family}: the stream says something else than the whole; no figure counts")
        if peer is not None:
            theirs, found = cpu_time(lambda: peer.parse_response(ids, tools=[TOOL]))  # noqa: B023
            differ += story(found) != story(parsed)
            times["renderers"].append(theirs)
        if round_:  # the first one compiles and warms
            times["tokentrace"].append(spent)
            times["streamed"].append(streamed)
        count = len(ids)
    medians = {name: statistics.median(values) for name, values in times.items() if values}
    return {"family": family, "tokens": count, "differ": differ, **medians}


def _stream(renderer: Any, ids: list[int], prompt: list[int]) -> Any:
    parser = renderer.streaming_parser(tools=[TOOL], prompt_ids=prompt)
    for index in ids:
        parser.feed((index,))
    return parser.response


def run(families: Sequence[str], rounds: int, lengths: Sequence[int], console: Console) -> list[dict[str, Any]]:
    """Measure, and print what came out."""
    lines = sources()
    rows = [measure(family, rounds, length, lines) for family in families for length in lengths]
    table = Table(title="Parsing a completion: medians of CPU time (renderers has a figure where it finds the same)")
    for name in ("family", "tokens", "renderers", "tokentrace", "ratio", "token by token"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in rows:
        peer = row.get("renderers")
        told = "-" if peer is None else f"{row['differ']} differ" if row["differ"] else f"{peer * 1e3:.2f} ms"
        ratio = f"{peer / row['tokentrace']:.1f}x" if peer and not row["differ"] else "-"
        table.add_row(
            row["family"],
            f"{row['tokens']:,}",
            told,
            f"{row['tokentrace'] * 1e3:.2f} ms",
            ratio,
            f"{row['streamed'] * 1e3:.2f} ms",
        )
    console.print(table)
    return rows
