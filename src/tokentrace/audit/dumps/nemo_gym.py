"""NeMo Gym: rollouts whose response items carry tokens, and captured calls (``TokenEntry``), one a line."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final

from ...errors import InputError
from ...integrations.nemo_items import full_prompts
from .calls import DumpedRollout
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


def _entries(fields: Fields) -> Iterable[DumpedRollout]:
    """One captured call. Those stored as a suffix of their prompt are made whole by `whole_prompts`."""
    yield DumpedRollout(fields.text("rollout_id") or line_name(fields), fields.where, [read_call(fields, _FIELDS)])


def whole_prompts(lines: Sequence[Fields]) -> Iterator[Fields]:
    """The captured calls of one rollout with their prompts whole, in the order in which they were made."""
    entries = [
        SimpleNamespace(
            model_call_id=str(one.value.get("model_call_id")),
            parent_call_id=one.value.get("parent_call_id"),
            prompt_is_delta=bool(one.value.get("prompt_is_delta")),
            prompt_token_ids=one.ids("prompt_token_ids").tolist(),
            generation_token_ids=one.ids("generation_token_ids").tolist(),
        )
        for one in lines
    ]
    prompts = full_prompts(entries)
    order = sorted(range(len(lines)), key=lambda at: (lines[at].number("created_at") or 0.0, at))
    for at in order:
        call = entries[at].model_call_id
        if call not in prompts:
            raise InputError(
                f"call {call!r} is stored as what it adds to call {entries[at].parent_call_id!r}, which is not there",
                field=lines[at].named("parent_call_id"),
            )
        yield Fields({**lines[at].value, "prompt_token_ids": prompts[call]}, lines[at].where)


def _has_items(row: Mapping[str, Any]) -> bool:
    response = row.get("response")
    output = response.get("output") if isinstance(response, Mapping) else None
    return isinstance(output, list) and any(isinstance(one, Mapping) and _CARRY[1] in one for one in output)


def _is_entry(row: Mapping[str, Any]) -> bool:
    return "model_call_id" in row and all(name in row for name in _CARRY)


SHAPES: Final = (
    Shape("nemo-gym", "a rollout with response items", _has_items, _responses),
    Shape("nemo-gym", "captured calls, one a line", _is_entry, _entries, named_by("rollout_id")),
)
