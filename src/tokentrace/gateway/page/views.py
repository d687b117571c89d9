"""Data for the page: the tokens of a branch, some at a time, and everything about one turn. Pure."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

import numpy as np

from ...show.document import token_columns
from ...store.store import Label
from ...tokens.ids import segments
from ...tokens.kinds import Kind
from ...tokens.tokenizer import Ids, Tokenizer
from ...tokens.visible import visible
from ..session import SessionRecord

TOKENS: Final = 4_000
"""The most tokens of one answer."""
_AROUND: Final = 4
"""How many tokens beyond either end are decoded: a character may need several tokens."""


def tokens_view(session: SessionRecord, tokenizer: Tokenizer, branch: int, start: int, stop: int) -> dict[str, Any]:
    """Tokens ``start`` to ``stop`` of a branch's stream: ids, texts and logprobs one by one, the rest in pieces.

    A piece is tokens of one kind, message and turn. Logprobs are there for sampled tokens, null for others.
    """
    trajectory = session.trajectory
    ids = trajectory.stream(branch)
    stop = min(stop, len(ids), start + TOKENS)
    start = min(start, stop)
    all_kinds = trajectory.kinds(branch)
    kinds = all_kinds[start:stop]
    messages = trajectory.message_indices(branch)[start:stop]
    turns = np.full(stop - start, -1, np.int64)
    numbers = {(turn.branch, turn.start): turn.number for turn in session.turns}
    for turn in trajectory.turns(branch):  # inherited ones included
        turns[max(0, turn.start - start) : max(0, turn.stop - start)] = numbers.get((turn.branch, turn.start), -1)
    logprobs = trajectory.logprobs(branch)[start:stop].tolist() if trajectory.has_logprobs else [None] * len(kinds)
    counts = np.bincount(all_kinds, minlength=len(Kind))
    return {
        "branch": branch,
        "start": start,
        "stop": stop,
        "total": len(ids),
        "own": trajectory.branches[branch].start,
        "counts": {kind.name.lower(): count for kind, count in zip(Kind, counts.tolist(), strict=True)},
        "ids": ids[start:stop].tolist(),
        "texts": token_texts(tokenizer, ids, start, stop),
        "control": np.flatnonzero(token_columns(tokenizer, ids[start:stop])["control"]).tolist(),
        "logprobs": [_number(value) for value in logprobs],
        "pieces": list(_pieces(kinds, messages, turns, start)),
        "roles": _roles(session, branch, messages),
    }


def token_texts(tokenizer: Tokenizer, ids: Ids, start: int, stop: int) -> list[str]:
    """The text to show for some tokens of a stream, the same wherever the cut is made."""
    first, last = max(0, start - _AROUND), min(len(ids), stop + _AROUND)
    texts = token_columns(tokenizer, ids[first:last])["texts"]
    return [visible(text) for text in texts[start - first : stop - first]]


def _pieces(kinds: Any, messages: Any, turns: Any, start: int) -> Iterator[dict[str, Any]]:
    for first, last in segments(kinds, messages, turns):
        message, turn = int(messages[first]), int(turns[first])
        yield {
            "start": start + first,
            "stop": start + last,
            "kind": Kind(int(kinds[first])).name.lower(),
            "message": None if message < 0 else message,
            "turn": None if turn < 0 else turn,
        }


def _roles(session: SessionRecord, branch: int, messages: Any) -> dict[str, str]:
    """The role of each message with one of these tokens, in the last turn of the branch."""
    last = next((turn for turn in reversed(session.turns) if turn.branch == branch), None)
    if last is None:
        return {}
    conversation = session.conversation(last.number)
    numbers = sorted({int(message) for message in np.unique(messages)} & set(range(len(conversation))))
    return {str(number): visible(str(conversation[number].get("role"))) for number in numbers}


def turn_view(session: SessionRecord, number: int, labels: Sequence[Label]) -> dict[str, Any]:
    """One turn: new messages, reply, cause of a branch, sampling, time."""
    recorded = session.turns[number]
    sampled = session.sampled_turn(recorded)
    logprobs = []
    if session.trajectory.has_logprobs:
        logprobs = session.trajectory.completion_logprobs(sampled).tolist()
    tools = session.roots[recorded.root][0]
    return {
        **recorded.summary(),
        "kept": recorded.shared,
        "messages": recorded.messages,
        "reply": recorded.reply,
        "prompt_tokens": recorded.start,
        "sampled_tokens": recorded.stop - recorded.start,
        "cached_tokens": sampled.cached_tokens,
        "versions": [list(span) for span in sampled.versions],
        "sampling": sampled.sampling,
        "logprobs_kind": str(sampled.logprobs_kind),
        "mean_logprob": _number(math.fsum(logprobs) / len(logprobs)) if logprobs else None,
        "tools": [str((tool.get("function") or tool).get("name", "?")) for tool in tools or ()],
        "continued_by": [turn.number for turn in session.turns if turn.base == number],
        "labels": [asdict(label) for label in labels if label.turn == number],
    }


def _number(value: float | None) -> float | None:
    """A number for JSON; None if it is not finite."""
    return None if value is None or not math.isfinite(value) else round(value, 4)


def brief_metadata(metadata: Mapping[str, Any], most: int = 160) -> str:
    """Metadata in a line: ``task: 12 · model: small``."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in metadata.items()}
    text = " · ".join(f"{name}: {value}" for name, value in itertools.islice(texts.items(), 12))
    return visible(text if len(text) <= most else text[: most - 1] + "…")
