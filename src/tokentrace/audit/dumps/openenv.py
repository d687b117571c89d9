"""OpenEnv: documents of a captured session (``sequences``), training traces, and trace entries, one a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any, Final

from ...tokens.ids import runs
from .calls import Call, DumpedRollout, DumpedRow, Fault, Finding, Request
from .fields import CallFields, Fields, read_call
from .rows import RowArrays, read_row
from .shape import Shape, first_of, line_name, named_by

_CALL: Final = CallFields("prompt_token_ids", "completion_token_ids", ("per_token_logps", "logprobs"), ("loss_mask",))
_NAMES: Final = ("session_id", "rollout_id", "episode_id")


def _document(fields: Fields) -> Iterable[DumpedRollout]:
    calls: list[Call] = []
    rows: list[DumpedRow] = []
    turns = {turn.text("node_id"): turn for turn in fields.each("turns")} if fields.has("turns") else {}
    for sequence in fields.each("sequences"):
        arrays = RowArrays(sequence.ids("input_ids"), 0, "loss_mask", "logprobs")
        made, own = read_row(sequence, arrays)
        nodes = sequence.listed("node_ids") if sequence.has("node_ids") else []
        known = [turns.get(str(node)) for node in nodes] if len(nodes) == len(made) else [None] * len(made)
        calls += [_told(call, turn) for call, turn in zip(made, known, strict=True)]
        rows += [_counted(sequence, row) for row in own]
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, calls, rows)


def _told(call: Call, turn: Fields | None) -> Call:
    """A call with what its turn says of it."""
    if turn is None:
        return call
    messages = turn.messages("request_messages")
    reply = turn.value.get("response_message")
    request = None
    if messages is not None:
        request = Request(messages, turn.messages("request_tools"), reply if isinstance(reply, Mapping) else None)
    temperature = turn.at("sampling_params").number("temperature")
    return Call(call.stream, call.start, call.where, call.logprobs, None, request, "", temperature, call.findings)


def _counted(sequence: Fields, row: DumpedRow) -> DumpedRow:
    """A row whose mask is compared with how many tokens its turns sampled."""
    if not sequence.has("turn_lengths"):
        return row
    told = sequence.ids("turn_lengths").tolist()
    trained = [stop - start for start, stop in runs(row.mask)]
    if not trained or _made_of(trained, told):
        return row
    more = sum(trained) - sum(told)
    fault = Fault.TRAINED_UNSAMPLED if more > 0 else Fault.SAMPLED_UNTRAINED
    said = f"the mask has stretches of {trained} tokens, and turn_lengths says that {told} were sampled"
    finding = Finding(
        fault, sequence.place("loss_mask"), said[:300], abs(more) or 1
    )  # as many, elsewhere: at least one
    return DumpedRow(row.ids, row.mask, row.where, row.sampled, (*row.findings, finding))


def _made_of(stretches: list[int], turns: list[int]) -> bool:
    """Whether stretches of a mask are these turns: those that follow one another without a token between are one."""
    ends = set(accumulate(turns))
    return sum(stretches) == sum(turns) and ends.issuperset(accumulate(stretches))


def _entry(fields: Fields) -> Iterable[DumpedRollout]:
    yield DumpedRollout(_entry_key(fields.value) or line_name(fields), fields.where, [_call(fields)])


def _trace(fields: Fields) -> Iterable[DumpedRollout]:
    name = fields.first("turns", "entries", "trace")
    assert name is not None
    calls = [_call(turn) for turn in fields.each(name)]
    yield DumpedRollout(fields.text(*_NAMES) or line_name(fields), fields.where, calls)


def _call(fields: Fields) -> Call:
    asked, metadata = fields.at("request"), fields.at("metadata")
    messages = asked.messages("messages")
    request = None
    if messages is not None:
        choices = list(fields.at("response").each("choices")) if fields.at("response").has("choices") else []
        reply = choices[0].value.get("message") if choices else None
        request = Request(messages, asked.messages("tools"), reply if isinstance(reply, Mapping) else None)
    return read_call(fields, _CALL, request, metadata.at("sampling_params").number("temperature"))


def _entry_key(row: Mapping[str, Any]) -> str | None:
    metadata = row.get("metadata")
    own = named_by(*_NAMES)(row)
    return own or (named_by(*_NAMES)(metadata) if isinstance(metadata, Mapping) else None)


def _is_entry(row: Mapping[str, Any]) -> bool:
    return "prompt_token_ids" in row and "completion_token_ids" in row


def _is_trace(row: Mapping[str, Any]) -> bool:
    return _is_entry(first_of(row, "turns", "entries", "trace"))


SHAPES: Final = (
    Shape("openenv", "documents of captured sessions", lambda row: isinstance(row.get("sequences"), list), _document),
    Shape("openenv", "training traces", _is_trace, _trace),
    Shape("openenv", "trace entries, one a line", _is_entry, _entry, _entry_key, one_file=True),
)
