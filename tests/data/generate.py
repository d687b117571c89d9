"""Generated conversations, deterministic per seed, and helpers for tests of tokenize jobs."""

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.pocket import POCKET

SETTINGS = TokenizeSettings(str(POCKET))
TEXT = (
    "the river keeps its own time and nobody asks why a bridge was built here where water is wide and cold in March "
    "call function returns value error seven blue Zürich naïve 東京 data 3.14 x=1; if not found: retry() {'a': 1}"
)


def conversations(count: int, seed: int = 0, *, fewest: int = 2, most: int = 40) -> Iterator[dict[str, Any]]:
    """Conversations of `fewest` to `most` messages with tools, reasoning and calls, ending with an answer."""
    for number in range(count):
        yield _conversation(random.Random(f"{seed}-{number}"), fewest, most)


def _conversation(rng: random.Random, fewest: int, most: int) -> dict[str, Any]:
    length = rng.randint(fewest, most)
    messages: list[dict[str, Any]] = []
    if length > 2 and rng.random() < 0.5:
        messages.append({"role": "system", "content": _text(rng, 12)})
    while len(messages) < length - 1:
        messages.append({"role": "user", "content": _text(rng, 30)})
        while len(messages) < length - 3 and rng.random() < 0.4:
            name = rng.choice(["look_up", "compute"])
            call = {"name": name, "arguments": {"query": _text(rng, 5), "n": rng.randint(0, 9)}}
            number = f"call{len(messages):05d}"
            calls = [{"id": number, "type": "function", "function": call}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "tool_call_id": number, "name": call["name"], "content": _text(rng, 20)})
        answer: dict[str, Any] = {"role": "assistant", "content": _text(rng, 40)}
        if rng.random() < 0.3:
            answer["reasoning_content"] = _text(rng, 30)
        messages.append(answer)
    return {"messages": messages}


def _text(rng: random.Random, longest: int) -> str:
    return " ".join(rng.choices(TEXT.split(), k=rng.randint(1, longest)))


def write_conversations(path: Path, count: int, seed: int = 0) -> Path:
    """Write a JSON Lines file of conversations."""
    return write_lines(path, conversations(count, seed))


def write_lines(path: Path, rows: Iterable[Any]) -> Path:
    """Write a JSON Lines file of rows, or of lines that are text."""
    with path.open("w", encoding="utf-8") as file:
        file.writelines((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    return path
