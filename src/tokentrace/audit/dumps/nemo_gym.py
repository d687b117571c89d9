"""NeMo Gym: rollouts whose response items carry tokens, and captured calls (``TokenEntry``), one a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from ...errors import InputError
from ...integrations.nemo_items import full_prompts
from .calls import DumpedRollout, Unreadable
from .fields import CallFields, Fields, read_call
from .shape import Shape, line_name, named_by

_FIELDS: Final = CallFields("prompt_token_ids", "generation_token_ids", ("generation_log_probs",))
_CARRY: Final = ("prompt_token_ids", "generation_token_ids")


def _responses(fields: Fields) -> Iterable[DumpedRollout]:
    """The calls of a response. It holds one conversation, and not what each call was asked."""
    items = fields.at("response").each("output")
    calls = [read_call(item, _FIELDS) for item in items if item.has(*_CARRY)]
    name, attempt = fields.text("rollout_id", "_ng_task_index", "id"), fields.text("_ng_rollout_index")
    yield DumpedRollout(f"{name}-{attempt}" if name and attempt else name or line_name(fields), fields.where, calls)


def _captured(fields: Fields) -> Iterable[DumpedRollout]:
    """One captured call, its prompt made whole before."""
    yield DumpedRollout(fields.text("rollout_id") or line_name(fields), fields.where, [read_call(fields, _FIELDS)])


def _whole_prompts(lines: Sequence[Fields]) -> Iterator[Fields | Unreadable]:
    """The captured calls of one rollout with their prompts whole, in the order in which they were made."""
    known: list[tuple[Fields, SimpleNamespace]] = []
    for one in lines:
        try:
            known.append((one, _entry(one)))
        except InputError as error:
            yield Unreadable(one.where, str(error))
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
        yield Unreadable(one.where, f"{one.named('parent_call_id')}: {said}")


def _entry(fields: Fields) -> SimpleNamespace:
    return SimpleNamespace(
        model_call_id=fields.text("model_call_id"),
        parent_call_id=fields.text("parent_call_id"),
        created_at=fields.number("created_at") or 0.0,
        prompt_is_delta=bool(fields.value.get("prompt_is_delta")),
        prompt_token_ids=fields.ids("prompt_token_ids").tolist(),
        generation_token_ids=fields.ids("generation_token_ids").tolist(),
    )


def _has_items(row: Mapping[str, Any]) -> bool:
    response = row.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    return isinstance(output, list) and any(isinstance(one, Mapping) and _CARRY[1] in one for one in output)


def _is_entry(row: Mapping[str, Any]) -> bool:
    return "model_call_id" in row and all(name in row for name in _CARRY)


SHAPES: Final = (
    Shape("nemo-gym", "a rollout with response items", _has_items, _responses),
    Shape(
        "nemo-gym", "captured calls, one a line", _is_entry, _captured, named_by("rollout_id"), gather=_whole_prompts
    ),
)
