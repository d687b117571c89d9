"""Conversations of a coding agent that reads files, made of the standard library's sources."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 3.9
LINES_PER_RESULT = (60, 240, 120, 400)
"""Lines of a file that the agent reads at a time, in turn. `--lines` sets others."""


def tools() -> list[dict[str, Any]]:
    """Five tools of typical size."""
    descriptions = {
        "read_file": "Read lines of a file and return them with nothing added.",
        "search": "Search the repository for a regular expression and return the matching lines.",
        "edit_file": "Replace a range of lines in a file with new text.",
        "run_tests": "Run the tests below a folder and return the tail of their output.",
        "list_folder": "List the files and folders below a folder, one a line.",
    }
    fields = ("path", "pattern", "first_line", "last_line", "text")
    properties = {name: {"type": "string", "description": f"The {name.replace('_', ' ')} to use."} for name in fields}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return [
        {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}
        for name, description in descriptions.items()
    ]


def many_tools(count: int) -> list[dict[str, Any]]:
    """`count` different tools."""
    parameters = {
        "type": "object",
        "properties": {
            "path": {"type": "string", "description": "Where to look."},
            "limit": {"type": "integer", "description": "How many to return at most."},
            "mode": {"type": "string", "enum": ["fast", "thorough"]},
        },
        "required": ["path"],
    }
    return [
        {
            "type": "function",
            "function": {"name": f"look_up_{at}", "description": f"Look up part {at}.", "parameters": parameters},
        }
        for at in range(count)
    ]


def sources() -> list[str]:
    """The lines of the standard library, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    return [
        line
        for path in sorted(folder.glob("*.py"))
        for line in path.read_text(encoding="utf-8", errors="ignore").splitlines(keepends=True)
    ]


def conversation(tokens: int, lines: Iterator[str], sizes: Sequence[int] = LINES_PER_RESULT) -> list[dict[str, Any]]:
    """A conversation of about `tokens` tokens. It consumes `lines`, so no two conversations share text."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful coding agent. Read before you write. " * 12},
        {"role": "user", "content": "One of these modules leaks a file handle. Find it and mend it."},
    ]
    remaining = tokens * CHARACTERS_PER_TOKEN
    turn = 0
    while remaining > 0:
        count = sizes[turn % len(sizes)]
        result = "".join(next(lines) for _ in range(count))[: max(400, int(remaining))]
        arguments = {"path": f"lib/module_{turn}.py", "first_line": str(turn * 80), "last_line": str(turn * 80 + count)}
        call = {"id": f"call{turn:05d}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        thought = f"Nothing leaks so far. Module {turn} opens files too, so its cleanup is worth a look. " * 3
        messages.append({"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "read_file", "content": result})
        remaining -= len(result) + len(thought) + 200
        turn += 1
    messages.append({"role": "assistant", "reasoning_content": "That is the one.", "content": "Mended: use with."})
    return messages


def prompt(tokens: int, lines: Iterator[str], sizes: Sequence[int] = LINES_PER_RESULT) -> list[dict[str, Any]]:
    """A conversation up to the last tool result: the prompt of the agent's next turn."""
    return conversation(tokens, lines, sizes)[:-1]


def varied(tokens: int, lines: Iterator[str], shapes: random.Random) -> list[dict[str, Any]]:
    """A prompt whose turns have random shapes, drawn anew for every conversation, so that caches rarely help."""
    messages = conversation(tokens, lines)[:-1]
    chat: list[dict[str, Any]] = messages[:2]
    for at in range(2, len(messages), 2):
        turn, result = messages[at], messages[at + 1]
        call = turn["tool_calls"][0]
        arguments: dict[str, Any] = {
            name: shapes.choice(["src", 7, 2.5, True, ["a", 1], {"deep": {"er": [1, 2]}}])
            for name in shapes.sample(["path", "pattern", "first_line", "last_line", "text"], shapes.randint(1, 5))
        }
        call["function"]["arguments"] = arguments
        if shapes.random() < 0.5:  # not both: gpt-oss writes no content beside reasoning and a call
            turn["content"] = f"Step {at}: {next(lines).strip() or 'go on'}"
            del turn["reasoning_content"]
        chat += [turn, result]
        if shapes.random() < 0.3:
            more = {
                "id": f"more{at:05d}",
                "type": "function",
                "function": {"name": "search", "arguments": {"text": "x"}},
            }
            turn["tool_calls"].append(more)
            chat.append({"role": "tool", "tool_call_id": more["id"], "name": "search", "content": next(lines).strip()})
    return chat
