"""How frameworks record rollouts: one table of field names, and a reader for each place where calls are kept.

A line is recognised by its fields. verifiers and prime-rl keep trees of message nodes, NeMo Gym items of a response or
captured calls, OpenEnv training traces and captured sessions, TRL and verl turns, rows and batches. Anybody else can
write ``prompt_ids`` and ``completion_ids``, or ``input_ids`` with a mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Final

import numpy as np

from ..errors import InputError, shown
from ..tokens.ids import runs
from .finding import Cause, Finding
from .records import (
    Call,
    CallNames,
    Fields,
    Mask,
    Request,
    Rollout,
    Row,
    RowFields,
    Unreadable,
    read_call,
    read_logprobs,
    read_mask,
    read_row,
)

IDS: Final = ("input_ids", "token_ids", "ids", "tokens")
PROMPTS: Final = ("prompt_ids", "prompt_token_ids")
COMPLETIONS: Final = ("completion_ids", "completion_token_ids", "generation_token_ids", "output_ids", "token_ids")
MASKS: Final = (
    *("loss_mask", "completion_mask", "output_mask", "response_mask", "env_mask"),
    *("assistant_masks", "assistant_mask", "mask"),
)
LOGPROBS: Final = (
    *("logprobs", "log_probs", "completion_logprobs", "generation_log_probs", "output_log_probs", "per_token_logps"),
    *("response_logprobs", "rollout_log_probs", "old_log_probs", "inference_logprobs", "sampling_per_token_logps"),
)
NAMES: Final = (
    *("rollout_id", "session_id", "trajectory_id", "conversation_id", "episode_id", "request_id"),
    *("rollout", "session", "uid", "name"),
)
"""Fields that say which rollout a line belongs to."""
_LISTS: Final = ("calls", "turns", "steps", "entries", "trace", "trajectory")
"""Lists of calls."""

Line = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Shape:
    """How a line is laid out. `key` names the rollout of a line, if a rollout may have several lines."""

    name: str
    fits: Callable[[Line], bool]
    read: Callable[[Fields], Iterable[Rollout]]
    key: Callable[[Line], str | None] = lambda line: None

    def __str__(self) -> str:
        return self.name


def shape_of(line: Any) -> Shape:
    """The shape of a line. Raises InputError with the fields of a line of no known shape."""
    if not isinstance(line, Mapping):
        raise InputError(f"a line of a record must be an object, not {shown(line)}")
    shape = next((shape for shape in SHAPES if shape.fits(line)), None)
    if shape is None:
        raise InputError(
            f"this is {shown(line)}, which has no known shape: a call needs prompt_ids and completion_ids, a row "
            "input_ids and loss_mask"
        )
    return shape


def _rollout(fields: Fields, calls: Sequence[Call], rows: Sequence[Row] = (), name: str | None = None) -> Rollout:
    whose = name or fields.text(*NAMES, "example_id", "id") or fields.where.rpartition(", ")[2]
    tokenizer = fields.value.get("tokenizer")
    return Rollout(whose, fields.where, calls, rows, tokenizer if isinstance(tokenizer, str) else None)


def _first(line: Any, name: str) -> Line:
    """The first object of a list, or an empty one."""
    items = line.get(name) if isinstance(line, Mapping) else None
    return items[0] if isinstance(items, list) and items and isinstance(items[0], Mapping) else {}


def _key(line: Line) -> str | None:
    """The rollout of a line, named by the line, its inputs or its metadata."""
    for place in (line, line.get("inputs"), line.get("metadata")):
        values = [place.get(name) for name in NAMES] if isinstance(place, Mapping) else []
        name = next((one for one in values if one not in (None, "") and not isinstance(one, (Mapping, list))), None)
        if name is not None:
            return str(name)
    return "" if "per_token_logps" in line else None  # a file of OpenEnv's trace entries is one rollout


# -- calls


def _is_call(line: Line) -> bool:
    return any(name in line for name in PROMPTS) and any(name in line for name in COMPLETIONS)


def _call(fields: Fields, tools: Any = None) -> Call:
    """A call whose conversation, reply and temperature are beside it."""
    tokens = fields.at("tokens") if isinstance(fields.value.get("tokens"), Mapping) else fields
    names = CallNames(tokens.first(*PROMPTS) or "prompt_ids", tokens.first(*COMPLETIONS) or "completion_ids")
    replies = [fields.value.get(name) for name in ("reply", "completion", "response_message")]
    replies += [choice.value.get("message") for choice in fields.at("response").each("choices")][:1]
    reply = next((one[-1] if isinstance(one, list) else one for one in replies if one), None)
    asked = fields.at("request") if fields.first("request") else fields
    request = asked.request("messages" if asked.first("messages") else "prompt", reply=reply)
    if request is not None and request.tools is None:
        request = request._replace(tools=tools)
    temperature = fields.number("temperature")
    if temperature is None and fields.first("metadata"):
        temperature = fields.at("metadata").at("sampling_params").number("temperature")
    return read_call(tokens, names._replace(logprobs=LOGPROBS, mask=MASKS), request, temperature)


def _call_line(fields: Fields) -> Iterable[Rollout]:
    yield _rollout(fields, [_call(fields)], name=_key(fields.value))


def _call_list(fields: Fields) -> Iterable[Rollout]:
    """A rollout with its calls in a list, and perhaps the rows built from them (TRL's samples)."""
    name = next(name for name in _LISTS if _holds_calls(fields.value, name))
    tools = fields.messages("tools")
    rows = [replace(_row_of(row)[1], independent=True) for row in fields.each(fields.first("samples"))]
    yield _rollout(fields, [_call(one, tools) for one in fields.each(name)], rows)


def _holds_calls(line: Line, name: str) -> bool:
    first = _first(line, name)
    tokens = first.get("tokens")
    return _is_call(first) or (isinstance(tokens, Mapping) and _is_call(tokens))


def _response(fields: Fields) -> Iterable[Rollout]:
    """NeMo Gym: items of a response. It is one conversation, and does not say what each call was asked."""
    calls = [_call(item) for item in fields.at("response").each("output") if _is_call(item.value)]
    name, attempt = fields.text("rollout_id", "_ng_task_index", "id"), fields.text("_ng_rollout_index")
    yield _rollout(fields, calls, name=f"{name}-{attempt}" if name and attempt else name)


def _has_items(line: Line) -> bool:
    response = line.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    return isinstance(output, list) and any(isinstance(item, Mapping) and _is_call(item) for item in output)


def _traced(fields: Fields) -> Iterable[Rollout]:
    """verl: a traced call of the server, its inputs and its output."""
    merged = Fields({**fields.at("inputs").value, **fields.at("output").value}, fields.where)
    yield _rollout(merged, [_call(merged)])


def _is_traced(line: Line) -> bool:
    parts = line.get("inputs"), line.get("output")
    return all(isinstance(part, Mapping) for part in parts) and _is_call({**parts[0], **parts[1]})  # type: ignore[dict-item]


def _text(fields: Fields) -> Iterable[Rollout]:
    raise InputError(
        "this is verl's dump of decoded text (trainer.rollout_data_dir): it has no ids, and text that is encoded again "
        "proves nothing; dump what the agent loop returns (prompt_ids, response_ids, response_mask)",
        field="output",
    )


def complete_prompts(lines: Sequence[Fields]) -> Iterator[Fields | Unreadable]:
    """NeMo Gym's captured calls with whole prompts: one may be stored as what it adds to the stream of its parent."""
    calls: dict[str, list[Fields]] = {}
    for line in lines:
        calls.setdefault(str(line.value.get("model_call_id")), []).append(line)

    def prompt(line: Fields, children: frozenset[int] = frozenset()) -> list[int]:
        ids: list[int] = line.ids("prompt_token_ids").tolist()
        if not line.value.get("prompt_is_delta"):
            return ids
        parents = calls.get(str(line.value.get("parent_call_id")), [])
        if len(parents) != 1 or id(line) in children:
            reason = f"of which there are {len(parents)}" if len(parents) > 1 else "which is not there"
            name, parent = line.value.get("model_call_id"), line.value.get("parent_call_id")
            words = f"call {name!r} is stored as what it adds to call {parent!r}, {reason}"
            raise InputError(words, field="parent_call_id")
        before = prompt(parents[0], children | {id(line)})
        return [*before, *parents[0].ids("generation_token_ids").tolist(), *ids]

    timed: list[tuple[float, Fields]] = []
    for line in lines:
        try:
            whole = Fields({**line.value, "prompt_token_ids": prompt(line)}, line.where)
            timed.append((line.number("created_at") or 0.0, whole))
        except InputError as error:
            yield Unreadable(line.where, str(error))
    yield from (line for _, line in sorted(timed, key=lambda pair: pair[0]))


# -- rows


def _is_row(line: Line) -> bool:
    has_ids = any(line.get(name) is not None for name in IDS)
    return has_ids and any(line.get(name) is not None for name in (*MASKS, *LOGPROBS, "labels"))


def _row_of(fields: Fields) -> tuple[list[Call], Row]:
    name = fields.first(*IDS) or "input_ids"
    return read_row(fields, RowFields(fields.ids(name), 0, fields.first(*MASKS), fields.first(*LOGPROBS)))


def _row(fields: Fields) -> Iterable[Rollout]:
    calls, row = _row_of(fields)
    yield _rollout(fields, calls, [row], _row_key(fields.value))


def _row_key(line: Line) -> str | None:
    """Rows of conversations name a file and a row of it, rows of sessions their session."""
    name = _key({"session": line.get("session") or line.get("source")}) or _key(line)
    return f"{name}, row {line['row']}" if name and line.get("branch") is None and line.get("row") is not None else name


def _response_row(fields: Fields) -> Iterable[Rollout]:
    """A row in two lists: verl's prompt and response."""
    yield _rollout(fields, *_two_lists(fields, "response_ids"))


def _two_lists(fields: Fields, response: str) -> tuple[list[Call], list[Row]]:
    prompt = fields.ids("prompt_ids")
    ids = np.concatenate([prompt, fields.ids(response)])
    calls, row = read_row(fields, RowFields(ids, len(prompt), fields.first(*MASKS), fields.first(*LOGPROBS)))
    return calls, [row]


def _batch(fields: Fields) -> Iterable[Rollout]:
    """TRL: what a rollout_func returns, lists with an entry for each rollout."""
    names = [name for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask") if fields.first(name)]
    columns = {name: fields.items(name) for name in names}
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the lists have entries for different numbers of rollouts: {sizes}", field=names[0])
    for at in range(sizes["prompt_ids"]):
        one = Fields({name: column[at] for name, column in columns.items()}, fields.where, f"[{at}]")
        name = f"{fields.where.rpartition(', ')[2]}, rollout {at}"
        yield _rollout(fields, *_two_lists(one, "completion_ids"), name=name)


def _is_batch(line: Line) -> bool:
    prompts = line.get("prompt_ids")
    if prompts == [] and line.get("completion_ids") == []:
        return _key(line) is None
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list) and "completion_ids" in line


def _session(fields: Fields) -> Iterable[Rollout]:
    """OpenEnv: a captured session, rows with the turns that they were built from."""
    calls: list[Call] = []
    rows: list[Row] = []
    turns = {turn.text("node_id"): turn for turn in fields.each("turns")}
    for sequence in fields.each("sequences"):
        parts, row = _row_of(sequence)
        nodes = sequence.items("node_ids") if sequence.first("node_ids") else []
        for call, node in zip(parts, nodes if len(nodes) == len(parts) else [None] * len(parts), strict=True):
            turn = turns.get(str(node))
            if turn is not None:
                request = turn.request("request_messages", "request_tools", turn.value.get("response_message"))
                temperature = turn.at("sampling_params").number("temperature")
                call = replace(call, request=request, temperature=temperature)
            calls.append(call)
        rows.append(_with_lengths(sequence, row))
    yield _rollout(fields, calls, rows)


def _with_lengths(sequence: Fields, row: Row) -> Row:
    """A row whose mask is compared with the lengths of its turns; turns that touch are one run of the mask."""
    trained = [stop - start for start, stop in runs(row.mask)]
    if not sequence.first("turn_lengths") or not trained:
        return row
    lengths = sequence.ids("turn_lengths").tolist()
    more = sum(trained) - sum(lengths)
    if not more and set(accumulate(lengths)).issuperset(accumulate(trained)):
        return row
    cause = Cause.TRAINED_UNSAMPLED if more > 0 else Cause.SAMPLED_UNTRAINED
    words = f"the mask has runs of {trained} tokens, and turn_lengths says that {lengths} were sampled"
    finding = Finding(cause, sequence.place("loss_mask"), words=words[:300], tokens=abs(more) or 1)
    return replace(row, findings=(*row.findings, finding))


# -- trees of message nodes


def _trace(fields: Fields) -> Iterable[Rollout]:
    """verifiers: a node has the tokens that its message adds; the path from the root is prompt and completion."""
    yield _rollout(fields, list(_node_calls(fields)), name=fields.text("id"))


def _node_calls(fields: Fields) -> Iterator[Call]:
    nodes = list(fields.each("nodes"))
    ids = [node.ids("token_ids") if node.first("token_ids") else np.zeros(0, np.int32) for node in nodes]
    findings: list[list[Finding]] = [[] for _ in nodes]
    masks = [read_mask(node, node.first("mask"), len(ids[at]), 0, findings[at]) for at, node in enumerate(nodes)]
    sampling = {call.text("node"): call.at("sampling").number("temperature") for call in fields.each("calls")}
    for at, node in enumerate(nodes):
        if not node.value.get("sampled") or not len(ids[at]):
            continue
        path = _path(nodes, at)
        mask = masks[at]
        if mask is not None and mask.any():  # what comes before the first sampled token belongs to the prompt
            count, scored = len(mask) - int(mask.argmax()), int(mask.sum())
        else:
            given = len(node.items("logprobs")) if node.first("logprobs") else 0
            count = scored = given if 0 < given <= len(ids[at]) else len(ids[at])
        logprobs = read_logprobs(node, "logprobs", scored, findings[at])
        stream = np.concatenate([ids[one] for one in path])
        messages = [nodes[one].value.get("message") for one in path]
        request = None
        if all(isinstance(message, Mapping) for message in messages):
            request = Request(messages[:-1], nodes[path[0]].messages("tools"), messages[-1])  # type: ignore[arg-type]
        yield Call(
            stream,
            len(stream) - count,
            node.place(),
            logprobs if logprobs is not None and len(logprobs) == count else None,
            _path_mask([masks[one] for one in path], [len(ids[one]) for one in path]),
            request,
            temperature=sampling.get(str(at)),
            findings=tuple(findings[at]),
        )


def _path_mask(masks: Sequence[Mask | None], sizes: Sequence[int]) -> Mask | None:
    if any(mask is None and size for mask, size in zip(masks, sizes, strict=True)):
        return None
    return np.concatenate([np.zeros(0, np.bool_) if mask is None else mask for mask in masks])


def _path(nodes: Sequence[Fields], at: int) -> list[int]:
    """The nodes from the root to one of them."""
    path, node = [at], nodes[at]
    while (parent := node.value.get("parent")) is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or parent in path:
            raise InputError(f"is {parent!r}: there is no such node before it", field=node.name("parent"))
        path.append(parent)
        node = nodes[parent]
    return path[::-1]


def _episode(fields: Fields) -> Iterable[Rollout]:
    for trace in fields.each("traces"):
        yield from _trace(trace)


def _is_episode(line: Line) -> bool:
    return "nodes" in _first(line, "traces") or (line.get("traces") == [] and "task" in line)


def _is_text(line: Line) -> bool:
    return all(isinstance(line.get(name), str) for name in ("input", "output")) and "score" in line


SHAPES: Final = (
    Shape("a tree of message nodes (verifiers)", lambda line: "message" in _first(line, "nodes"), _trace),
    Shape("an episode of such trees (prime-rl)", _is_episode, _episode),
    Shape("a captured session (OpenEnv)", lambda line: isinstance(line.get("sequences"), list), _session),
    Shape("items of a response (NeMo Gym)", _has_items, _response),
    Shape("a rollout with its calls", lambda line: any(_holds_calls(line, name) for name in _LISTS), _call_list),
    Shape("a batch of rollouts (TRL)", _is_batch, _batch),
    Shape(
        "prompt and response (verl)", lambda line: {"prompt_ids", "response_ids"} <= line.keys(), _response_row, _key
    ),
    Shape("calls, one a line", _is_call, _call_line, _key),
    Shape("traced calls (verl)", _is_traced, _traced, _key),
    Shape("rows of ids", _is_row, _row, _row_key),
    Shape("decoded text (verl)", _is_text, _text),
)
"""The most specific first."""
