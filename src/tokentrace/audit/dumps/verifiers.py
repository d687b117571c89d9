"""verifiers and prime-rl: traces of message nodes, episodes of traces (``traces.jsonl``), and steps with tokens.

A node has the tokens that its message adds: those of its path from the root are the prompt and the completion of the
call that it came of. Steps (``trajectory``) are what environments of verifiers before 0.2 return.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import numpy as np

from ...errors import InputError
from .calls import Call, DumpedRollout, Request
from .fields import CallFields, Fields, read_call, read_logprobs, read_mask
from .shape import Shape, first_of, line_name

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
    sampling = {call.text("node"): call.at("sampling").number("temperature") for call in _calls(fields)}
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
        said = [nodes[one].value.get("message") for one in path]
        request = None
        if all(isinstance(one, Mapping) for one in said):
            request = Request(said[:-1], nodes[path[0]].messages("tools"), said[-1])  # type: ignore[arg-type]
        yield Call(
            stream,
            len(stream) - count,
            node.place(),
            logprobs.array if logprobs.array is not None and len(logprobs.array) == count else None,
            mask,
            request,
            temperature=sampling.get(str(at)),
            findings=(*logprobs.findings, *masks[at].findings),
        )


def _calls(fields: Fields) -> Iterator[Fields]:
    return fields.each("calls") if fields.has("calls") else iter(())


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
        messages, replies = step.messages("prompt"), step.messages("completion")
        request = None
        if messages is not None:
            request = Request(messages, fields.messages("tools"), replies[-1] if replies else None)
        calls.append(read_call(step.at("tokens"), _STEP, request))
    name = fields.text("trajectory_id", "example_id", "id")
    yield DumpedRollout(name or line_name(fields), fields.where, calls)


def _is_trace(row: Mapping[str, Any]) -> bool:
    return "message" in first_of(row, "nodes")


def _is_episode(row: Mapping[str, Any]) -> bool:
    return "nodes" in first_of(row, "traces") or (row.get("traces") == [] and "task" in row)


def _has_steps(row: Mapping[str, Any]) -> bool:
    return "tokens" in first_of(row, "trajectory")


SHAPES: Final = (
    Shape("verifiers", "a trace of message nodes", _is_trace, _trace),
    Shape("verifiers", "an episode of traces, as prime-rl writes it", _is_episode, _episode),
    Shape("verifiers", "steps of a trajectory with tokens", _has_steps, _steps),
)
