"""Agentic conversations out of the standard library's own sources: a coding agent that reads files."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

CHARACTERS_PER_TOKEN = 3.9
LINES_PER_RESULT = (60, 240, 120, 400)
"""How much of a file the agent reads at a time, in turn. `--lines` of the bench takes another mixture."""


def tools() -> list[dict[str, Any]]:
    """Five tools of the usual size."""
    names = {
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
        {"type": "function", "function": {"name": name, "description": said, "parameters": parameters}}
        for name, said in names.items()
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
    """About `tokens` tokens of an agent at work. `lines` is used up, so no two conversations share text."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You are a careful coding agent. Read before you write. " * 12},
        {"role": "user", "content": "One of these modules leaks a file handle. Find it and mend it."},
    ]
    left = tokens * CHARACTERS_PER_TOKEN
    turn = 0
    while left > 0:
        count = sizes[turn % len(sizes)]
        result = "".join(next(lines) for _ in range(count))[: max(400, int(left))]
        arguments = {"path": f"lib/module_{turn}.py", "first_line": str(turn * 80), "last_line": str(turn * 80 + count)}
        call = {"id": f"call{turn:05d}", "type": "function", "function": {"name": "read_file", "arguments": arguments}}
        thought = f"Nothing leaks so far. Module {turn} opens files too, so its cleanup is worth a look. " * 3
        messages.append({"role": "assistant", "reasoning_content": thought, "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": call["id"], "name": "read_file", "content": result})
        left -= len(result) + len(thought) + 200
        turn += 1
    messages.append({"role": "assistant", "reasoning_content": "That is the one.", "content": "Mended: use with."})
    return messages
