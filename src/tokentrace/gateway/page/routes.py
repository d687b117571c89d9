"""The routes of the page: its files, the list of sessions, tokens and turns. All of them are for administrators.

The page loads nothing from elsewhere, and its policy lets a browser run nothing but its own files. Whatever comes from
agents gets there as JSON and is put into the page as text.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any, Final

import numpy as np
from starlette.requests import Request as HTTPRequest
from starlette.responses import Response

from ...errors import brief
from ...show.document import token_columns
from ...show.page import SHARED, asset
from ...show.visible import visible
from ...store.store import Label, SessionInfo, State
from ...tokens.ids import segments
from ...tokens.kinds import Kind
from ...tokens.tokenizer import Tokenizer
from ..admin import Routes, find_sessions
from ..gateway import Gateway
from ..http import json_response
from ..requests import RequestError
from ..session import SessionRecord

TOKENS: Final = 4_000
"""The most tokens of one answer."""
_AROUND: Final = 4
"""How many tokens beyond either end are decoded: a character may need several tokens."""
HEADERS: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_NOSNIFF: Final = {"x-content-type-options": "nosniff"}
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_LISTED, _MOST, _LARGEST = 200, 5_000, 2**53


# -- views


def tokens_view(session: SessionRecord, tokenizer: Tokenizer, branch: int, start: int, stop: int) -> dict[str, Any]:
    """Tokens of a branch's stream one by one, and pieces of one kind, message and turn."""
    trajectory = session.trajectory
    ids, table = trajectory.stream(branch), trajectory.table(branch)
    stop = min(stop, len(ids), start + TOKENS)
    start = min(start, stop)
    kinds, messages = table.kinds[start:stop], table.messages[start:stop]
    turns = np.full(stop - start, -1, np.int64)
    numbers = {(turn.branch, turn.start): turn.number for turn in session.turns}
    for turn in trajectory.turns(branch):  # inherited ones included
        turns[max(0, turn.start - start) : max(0, turn.stop - start)] = numbers.get((turn.branch, turn.start), -1)
    logprobs = trajectory.logprobs(branch)[start:stop].tolist() if trajectory.has_logprobs else [None] * len(kinds)
    counts = np.bincount(table.kinds, minlength=len(Kind))
    first, last = max(0, start - _AROUND), min(len(ids), stop + _AROUND)  # texts are the same wherever the cut is
    columns = token_columns(tokenizer, ids[first:last])
    inside = slice(start - first, stop - first)
    return {
        "branch": branch,
        "start": start,
        "stop": stop,
        "total": len(ids),
        "own": trajectory.branches[branch].start,
        "counts": {kind.name.lower(): count for kind, count in zip(Kind, counts.tolist(), strict=True)},
        "ids": ids[start:stop].tolist(),
        "texts": [visible(text) for text in columns["texts"][inside]],
        "control": np.flatnonzero(columns["control"][inside]).tolist(),
        "logprobs": [_number(value) for value in logprobs],
        "pieces": list(_pieces(kinds, messages, turns, start)),
        "roles": _roles(session, branch, messages),
    }


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
    conversation = [] if last is None else session.conversation(last.number)
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


# -- routes


async def _file(gateway: Gateway, http: HTTPRequest) -> Response:
    name = http.path_params.get("file", "index.html")
    if name not in page_files():
        raise RequestError(f"the page has no file {brief(name)}", status=404, code="not_found")
    return Response(page_files()[name], 200, HEADERS, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")


@functools.cache
def page_files() -> dict[str, bytes]:
    """The files of the page by name: its own, and those of the viewer that shows its tokens."""
    folder = resources.files(__package__).iterdir()
    files = {file.name: file.read_bytes() for file in folder if file.name.rpartition(".")[2] in _TYPES}
    return files | {name: asset(name).encode() for name in SHARED}


async def _sessions(gateway: Gateway, http: HTTPRequest) -> Response:
    """The newest sessions, and how the gateway is. ``session`` names one that is always included."""
    query, store = http.query_params, gateway.store
    limit = _whole(query.get("limit", str(_LISTED)), "limit", _MOST)
    infos = await find_sessions(gateway, http, limit)
    chosen = await gateway.sessions.find(query.get("session", ""))
    listed = [*infos[:limit], *([] if chosen is None else [chosen])]
    rewards = await store.values("reward", [info.id for info in listed])
    under_way = Counter(claim.session for claim in gateway.admission.claims)
    glances = [_glance(gateway, info, rewards.get(info.id), under_way[info.id]) for info in listed]
    if chosen is not None:  # numbers that change when there is something new to show of it
        counts = {"labels": len(await store.labels(chosen.id)), "incomplete": len(await store.incomplete(chosen.id))}
    about = {"model": gateway.model, "engine": gateway.engine.capabilities.engine}
    value = {
        "sessions": glances[:limit] if chosen is None else glances[:-1],
        "more": len(infos) > limit,
        "chosen": None if chosen is None else {**glances[-1], **counts},
        "counts": {str(each): await store.count(each) for each in State},
        "gateway": {**gateway.state(), **about, "store": store.where, "temporary": store.temporary},
    }
    return json_response(value, headers=_NOSNIFF)


def _glance(gateway: Gateway, info: SessionInfo, reward: Any, under_way: int) -> dict[str, Any]:
    glance = {
        "id": info.id,
        "state": str(info.state),
        "created": info.created,
        "metadata": brief_metadata(info.metadata),
        "turns": info.turns,
        "sampled": info.sampled,
        "reward": reward,
        "under_way": under_way,
    }
    live = gateway.sessions.peek(info.id)
    if live is None or not live.session.turns:
        return glance
    trajectory = live.session.trajectory
    tree = {"tokens": trajectory.num_tokens, "rows": trajectory.num_samples, "branches": trajectory.num_branches}
    return {**glance, **tree, "last": live.session.turns[-1].time}


async def _tokens(gateway: Gateway, http: HTTPRequest) -> Response:
    id, query = (await gateway.sessions.info(http.path_params["session"])).id, http.query_params
    async with gateway.sessions.locked(id) as live:
        branches = live.session.trajectory.num_branches
        branch = _whole(query.get("branch", "0"), "branch", _LARGEST)
        if branch >= branches:
            raise RequestError(f"the session has {branches} branches, and none is {branch}", field="branch")
        start = _whole(query.get("start", "0"), "start", _LARGEST)
        stop = _whole(query.get("stop", str(start + TOKENS)), "stop", _LARGEST)
        tokenizer = gateway.renderer.tokenizer
        view = await asyncio.to_thread(tokens_view, live.session, tokenizer, branch, start, stop)
    return json_response(view, headers=_NOSNIFF)


async def _turn(gateway: Gateway, http: HTTPRequest) -> Response:
    id = (await gateway.sessions.info(http.path_params["session"])).id
    labels = await gateway.store.labels(id)
    async with gateway.sessions.locked(id) as live:
        turns, number = len(live.session.turns), _whole(http.path_params["turn"], "turn", _LARGEST)
        if number >= turns:
            raise RequestError(f"the session has {turns} turns, and none is {number}", status=404, code="no_turn")
        view = await asyncio.to_thread(turn_view, live.session, number, labels)
    return json_response(view, headers=_NOSNIFF)


def _whole(value: str, field: str, most: int) -> int:
    number = int(value) if value.isascii() and value.isdigit() and len(value) < 20 else -1
    if not 0 <= number <= most:
        raise RequestError(f"must be a whole number from 0 to {most}, not {brief(value)}", field=field)
    return number


PAGE_ROUTES: Final[Routes] = {
    "GET /": _file,
    "GET /page/sessions": _sessions,
    "GET /page/{file}": _file,
    "GET /sessions/{session}/tokens": _tokens,
    "GET /sessions/{session}/turns/{turn}": _turn,
}
