"""All shapes that are read, the most telling first, and which of them a line has. Most differ in names of fields."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Final

import numpy as np

from ...data.check.columns import IDS, LABELS, MASKS
from ...errors import InputError, shown
from ...integrations.nemo_items import full_prompts
from ...tokens.ids import runs
from .calls import Call, DumpedRollout, DumpedRow, DumpFault, FoundFault, UnreadSource
from .fields import CallFields, Fields, read_call, read_logprobs, read_mask, read_request, request_of
from .rows import RowArrays, read_row
from .shape import (
    DumpShape,
    Row,
    call_lines,
    call_lists,
    first_of,
    has,
    line_name,
    named_by,
    rollout,
    row_lines,
)

# -- verifiers and prime-rl: traces of message nodes, episodes of traces (traces.jsonl), and steps with tokens. A node
# has the tokens that its message adds: those of its path from the root are the prompt and the completion of the call
# that it came of. Steps (trajectory) are what environments of verifiers before 0.2 return.

_STEP: Final = CallFields("prompt_ids", "completion_ids", ("completion_logprobs",), ("completion_mask",))


def _episode(fields: Fields) -> Iterable[DumpedRollout]:
    for trace in fields.each("traces"):
        yield from _trace(trace)


def _trace(fields: Fields) -> Iterable[DumpedRollout]:
    yield DumpedRollout(fields.text("id") or line_name(fields), fields.place(), list(_nodes(fields)))


def _nodes(fields: Fields) -> Iterator[Call]:
    nodes = list(fields.each("nodes"))
    ids = [node.ids("token_ids") if node.has("token_ids") else np.zeros(0, np.int32) for node in nodes]
    masks = [read_mask(node, node.first("mask"), len(own)) for node, own in zip(nodes, ids, strict=True)]
    sampling = {call.text("node"): call.at("sampling").number("temperature") for call in fields.some("calls")}
    for at, node in enumerate(nodes):
        if not node.value.get("sampled") or not len(ids[at]):
            continue
        path = list(_path(nodes, at))
        own = masks[at].array
        if own is not None and own.any():  # what comes before the first sampled token is the prompt for it
            count, scored = len(own) - int(own.argmax()), int(own.sum())
        else:  # then the logprobs tell how many were sampled, or all were
            told = len(node.listed("logprobs")) if node.has("logprobs") else 0
            count = scored = told if 0 < told <= len(ids[at]) else len(ids[at])
        logprobs = read_logprobs(node, "logprobs", scored)
        stream = np.concatenate([ids[one] for one in path])
        known = [masks[one].array for one in path]
        mask = None
        if all(one is not None or not len(ids[index]) for one, index in zip(known, path, strict=True)):
            mask = np.concatenate([np.zeros(0, np.bool_) if one is None else one for one in known])
        said = [one for index in path if isinstance(one := nodes[index].value.get("message"), Mapping)]
        asked = said[:-1] if len(said) == len(path) else None
        yield Call(
            stream,
            len(stream) - count,
            node.place(),
            logprobs.array if logprobs.array is not None and len(logprobs.array) == count else None,
            mask,
            request_of(asked, nodes[path[0]].messages("tools"), said[-1] if said else None),
            temperature=sampling.get(str(at)),
            findings=(*logprobs.findings, *masks[at].findings),
        )


def _path(nodes: list[Fields], at: int) -> list[int]:
    """The nodes from the root to one of them."""
    found, here = [at], nodes[at]
    while (parent := here.value.get("parent")) is not None:
        if not isinstance(parent, int) or not 0 <= parent < len(nodes) or parent in found:
            raise InputError(f"is {parent!r}: there is no such node before it", field=here.named("parent"))
        found.append(parent)
        here = nodes[parent]
    return found[::-1]


def _steps(fields: Fields) -> Iterable[DumpedRollout]:
    calls = []
    for step in fields.each("trajectory"):
        if not step.has("tokens"):
            raise InputError("is missing: the step was recorded without ids", field=step.named("tokens"))
        replies = step.messages("completion")
        request = request_of(step.messages("prompt"), fields.messages("tools"), replies[-1] if replies else None)
        calls.append(read_call(step.at("tokens"), _STEP, request))
    yield rollout(fields, ("trajectory_id", "example_id", "id"), calls)


def _is_episode(row: Row) -> bool:
    return "nodes" in first_of(row, "traces") or (row.get("traces") == [] and "task" in row)


_VERIFIERS: Final = (
    DumpShape("verifiers", "a trace of message nodes", lambda row: "message" in first_of(row, "nodes"), _trace),
    DumpShape("verifiers", "an episode of traces, as prime-rl writes it", _is_episode, _episode),
    DumpShape(
        "verifiers",
        "steps of a trajectory with tokens",
        lambda row: "tokens" in first_of(row, "trajectory"),
        _steps,
    ),
)

# -- NeMo Gym: rollouts whose response items carry tokens, and captured calls (TokenEntry), one a line

_ITEM: Final = CallFields("prompt_token_ids", "generation_token_ids", ("generation_log_probs",))


def _item(fields: Fields) -> Call:
    return read_call(fields, _ITEM)


def _responses(fields: Fields) -> Iterable[DumpedRollout]:
    """The calls of a response. It holds one conversation, and not what each call was asked."""
    items = fields.at("response").each("output")
    calls = [_item(item) for item in items if item.has(_ITEM.prompt, _ITEM.completion)]
    name, attempt = fields.text("rollout_id", "_ng_task_index", "id"), fields.text("_ng_rollout_index")
    yield DumpedRollout(f"{name}-{attempt}" if name and attempt else name or line_name(fields), fields.where, calls)


def _whole_prompts(lines: Sequence[Fields]) -> Iterator[Fields | UnreadSource]:
    """The captured calls of one rollout with their prompts whole, in the order in which they were made."""
    known: list[tuple[Fields, SimpleNamespace]] = []
    for one in lines:
        try:
            known.append((one, _entry(one)))
        except InputError as error:
            yield UnreadSource(one.where, str(error))
    named = Counter(entry.model_call_id for _, entry in known)
    for at, (_, entry) in enumerate(known):
        if entry.model_call_id is None or named[entry.model_call_id] > 1:
            entry.model_call_id = f"\0{at}"  # a call by itself, which no other can say it goes on from
    prompts = full_prompts(entry for _, entry in known)
    for one, entry in sorted(known, key=lambda pair: pair[1].created_at):
        if entry.model_call_id in prompts:
            yield Fields({**one.value, "prompt_token_ids": prompts[entry.model_call_id]}, one.where)
            continue
        parent = entry.parent_call_id
        said = f"of which there are {named[parent]}" if named[parent] > 1 else "which is not there"
        said = f"call {one.text('model_call_id')!r} is stored as what it adds to call {parent!r}, {said}"
        yield UnreadSource(one.where, f"{one.named('parent_call_id')}: {said}")


def _entry(fields: Fields) -> SimpleNamespace:
    return SimpleNamespace(
        model_call_id=fields.text("model_call_id"),
        parent_call_id=fields.text("parent_call_id"),
        created_at=fields.number("created_at") or 0.0,
        prompt_is_delta=bool(fields.value.get("prompt_is_delta")),
        prompt_token_ids=fields.ids("prompt_token_ids").tolist(),
        generation_token_ids=fields.ids("generation_token_ids").tolist(),
    )


def _has_items(row: Row) -> bool:
    response = row.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    return isinstance(output, list) and any(isinstance(one, Mapping) and _ITEM.completion in one for one in output)


_NEMO_GYM: Final = (
    DumpShape("nemo-gym", "a rollout with response items", _has_items, _responses),
    call_lines(
        "nemo-gym",
        "captured calls, one a line",
        has("model_call_id", _ITEM.prompt, _ITEM.completion),
        _item,
        ("rollout_id",),
        gather=_whole_prompts,
    ),
)

# -- OpenEnv: documents of a captured session (sequences), training traces, and trace entries, one a line

_ENTRY: Final = CallFields("prompt_token_ids", "completion_token_ids", ("per_token_logps", "logprobs"), ("loss_mask",))
_SESSIONS: Final = ("session_id", "rollout_id", "episode_id")


def _document(fields: Fields) -> Iterable[DumpedRollout]:
    calls: list[Call] = []
    rows: list[DumpedRow] = []
    turns = {turn.text("node_id"): turn for turn in fields.some("turns")}
    for sequence in fields.each("sequences"):
        made, own = read_row(sequence, RowArrays(sequence.ids("input_ids"), 0, "loss_mask", "logprobs"))
        nodes = sequence.listed("node_ids") if sequence.has("node_ids") else []
        known = [turns.get(str(node)) for node in nodes] if len(nodes) == len(made) else [None] * len(made)
        calls += [_told(call, turn) for call, turn in zip(made, known, strict=True)]
        rows += [_counted(sequence, row) for row in own]
    yield rollout(fields, _SESSIONS, calls, rows)


def _told(call: Call, turn: Fields | None) -> Call:
    """A call with what its turn says of it."""
    if turn is None:
        return call
    request = request_of(
        turn.messages("request_messages"), turn.messages("request_tools"), turn.value.get("response_message")
    )
    temperature = turn.at("sampling_params").number("temperature")
    return replace(call, request=request, recorded="", temperature=temperature)


def _counted(sequence: Fields, row: DumpedRow) -> DumpedRow:
    """A row whose mask is compared with how many tokens its turns sampled."""
    if not sequence.has("turn_lengths"):
        return row
    told = sequence.ids("turn_lengths").tolist()
    trained = [stop - start for start, stop in runs(row.mask)]
    if not trained or _made_of(trained, told):
        return row
    more = sum(trained) - sum(told)
    fault = DumpFault.TRAINED_UNSAMPLED if more > 0 else DumpFault.SAMPLED_UNTRAINED
    said = f"the mask has stretches of {trained} tokens, and turn_lengths says that {told} were sampled"
    tokens = abs(more) or 1  # as many, elsewhere: at least one
    return replace(row, findings=(*row.findings, FoundFault(fault, sequence.place("loss_mask"), said[:300], tokens)))


def _made_of(stretches: list[int], turns: list[int]) -> bool:
    """Whether stretches of a mask are these turns: those that follow one another without a token between are one."""
    ends = set(accumulate(turns))
    return sum(stretches) == sum(turns) and ends.issuperset(accumulate(stretches))


def _traced_entry(fields: Fields) -> Call:
    choices = list(fields.at("response").some("choices"))
    request = read_request(fields.at("request"), choices[0].value.get("message") if choices else None)
    return read_call(fields, _ENTRY, request, fields.at("metadata").at("sampling_params").number("temperature"))


_IS_ENTRY: Final = has("prompt_token_ids", "completion_token_ids")
_OPENENV: Final = (
    DumpShape(
        "openenv", "documents of captured sessions", lambda row: isinstance(row.get("sequences"), list), _document
    ),
    call_lists("openenv", "training traces", _IS_ENTRY, _traced_entry, _SESSIONS, ("turns", "entries", "trace")),
    call_lines(
        "openenv",
        "trace entries, one a line",
        _IS_ENTRY,
        _traced_entry,
        _SESSIONS,
        inside="metadata",
        one_file=True,
    ),
)

# -- TRL: turn records of asynchronous GRPO, its rows (RolloutSample), and what a rollout_func returns

_TURN: Final = CallFields("prompt_ids", "output_ids", ("output_log_probs",), ("output_mask",))
_ROLLOUTS: Final = ("rollout_id", "name", "id")


def _turn(fields: Fields) -> Call:
    return read_call(fields, _TURN, read_request(fields, fields.value.get("completion")))


def _turns(fields: Fields) -> Iterable[DumpedRollout]:
    rows: list[DumpedRow] = []
    for sample in fields.some(fields.first("samples", "sequences")):
        rows += [replace(row, own_calls=False) for row in read_row(sample, _sample(sample))[1]]
    yield rollout(fields, _ROLLOUTS, [_turn(turn) for turn in fields.each("turns")], rows)


def _sample(fields: Fields) -> RowArrays:
    return RowArrays(fields.ids("input_ids"), 0, "completion_mask", fields.first("old_log_probs"))


def _batch(fields: Fields) -> Iterable[DumpedRollout]:
    """What a ``rollout_func`` returns: lists with an entry for each rollout."""
    names = [name for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask") if fields.has(name)]
    columns = {name: fields.listed(name) for name in names}
    sizes = {name: len(column) for name, column in columns.items()}
    if len(set(sizes.values())) > 1:
        raise InputError(f"the lists have entries for different numbers of rollouts: {sizes}", field=names[0])
    for at in range(sizes["prompt_ids"]):
        one = Fields({name: column[at] for name, column in columns.items()}, fields.where, f"[{at}]")
        calls, rows = read_row(one, _responded(one, "completion_ids", "env_mask", "logprobs"))
        yield DumpedRollout(f"{line_name(fields)}, rollout {at}", fields.where, calls, rows)


def _responded(fields: Fields, response: str, mask: str, *logprobs: str) -> RowArrays:
    """A row that is a prompt and a response, on lists of their own."""
    prompt = fields.ids("prompt_ids")
    ids = np.concatenate([prompt, fields.ids(response)])
    return RowArrays(ids, len(prompt), fields.first(mask), fields.first(*logprobs))


def _is_batch(row: Row) -> bool:
    prompts = row.get("prompt_ids")
    if prompts == [] and row.get("completion_ids") == []:
        return named_by(*_ROLLOUTS)(row) is None  # of no rollouts; a line that has a name is a call
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list) and "completion_ids" in row


_TRL: Final = (
    DumpShape("trl", "turn records of a rollout", lambda row: "output_ids" in first_of(row, "turns"), _turns),
    call_lines("trl", "turn records, one a line", has("prompt_ids", "output_ids"), _turn, _ROLLOUTS),
    row_lines("trl", "rows of asynchronous GRPO", has("input_ids", "old_log_probs"), _sample, _ROLLOUTS),
    DumpShape("trl", "what a rollout_func returns", _is_batch, _batch),
)

# -- verl: outputs of agent loops (AgentLoopOutput), and the calls of their server, one a line, plainly or as verl's
# tracing shows them: inputs and output

_SERVED: Final = CallFields("prompt_ids", "token_ids", ("log_probs",))
_REQUESTS: Final = ("request_id", "rollout_id", "trajectory_id")


def _output(fields: Fields) -> RowArrays:
    return _responded(fields, "response_ids", "response_mask", "response_logprobs", "rollout_log_probs")


def _served(fields: Fields) -> Call:
    return read_call(fields, _SERVED, read_request(fields))


def _traced(fields: Fields) -> Iterable[DumpedRollout]:
    merged = Fields({**fields.at("inputs").value, **fields.at("output").value}, fields.where)
    yield rollout(merged, _REQUESTS, [_served(merged)])


def _texts(fields: Fields) -> Iterable[DumpedRollout]:
    raise InputError(
        "this is verl's dump of decoded text (trainer.rollout_data_dir): it has no ids, and text that is encoded again "
        "says nothing of what was sampled; dump what the agent loop returns (prompt_ids, response_ids, response_mask)",
        field="output",
    )


def _traced_key(row: Row) -> str | None:
    asked = row.get("inputs")
    return named_by(*_REQUESTS)(asked) if isinstance(asked, Mapping) else None


def _is_traced(row: Row) -> bool:
    asked, answered = row.get("inputs"), row.get("output")
    if not isinstance(asked, Mapping) or not isinstance(answered, Mapping):
        return False
    return "prompt_ids" in asked and "token_ids" in answered


def _is_text(row: Row) -> bool:
    return isinstance(row.get("input"), str) and isinstance(row.get("output"), str) and "score" in row


_VERL: Final = (
    row_lines("verl", "outputs of an agent loop", has("prompt_ids", "response_ids"), _output, _REQUESTS),
    call_lines("verl", "calls of the server, one a line", has("prompt_ids", "token_ids"), _served, _REQUESTS),
    DumpShape("verl", "traced calls of the server", _is_traced, _traced, _traced_key),
    DumpShape("verl", "decoded text", _is_text, _texts),
)

# -- rows of ids, ours and others'

_LOGPROBS: Final = (
    *("logprobs", "old_log_probs", "inference_logprobs", "rollout_log_probs", "response_logprobs"),
    *("sampling_per_token_logps", "log_probs"),
)


def _row_key(row: Row) -> str | None:
    """Which rollout a row is of: rows of conversations name a file and a row of it."""
    names = ("session", "source", "rollout_id", "session_id", "trajectory_id", "request_id", "rollout")
    name = next((row[name] for name in names if row.get(name) is not None), None)
    if name is None:
        return None
    return f"{name}, row {row['row']}" if row.get("branch") is None and row.get("row") is not None else str(name)


def _row(fields: Fields) -> Iterable[DumpedRollout]:
    name, tokenizer = fields.first(*IDS), fields.value.get("tokenizer")
    assert name is not None
    arrays = RowArrays(fields.ids(name), 0, fields.first(*MASKS), fields.first(*_LOGPROBS))
    calls, rows = read_row(fields, arrays)
    known = tokenizer if isinstance(tokenizer, str) else None
    yield DumpedRollout(_row_key(fields.value) or line_name(fields), fields.where, calls, rows, known)


def _is_row(row: Row) -> bool:
    return any(row.get(name) is not None for name in IDS) and any(
        row.get(name) is not None for name in (*MASKS, LABELS, "logprobs")
    )


_ROWS: Final = (DumpShape("rows", "training rows: ids with a mask or labels", _is_row, _row, _row_key),)

# -- calls as anybody may write them: prompt and completion ids, with the rollout's name beside them

_PROMPTS: Final = ("prompt_ids", "prompt_token_ids")
_COMPLETIONS: Final = ("completion_ids", "completion_token_ids", "generation_token_ids", "response_ids", "output_ids")
_ANY: Final = (
    *("rollout_id", "rollout", "session_id", "session", "trajectory_id", "conversation_id", "episode_id"),
    *("request_id", "uid", "name"),
)


def _plain(fields: Fields) -> Call:
    names = CallFields(
        fields.first(*_PROMPTS) or _PROMPTS[0],
        fields.first(*_COMPLETIONS) or _COMPLETIONS[0],
        ("logprobs", "completion_logprobs", "log_probs"),
        ("loss_mask", "completion_mask", "mask"),
    )
    return read_call(fields, names, read_request(fields, fields.value.get("reply")), fields.number("temperature"))


def _is_call(row: Row) -> bool:
    return any(name in row for name in _PROMPTS) and any(name in row for name in _COMPLETIONS)


_CALLS: Final = (
    call_lists("calls", "calls of a rollout", _is_call, _plain, _ANY, ("calls", "turns", "steps")),
    call_lines("calls", "calls, one a line", _is_call, _plain, _ANY),
)

# -- all of them

SHAPES: Final[tuple[DumpShape, ...]] = (*_VERIFIERS, *_NEMO_GYM, *_OPENENV, *_TRL, *_VERL, *_ROWS, *_CALLS)
NAMES: Final = tuple(dict.fromkeys(shape.name for shape in SHAPES))
"""What ``--shape`` takes."""


def shape_of(row: Any, name: str | None = None) -> DumpShape:
    """The shape of a line, among all or among those of one name; InputError says what the line has."""
    if not isinstance(row, Mapping):
        raise InputError(f"a line of a dump is an object, not {shown(row)}")
    found = next((shape for shape in SHAPES if name in (None, shape.name) and shape.fits(row)), None)
    if found is not None:
        return found
    if name is not None:
        forms = "; ".join(shape.form for shape in SHAPES if shape.name == name)
        raise InputError(f"this is {shown(row)}, and none of what {name} writes: {forms}")
    raise InputError(
        f"this is {shown(row)}, which is none of the shapes that are known ({', '.join(NAMES)}): a call needs "
        "prompt_ids and completion_ids, a row input_ids and loss_mask"
    )
