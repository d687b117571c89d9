"""TRL: turn records of asynchronous GRPO, its rows (``RolloutSample``), and what a ``rollout_func`` returns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ...errors import InputError
from .calls import DumpedRollout, DumpedRow
from .fields import CallFields, Fields, read_call, read_request
from .rows import RowArrays, read_row
from .shape import Shape, first_of, line_name, named_by

_TURN: Final = CallFields("prompt_ids", "output_ids", ("output_log_probs",), ("output_mask",))
_NAMES: Final = ("rollout_id", "name", "id")
_SAMPLES: Final = ("samples", "sequences")
"""What a line may call the rows beside its turns."""


def _turns(fields: Fields) -> Iterable[DumpedRollout]:
    calls = [read_call(turn, _TURN, read_request(turn, reply="completion")) for turn in fields.each("turns")]
    rows: list[DumpedRow] = []
    name = fields.first(*_SAMPLES)
    for sample in fields.each(name) if name else ():
        rows += [replace(row, own_calls=False) for row in read_row(sample, _arrays(sample))[1]]
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, calls, rows)


def _turn(fields: Fields) -> Iterable[DumpedRollout]:
    call = read_call(fields, _TURN, read_request(fields, reply="completion"))
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, [call])


def _sample(fields: Fields) -> Iterable[DumpedRollout]:
    calls, rows = read_row(fields, _arrays(fields))
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, calls, rows)


def _arrays(fields: Fields) -> RowArrays:
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
        prompt, completion = one.ids("prompt_ids"), one.ids("completion_ids")
        arrays = RowArrays(
            np.concatenate([prompt, completion]), len(prompt), one.first("env_mask"), one.first("logprobs")
        )
        calls, rows = read_row(one, arrays)
        yield DumpedRollout(f"{line_name(fields)}, rollout {at}", fields.where, calls, rows)


def _has_turns(row: Mapping[str, Any]) -> bool:
    return "output_ids" in first_of(row, "turns")


def _is_batch(row: Mapping[str, Any]) -> bool:
    prompts = row.get("prompt_ids")
    if prompts == [] and row.get("completion_ids") == []:
        return named_by(*_NAMES)(row) is None  # of no rollouts; a line that has a name is a call
    return isinstance(prompts, list) and bool(prompts) and isinstance(prompts[0], list) and "completion_ids" in row


SHAPES: Final = (
    Shape("trl", "turn records of a rollout", _has_turns, _turns),
    Shape(
        "trl",
        "turn records, one a line",
        lambda row: "prompt_ids" in row and "output_ids" in row,
        _turn,
        named_by(*_NAMES),
    ),
    Shape(
        "trl",
        "rows of asynchronous GRPO",
        lambda row: "input_ids" in row and "old_log_probs" in row,
        _sample,
        named_by(*_NAMES),
    ),
    Shape("trl", "what a rollout_func returns", _is_batch, _batch),
)
