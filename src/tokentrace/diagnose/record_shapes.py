"""Where frameworks keep the calls and rows of their rollouts. A line is recognised by its fields.

Anybody can write ``prompt_ids`` and ``completion_ids``, or ``input_ids`` with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from ..errors import InputError, brief
from ..tokens.ids import check_ids
from .finding import Finding
from .records import (
    COMPLETIONS,
    IDS,
    LOGPROBS,
    MASKS,
    PROMPTS,
    Call,
    Line,
    Place,
    Request,
    Rollout,
    Row,
    Unreadable,
    first_of,
    read_call,
    read_logprobs,
    read_mask,
    read_request,
    read_row,
)

_NAMES: Final = (
    *("rollout_id", "session_id", "trajectory_id", "conversation_id", "episode_id"),
    *("request_id", "rollout", "session", "uid", "name"),
)
"""Fields that name the rollout of a line."""
_LISTS: Final = ("calls", "turns", "steps", "entries", "trace", "trajectory")
"""Lists of calls."""

Parts = tuple[list[Call], list[Row]]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a line is laid out. With `lines`, a rollout may have several, which `key` tells."""

    name: str
    fits: Callable[[Line], bool]
    read: Callable[[Line, Place], Parts]
    lines: bool = False

    def key(self, line: Line) -> str | None:
        """The rollout that a line belongs to; None for a rollout by itself."""
        return rollout_name(line) if self.lines else None

    def rollout(self, line: Line, where: str) -> Rollout:
        """The rollout of a line, or its part of it."""
        calls, rows = self.read(line, Place(where))
        name = rollout_name(line) or first_of(line, ("id", "example_id"))
        name = str(line.get(name, name)) if name else where.rpartition(", ")[2]
        tokenizer = line.get("tokenizer")
        return Rollout(name, where, calls, rows, tokenizer if isinstance(tokenizer, str) else None)


def shape_of(line: Any) -> Shape:
    """The shape of a line. Raises InputError with the fields of a line of no known shape."""
    if not isinstance(line, Mapping):
        raise InputError(f"a line of a record must be an object, not {brief(line)}")
    shape = next((shape for shape in SHAPES if shape.fits(line)), None)
    if shape is None:
        needs = "a call needs prompt_ids and completion_ids, a row input_ids and loss_mask"
        raise InputError(f"this is {brief(line)}, which has no known shape: {needs}")
    return shape


def rollout_name(line: Line) -> str | None:
    """The rollout that a line names, in its own fields or its metadata."""
    for part in (line, line.get("metadata")):
        if isinstance(part, Mapping) and (name := first_of(part, _NAMES)):
            return str(part[name])
    if line.get("source") is not None:
        alone = line.get("branch") is None and line.get("row") is not None
        return f"{line['source']}, row {line['row']}" if alone else str(line["source"])
    return "" if "per_token_logps" in line else None  # a file of OpenEnv's trace entries is one rollout


def _first(line: Line, name: str) -> Line:
    """The first object of a list, or an empty one."""
    items = line.get(name)
    return items[0] if isinstance(items, list) and items and isinstance(items[0], Mapping) else {}


def _is_call(line: Any) -> bool:
    return isinstance(line, Mapping) and all(any(name in line for name in names) for names in (PROMPTS, COMPLETIONS))


# -- calls


def _call(line: Line, place: Place, tools: Any = None) -> Call:
    """A call with its conversation, reply and temperature beside it."""
    tokens = line["tokens"] if _is_call(line.get("tokens")) else line
    choices = (line.get("response") or {}).get("choices") or [{}]
    replies = (line.get("reply"), line.get("completion"), choices[0].get("message"))
    reply = next((one for one in replies if one), None)
    request = line.get("request") or line
    if "messages" not in request and isinstance(request.get("prompt"), list):
        request = {"messages": request["prompt"], "tools": tools}
    settings = (line.get("metadata") or {}).get("sampling_params") or line
    reply = reply[-1] if isinstance(reply, list) else reply
    inner = place.at("tokens") if tokens is not line else place
    return read_call(tokens, inner, read_request(request, reply), settings.get("temperature"))


def _call_line(line: Line, place: Place) -> Parts:
    return [_call(line, place)], []


def _call_list(line: Line, place: Place) -> Parts:
    """A rollout with its calls in a list, and perhaps the rows built from them (TRL's samples)."""
    name = next(name for name in _LISTS if _holds_calls(line, name))
    calls = [_call(one, place.at(f"{name}[{at}]"), line.get("tools")) for at, one in enumerate(line[name])]
    samples = enumerate(line.get("samples") or ())
    rows = [replace(read_row(one, place.at(f"samples[{at}]"))[1], independent=True) for at, one in samples]
    return calls, rows


def _holds_calls(line: Line, name: str) -> bool:
    return _is_call(_first(line, name)) or _is_call(_first(line, name).get("tokens"))


def _response(line: Line, place: Place) -> Parts:
    """NeMo Gym: items of a response, which lacks the request of each call."""
    items = enumerate(line["response"]["output"])
    return [_call(item, place.at(f"response.output[{at}]")) for at, item in items if _is_call(item)], []


def _has_items(line: Line) -> bool:
    response = line.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    return isinstance(output, list) and any(map(_is_call, output))


def complete_prompts(lines: Sequence[tuple[Line, str]]) -> Iterator[tuple[Line, str] | Unreadable]:
    """NeMo Gym's captured calls, whose prompts may be stored as what they add to a parent."""
    calls: dict[Any, list[Line]] = {}
    for line, _ in lines:
        calls.setdefault(line.get("model_call_id"), []).append(line)

    def prompt(line: Line, children: int = 0) -> list[int]:
        ids = check_ids(line.get("prompt_token_ids"), "prompt_token_ids").tolist()
        if not line.get("prompt_is_delta"):
            return ids  # type: ignore[no-any-return]
        parents = calls.get(line.get("parent_call_id"), [])
        if len(parents) != 1 or children > len(lines):
            reason = f"of which there are {len(parents)}" if len(parents) > 1 else "which is not there"
            names = (
                f"call {line.get('model_call_id')!r} is stored as what it adds to call {line.get('parent_call_id')!r}"
            )
            raise InputError(f"{names}, {reason}", field="parent_call_id")
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


# -- rows


def _row(line: Line, place: Place) -> Parts:
    calls, row = read_row(line, place)
    return calls, [row]


def _is_row(line: Line) -> bool:
    return first_of(line, IDS) is not None and first_of(line, (*MASKS, *LOGPROBS, "labels")) is not None


def _response_row(line: Line, place: Place) -> Parts:
    """A row in two lists: verl's prompt and response, or one of TRL's batch."""
    prompt = check_ids(line["prompt_ids"], place.field("prompt_ids"))
    name = first_of(line, ("response_ids", "completion_ids")) or "response_ids"
    ids = np.concatenate([prompt, check_ids(line.get(name), place.field(name))])
    calls, row = read_row(line, place, ids, len(prompt))
    return calls, [row]


def _session(line: Line, place: Place) -> Parts:
    """OpenEnv: a captured session, rows with the turns that they were built from."""
    turns = {str(turn.get("node_id")): turn for turn in line.get("turns") or ()}
    calls: list[Call] = []
    rows: list[Row] = []
    for at, sequence in enumerate(line["sequences"]):
        parts, row = read_row(sequence, place.at(f"sequences[{at}]"))
        nodes = [turns.get(str(node)) for node in sequence.get("node_ids") or ()]
        for call, turn in zip(parts, nodes if len(nodes) == len(parts) else [None] * len(parts), strict=True):
            request = {"messages": (turn or {}).get("request_messages"), "tools": (turn or {}).get("request_tools")}
            reply = (turn or {}).get("response_message")
            calls.append(replace(call, request=read_request(request, reply)))
        rows.append(row)
    return calls, rows


# -- trees of message nodes


def _trace(line: Line, place: Place) -> Parts:
    """verifiers: a node has the tokens of its message; its path is prompt and completion."""
    nodes = line["nodes"]
    places = [place.at(f"nodes[{at}]") for at in range(len(nodes))]
    ids = [check_ids(node.get("token_ids") or [], places[at].field("token_ids")) for at, node in enumerate(nodes)]
    findings: list[list[Finding]] = [[] for _ in nodes]
    masks = [read_mask(node, places[at], len(ids[at]), 0, findings[at]) for at, node in enumerate(nodes)]
    calls = []
    for at, node in enumerate(nodes):
        if not node.get("sampled") or not len(ids[at]):
            continue
        path = _path(nodes, at, places[at])
        mask = masks[at]
        count = scored = len(node.get("logprobs") or ids[at])
        if mask is not None and mask.any():  # what comes before the first sampled token belongs to the prompt
            count, scored = len(mask) - int(mask.argmax()), int(mask.sum())
        logprobs = read_logprobs(node, places[at], min(scored, len(ids[at])), findings[at])
        stream = np.concatenate([ids[one] for one in path])
        path_masks = [np.zeros(0, np.bool_) if not len(ids[one]) else masks[one] for one in path]
        messages = [nodes[one].get("message") for one in path]
        request = None
        if all(isinstance(message, Mapping) for message in messages):
            request = Request(messages[:-1], nodes[path[0]].get("tools"), messages[-1])
        call = Call(
            stream,
            len(stream) - min(count, len(ids[at])),
            str(places[at]),
            logprobs if logprobs is not None and len(logprobs) == count else None,
            None if any(one is None for one in path_masks) else np.concatenate(path_masks),  # type: ignore[arg-type]
            request,
            findings=tuple(findings[at]),
        )
        calls.append(call)
    return calls, []


def _path(nodes: Sequence[Line], at: int, place: Place) -> list[int]:
    """The nodes from the root to one of them."""
    path = [at]
    while (parent := nodes[path[-1]].get("parent")) is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or parent in path:
            raise InputError(f"is {parent!r}: there is no such node before it", field=place.field("parent"))
        path.append(parent)
    return path[::-1]


def unfold(line: Line) -> list[tuple[Line, str]]:
    """The rollouts of a line: an episode of traces (prime-rl), a batch (TRL), or itself."""
    traces, prompts = line.get("traces"), line.get("prompt_ids")
    if isinstance(traces, list):
        return [(trace, f"traces[{at}]") for at, trace in enumerate(traces)]
    if not isinstance(prompts, list) or not prompts or not isinstance(prompts[0], list):
        return [(line, "")]
    columns = {name: values for name, values in line.items() if isinstance(values, list)}
    columns["response_ids"] = columns.pop("completion_ids", [])
    if len({len(values) for values in columns.values()}) > 1:
        raise InputError("the lists have entries for different numbers of rollouts", field="prompt_ids")
    return [({name: values[at] for name, values in columns.items()}, f"[{at}]") for at in range(len(prompts))]


SHAPES: Final = (
    Shape("a tree of message nodes (verifiers)", lambda line: "message" in _first(line, "nodes"), _trace),
    Shape("a captured session (OpenEnv)", lambda line: isinstance(line.get("sequences"), list), _session),
    Shape("items of a response (NeMo Gym)", _has_items, _response),
    Shape("a rollout with its calls", lambda line: any(_holds_calls(line, name) for name in _LISTS), _call_list),
    Shape("prompt and response", lambda line: {"prompt_ids", "response_ids"} <= line.keys(), _response_row, True),
    Shape("calls, one a line", _is_call, _call_line, True),
    Shape("rows of ids", _is_row, _row, True),
)
"""The most specific first."""
