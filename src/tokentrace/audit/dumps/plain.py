"""Calls as anybody may write them: prompt and completion ids, with the rollout's name beside them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from .calls import Call, DumpedRollout
from .fields import CallFields, Fields, read_call, read_request
from .shape import Shape, first_of, line_name, named_by

_PROMPTS: Final = ("prompt_ids", "prompt_token_ids")
_COMPLETIONS: Final = ("completion_ids", "completion_token_ids", "generation_token_ids", "response_ids", "output_ids")
_LOGPROBS: Final = ("logprobs", "completion_logprobs", "log_probs")
_MASKS: Final = ("loss_mask", "completion_mask", "mask")
_LISTS: Final = ("calls", "turns", "steps")
_NAMES: Final = (
    *("rollout_id", "rollout", "session_id", "session", "trajectory_id", "conversation_id", "episode_id"),
    *("request_id", "uid", "name"),
)


def _call(fields: Fields) -> Call:
    prompt, completion = fields.first(*_PROMPTS) or _PROMPTS[0], fields.first(*_COMPLETIONS) or _COMPLETIONS[0]
    names = CallFields(prompt, completion, _LOGPROBS, _MASKS)
    return read_call(fields, names, read_request(fields, reply="reply"), fields.number("temperature"))


def _one(fields: Fields) -> Iterable[DumpedRollout]:
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, [_call(fields)])


def _several(fields: Fields) -> Iterable[DumpedRollout]:
    name = fields.first(*_LISTS)
    assert name is not None
    yield DumpedRollout(
        fields.text(*_NAMES) or line_name(fields), fields.where, [_call(one) for one in fields.each(name)]
    )


def _is_call(row: Mapping[str, Any]) -> bool:
    return any(name in row for name in _PROMPTS) and any(name in row for name in _COMPLETIONS)


def _has_calls(row: Mapping[str, Any]) -> bool:
    return _is_call(first_of(row, *_LISTS))


SHAPES: Final = (
    Shape("calls", "calls of a rollout", _has_calls, _several),
    Shape("calls", "calls, one a line", _is_call, _one, named_by(*_NAMES)),
)
