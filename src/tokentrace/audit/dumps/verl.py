"""verl: outputs of agent loops (``AgentLoopOutput``), and the calls of their server, one a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np

from ...errors import InputError
from .calls import DumpedRollout
from .fields import CallFields, Fields, read_call, read_request
from .rows import RowArrays, read_row
from .shape import Shape, line_name, named_by

_CALL: Final = CallFields("prompt_ids", "token_ids", ("log_probs",))
_NAMES: Final = ("request_id", "rollout_id", "trajectory_id")


def _output(fields: Fields) -> Iterable[DumpedRollout]:
    prompt, response = fields.ids("prompt_ids"), fields.ids("response_ids")
    ids = np.concatenate([prompt, response])
    logprobs = fields.first("response_logprobs", "rollout_log_probs")
    calls, rows = read_row(fields, RowArrays(ids, len(prompt), fields.first("response_mask"), logprobs))
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, calls, rows)


def _call(fields: Fields) -> Iterable[DumpedRollout]:
    call = read_call(fields, _CALL, read_request(fields))
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, [call])


def _traced(fields: Fields) -> Iterable[DumpedRollout]:
    """A call as verl's tracing shows it: ``inputs`` and ``output``."""
    asked = fields.at("inputs")
    merged = Fields({**asked.value, **fields.at("output").value}, fields.where)
    yield from _call(merged)


def _texts(fields: Fields) -> Iterable[DumpedRollout]:
    raise InputError(
        "this is verl's dump of decoded text (trainer.rollout_data_dir): it has no ids, and text that is encoded again "
        "says nothing of what was sampled; dump what the agent loop returns (prompt_ids, response_ids, response_mask)",
        field="output",
    )


def _traced_key(row: Mapping[str, Any]) -> str | None:
    asked = row.get("inputs")
    return named_by(*_NAMES)(asked) if isinstance(asked, Mapping) else None


def _is_traced(row: Mapping[str, Any]) -> bool:
    asked, answered = row.get("inputs"), row.get("output")
    return (
        isinstance(asked, Mapping)
        and isinstance(answered, Mapping)
        and "prompt_ids" in asked
        and "token_ids" in answered
    )


def _is_text(row: Mapping[str, Any]) -> bool:
    return isinstance(row.get("input"), str) and isinstance(row.get("output"), str) and "score" in row


SHAPES: Final = (
    Shape(
        "verl",
        "outputs of an agent loop",
        lambda row: "prompt_ids" in row and "response_ids" in row,
        _output,
        named_by(*_NAMES),
    ),
    Shape(
        "verl",
        "calls of the server, one a line",
        lambda row: "prompt_ids" in row and "token_ids" in row,
        _call,
        named_by(*_NAMES),
    ),
    Shape("verl", "traced calls of the server", _is_traced, _traced, _traced_key),
    Shape("verl", "decoded text", _is_text, _texts),
)
