"""Calls and rows in the lines of a dump, whoever wrote it.

An object with a prompt and a completion is a call, one with ids and a mask, labels or logprobs
is a row, wherever in a line they are. Four frameworks need more: verifiers stores trees of
messages, NeMo Gym prompts as deltas, OpenEnv requests beside rows, TRL batches of lists.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..errors import InputError, brief
from ..tokens.ids import check_ids
from .records import (
    COMPLETIONS,
    IDS,
    LOGPROBS,
    MASKS,
    PROMPTS,
    Call,
    Fields,
    Line,
    Request,
    Rollout,
    Row,
    Unreadable,
    first_of,
)

_NAMES: Final = (
    *("rollout_id", "session_id", "trajectory_id", "conversation_id", "episode_id"),
    *("request_id", "rollout", "session", "uid", "name"),
)
"""Fields that name the rollout of a line."""
_LISTS: Final = ("calls", "turns", "steps", "entries", "trace", "trajectory")
"""Lists of calls, which count before tokens beside them."""
_IGNORED: Final = frozenset(
    {"message", "messages", "prompt", "completion", "input", "request", "responses_create_params", "tools", "metadata"}
)
"""Fields of messages and settings, whose tokens are not those of a call."""


class UnknownShapeError(InputError):
    """A line with neither calls nor rows."""


def read_line(line: Any, where: str) -> Iterator[Rollout]:
    """The rollouts of a line: an episode of traces (prime-rl), a batch (TRL), or one.

    Raises UnknownShapeError if it has neither calls nor rows, InputError if they are malformed.
    """
    columns = line if isinstance(line, Mapping) else {}
    traces, prompts = columns.get("traces"), columns.get("prompt_ids")
    if isinstance(traces, list):
        for at, trace in enumerate(traces):
            yield _rollout(trace, f"{where}, traces[{at}]")
    elif isinstance(prompts, list) and prompts and isinstance(prompts[0], list):
        columns = {name: values for name, values in columns.items() if isinstance(values, list)}
        columns["response_ids"] = columns.pop("completion_ids", [])
        if len({len(values) for values in columns.values()}) > 1:
            raise InputError("the lists have entries for different numbers of rollouts", field="prompt_ids")
        for at in range(len(prompts)):
            yield _rollout({name: values[at] for name, values in columns.items()}, f"{where}, [{at}]")
    else:
        yield _rollout(line, where)


def _rollout(line: Any, where: str) -> Rollout:
    if not isinstance(line, Mapping):
        raise UnknownShapeError(f"a line of a record must be an object, not {brief(line)}")
    calls: list[Call] = []
    rows: list[tuple[Row, list[Call]]] = []
    for part in _parts(Fields(line, where), line.get("tools")):
        if isinstance(part, Call):
            calls.append(part)
        else:
            rows.append(part)
    if not calls and not rows and "nodes" not in line:
        needs = "a call needs prompt_ids and completion_ids, a row input_ids and loss_mask"
        raise UnknownShapeError(f"this is {brief(line)}, which has no known shape: {needs}")
    derived = bool(rows) and not calls
    name = rollout_name(line) or first_of(line, ("id", "example_id"))
    name = str(line.get(name, name)) if name else where.rpartition(", ")[2]
    tokenizer = line.get("tokenizer")
    tokenizer = tokenizer if isinstance(tokenizer, str) else None
    calls = [call for _, some in rows for call in some] if derived else calls
    return Rollout(name, where, calls, [row for row, _ in rows], derived, tokenizer)


def shape_name(line: Line) -> str:
    """What a line holds, for people."""
    if is_row(line):
        return "rows of ids"
    return "calls, one a line" if _is_call(line) else "rollouts, one a line"


def line_key(line: Any) -> str | None:
    """The rollout that a line is a part of; None if it is a rollout by itself."""
    alone = not isinstance(line, Mapping) or any(_lists_calls(line, name) for name in _LISTS)
    return rollout_name(line) if not alone and (_is_call(line) or is_row(line)) else None


def rollout_name(line: Line) -> str | None:
    """The rollout that a line names, in its own fields or its metadata."""
    for part in (line, line.get("metadata")):
        if isinstance(part, Mapping) and (name := first_of(part, _NAMES)):
            return str(part[name])
    if line.get("source") is not None:
        alone = line.get("branch") is None and line.get("row") is not None
        return f"{line['source']}, row {line['row']}" if alone else str(line["source"])
    return "" if "per_token_logps" in line else None  # a file of OpenEnv's trace entries is one rollout


def _is_call(line: Line, inner: bool = False) -> bool:
    """True if an object has a prompt and a completion; one of them is enough `inner` a rollout."""
    parts = [any(name in line for name in names) for names in (PROMPTS, ("response_ids", *COMPLETIONS))]
    return all(parts) or (inner and any(parts) and first_of(line, IDS) is None)


def _lists_calls(line: Line, name: str) -> bool:
    items = line.get(name)
    return isinstance(items, list) and any(isinstance(item, Mapping) and _is_call(item) for item in items[:1])


def is_row(line: Line) -> bool:
    """True if an object has ids, and something that tells which of them are trained."""
    marks = (*MASKS, *LOGPROBS, "labels")
    return not _is_call(line) and first_of(line, IDS) is not None and first_of(line, marks) is not None


def _parts(line: Fields, tools: Any) -> Iterator[Call | tuple[Row, list[Call]]]:
    """All calls and rows in an object."""
    value = line.value
    nodes, tokens = value.get("nodes"), value.get("tokens")
    if isinstance(nodes, list) and nodes and isinstance(nodes[0], Mapping) and "message" in nodes[0]:
        yield from _trace(line)
    elif {"prompt_ids", "response_ids"} <= value.keys():  # verl, or one of TRL's batch
        prompt = line.ids(("prompt_ids",))
        yield line.row(np.concatenate([prompt, line.ids(("response_ids",))]), len(prompt))
    elif isinstance(value.get("sequences"), list):
        yield from _session(line)
    elif _is_call(value, inner=bool(line.path)) and not any(_lists_calls(value, name) for name in _LISTS):
        yield _call(line, line, tools)
    elif isinstance(tokens, Mapping) and _is_call(tokens):
        yield _call(line, line.inner("tokens", tokens), tools)
    elif is_row(value):
        yield line.row()
    else:
        for name, inner in value.items():
            items = enumerate(inner) if isinstance(inner, list) else [(-1, inner)]
            for at, item in items if name not in _IGNORED else ():
                if isinstance(item, Mapping):
                    yield from _parts(line.inner(name if at < 0 else f"{name}[{at}]", item), tools)


def _call(line: Fields, tokens: Fields, tools: Any) -> Call:
    """A call with its conversation, reply and temperature beside it."""
    value = line.value
    choices = (value.get("response") or {}).get("choices") or [{}]
    replies = (value.get("reply"), value.get("completion"), choices[0].get("message"))
    reply = next((one for one in replies if one), None)
    request = value.get("request") or value
    if "messages" not in request and isinstance(request.get("prompt"), list):
        request = {"messages": request["prompt"], "tools": tools}
    settings = (value.get("metadata") or {}).get("sampling_params") or value
    reply = reply[-1] if isinstance(reply, list) else reply
    return tokens.call(line.inner("", request).request(reply), settings.get("temperature"))


def _session(line: Fields) -> Iterator[tuple[Row, list[Call]]]:
    """OpenEnv: a captured session, rows with the turns that they were built from."""
    turns = {str(turn.get("node_id")): turn for turn in line.value.get("turns") or ()}
    for at, sequence in enumerate(line.value["sequences"]):
        row, calls = line.inner(f"sequences[{at}]", sequence).row()
        nodes = [turns.get(str(node)) for node in sequence.get("node_ids") or ()]
        for index, turn in enumerate(nodes if len(nodes) == len(calls) else ()):
            request = {name: (turn or {}).get(f"request_{name}") for name in ("messages", "tools")}
            reply = (turn or {}).get("response_message")
            calls[index] = replace(calls[index], request=line.inner("", request).request(reply))
        yield row, calls


def _trace(line: Fields) -> Iterator[Call]:
    """verifiers: a node has the tokens of its message; its path is prompt and completion."""
    nodes = [line.inner(f"nodes[{at}]", node) for at, node in enumerate(line.value["nodes"])]
    ids = [check_ids(node.value.get("token_ids") or [], node.field("token_ids")) for node in nodes]
    masks = [node.mask(len(tokens)) for node, tokens in zip(nodes, ids, strict=True)]
    for at, node in enumerate(nodes):
        if not node.value.get("sampled") or not len(ids[at]):
            continue
        path, mask = _path(nodes, at), masks[at]
        count = scored = len(node.value.get("logprobs") or ids[at])
        if mask is not None and mask.any():  # what comes before the first sampled token belongs to the prompt
            count, scored = len(mask) - int(mask.argmax()), int(mask.sum())
        logprobs = node.logprobs(min(scored, len(ids[at])))
        node.check_logprobs(logprobs)
        stream = np.concatenate([ids[one] for one in path])
        path_masks = [masks[one] for one in path if len(ids[one])]
        complete = [one for one in path_masks if one is not None]
        messages: list[Any] = [nodes[one].value.get("message") for one in path]
        request = None
        if all(isinstance(message, Mapping) for message in messages):
            request = Request(messages[:-1], nodes[path[0]].value.get("tools"), messages[-1])
        yield Call(
            stream,
            len(stream) - min(count, len(ids[at])),
            node.where(),
            logprobs if logprobs is not None and len(logprobs) == count else None,
            np.concatenate(complete) if len(complete) == len(path_masks) else None,
            request,
            findings=node.findings,
        )


def _path(nodes: Sequence[Fields], at: int) -> list[int]:
    """The nodes from the root to one of them."""
    path = [at]
    while (parent := nodes[path[-1]].value.get("parent")) is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or parent in path:
            raise InputError(f"is {parent!r}: there is no such node before it", field=nodes[at].field("parent"))
        path.append(parent)
    return path[::-1]


def complete_prompts(lines: Sequence[tuple[Line, str]]) -> Iterator[tuple[Line, str] | Unreadable]:
    """NeMo Gym's captured calls, whose prompts may be stored as what they add to a parent."""
    calls: dict[Any, list[Line]] = {}
    for line, _ in lines:
        calls.setdefault(line.get("model_call_id"), []).append(line)

    def prompt(line: Line, children: int = 0) -> list[int]:
        ids = check_ids(line.get("prompt_token_ids"), "prompt_token_ids").tolist()
        if not line.get("prompt_is_delta"):
            return ids  # type: ignore[no-any-return]
        name, parent = line.get("model_call_id"), line.get("parent_call_id")
        parents = calls.get(parent, [])
        if len(parents) != 1 or children > len(lines):
            reason = f"of which there are {len(parents)}" if len(parents) > 1 else "which is not there"
            words = f"call {name!r} is stored as what it adds to call {parent!r}, {reason}"
            raise InputError(words, field="parent_call_id")
        completion = check_ids(parents[0].get("generation_token_ids"), "generation_token_ids")
        return [*prompt(parents[0], children + 1), *completion.tolist(), *ids]

    whole: list[tuple[float, Line, str]] = []
    for line, where in lines:
        try:
            created = float(line.get("created_at") or 0.0)
            whole.append((created, {**line, "prompt_token_ids": prompt(line)}, where))
        except (InputError, TypeError, ValueError, OverflowError) as error:
            yield Unreadable(where, str(error))
    yield from ((line, where) for _, line, where in sorted(whole, key=lambda one: one[0]))
