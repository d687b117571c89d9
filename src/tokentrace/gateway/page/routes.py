"""The page's routes, for administrators. A browser may run only the page's own files."""

import asyncio
import functools
import itertools
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from typing import Any

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
from ..admin import Query, Routes, find_sessions, named_session, read_query
from ..gateway import Gateway
from ..requests import RequestError
from ..session import SessionRecord

TOKENS = 4_000
_AROUND = 4
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


def tokens_view(session: SessionRecord, tokenizer: Tokenizer, query: Query) -> dict[str, Any]:
    trajectory, branch = session.trajectory, query.branch
    ids, table = trajectory.stream(branch), trajectory.table(branch)
    limit = min(len(ids), query.start + TOKENS)
    stop = limit if query.stop is None else min(limit, query.stop)
    start = min(query.start, stop)
    messages = table.messages[start:stop]
    turns = np.full(stop - start, -1, np.int64)
    numbers = {(turn.branch, turn.start, turn.stop): turn.number for turn in session.turns}
    for turn in trajectory.turns(branch):  # inherited ones included
        begin, end = max(0, turn.start - start), max(0, turn.stop - start)
        turns[begin:end] = numbers.get((turn.branch, turn.start, turn.stop), -1)
    logprobs = [None] * len(turns)
    if trajectory.has_logprobs:
        logprobs = trajectory.logprobs(branch)[start:stop].tolist()
    counts = np.bincount(table.kinds, minlength=len(Kind)).tolist()
    first = max(0, start - _AROUND)  # texts must not depend on the cut
    columns = token_columns(tokenizer, ids[first : stop + _AROUND])
    inside = slice(start - first, stop - first)
    kinds = table.kinds[start:stop]
    pieces = [
        {
            "start": start + begin,
            "stop": start + end,
            "kind": Kind(int(kinds[begin])).name.lower(),
            "message": None if messages[begin] < 0 else int(messages[begin]),
            "turn": None if turns[begin] < 0 else int(turns[begin]),
        }
        for begin, end in segments(kinds, messages, turns)
    ]
    newest = next((turn for turn in reversed(session.turns) if turn.branch == branch), None)
    conversation = [] if newest is None else session.conversation(newest.number)
    present = sorted({int(message) for message in np.unique(messages)} & set(range(len(conversation))))
    return {
        "branch": branch,
        "start": start,
        "stop": stop,
        "total": len(ids),
        "own": trajectory.branches[branch].start,
        "counts": {kind.name.lower(): count for kind, count in zip(Kind, counts, strict=True)},
        "ids": ids[start:stop].tolist(),
        "texts": [visible(text) for text in columns["texts"][inside]],
        "control": np.flatnonzero(columns["control"][inside]).tolist(),
        "logprobs": [_number(value) for value in logprobs],
        "pieces": pieces,
        "roles": {str(number): visible(str(conversation[number].get("role"))) for number in present},
    }


def turn_view(session: SessionRecord, number: int, labels: Sequence[Label]) -> dict[str, Any]:
    recorded = session.turns[number]
    sampled = session.sampled_turn(recorded)
    logprobs = [] if sampled.tokens.logprobs is None else sampled.tokens.logprobs.tolist()
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
    return None if value is None or not math.isfinite(value) else round(value, 4)


async def _file(gateway: Gateway, http: HTTPRequest) -> Response:
    name = http.path_params.get("file", "index.html")
    if name not in page_files():
        raise RequestError(f"the page has no file {brief(name)}", status=404, code="not_found")
    return Response(page_files()[name], 200, HEADERS, f"{_TYPES[name.rpartition('.')[2]]}; charset=utf-8")


@functools.cache
def page_files() -> dict[str, bytes]:
    folder = resources.files(__package__).iterdir()
    files = {file.name: file.read_bytes() for file in folder if file.name.rpartition(".")[2] in _TYPES}
    return files | {name: asset(name).encode() for name in SHARED}


async def _sessions(gateway: Gateway, http: HTTPRequest) -> Any:
    query, store = read_query(http), gateway.store
    infos = await find_sessions(gateway, query)
    chosen = await gateway.sessions.find(query.session)
    listed = [*infos[: query.limit], *([] if chosen is None else [chosen])]
    rewards = await store.values("reward", [info.id for info in listed])
    under_way = Counter(claim.session_id for claim in gateway.admission.claims)
    glances = [_glance(gateway, info, rewards.get(info.id), under_way[info.id]) for info in listed]
    if chosen is not None:  # when these counts change, the page reads the session again
        id = chosen.id
        counts = {"labels": len(await store.labels(id)), "incomplete": len(await store.incomplete(id))}
    about = {"model": gateway.model, "engine": gateway.engine.capabilities.engine}
    return {
        "sessions": glances[: len(infos[: query.limit])],
        "more": len(infos) > query.limit,
        "chosen": None if chosen is None else {**glances[-1], **counts},
        "counts": {str(each): await store.count(each) for each in State},
        "gateway": {**gateway.state(), **about, "store": store.where, "temporary": store.temporary},
    }


def _glance(gateway: Gateway, info: SessionInfo, reward: Any, under_way: int) -> dict[str, Any]:
    texts = {name: one if isinstance(one, str) else json.dumps(one) for name, one in info.metadata.items()}
    metadata = " · ".join(f"{name}: {value}" for name, value in itertools.islice(texts.items(), 12))
    glance = {
        **{name: getattr(info, name) for name in ("id", "state", "created", "turns", "sampled")},
        "metadata": visible(metadata if len(metadata) <= 160 else metadata[:159] + "…"),
        "reward": reward,
        "under_way": under_way,
    }
    live = gateway.sessions.live.get(info.id)
    if live is None or not live.session.turns:
        return glance
    trajectory = live.session.trajectory
    tree = {"tokens": trajectory.num_tokens, "rows": trajectory.num_samples}
    last = live.session.turns[-1].time
    return {**glance, **tree, "branches": trajectory.num_branches, "last": last}


async def _tokens(gateway: Gateway, http: HTTPRequest) -> Any:
    id, query = (await named_session(gateway, http)).id, read_query(http)
    async with gateway.sessions.locked(id) as live:
        branches = live.session.trajectory.num_branches
        if query.branch >= branches:
            problem = f"there is no branch {query.branch}; the session has {branches}"
            raise RequestError(problem, field="branch")
        return await asyncio.to_thread(tokens_view, live.session, gateway.renderer.tokenizer, query)


async def _turn(gateway: Gateway, http: HTTPRequest) -> Any:
    id = (await named_session(gateway, http)).id
    turn = http.path_params["turn"]
    labels = await gateway.store.labels(id)
    async with gateway.sessions.locked(id) as live:
        turns = len(live.session.turns)
        if not (turn.isascii() and turn.isdigit() and len(turn) < 20 and int(turn) < turns):
            problem = f"there is no turn {brief(turn)}; the session has {turns}"
            raise RequestError(problem, status=404, code="no_turn")
        return await asyncio.to_thread(turn_view, live.session, int(turn), labels)


PAGE_ROUTES: Routes = {
    "GET /": _file,
    "GET /page/sessions": _sessions,
    "GET /page/{file}": _file,
    "GET /sessions/{session}/tokens": _tokens,
    "GET /sessions/{session}/turns/{turn}": _turn,
}
