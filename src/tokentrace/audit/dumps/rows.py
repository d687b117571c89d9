"""Training rows: ids and what is trained of them. What was sampled at once is told by the row, or by its mask."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ...data.check.columns import LABELS
from ...errors import InputError, shown
from ...samples.sample import IGNORE
from ...tokens.ids import check_integers, runs
from ...tokens.kinds import Kind
from ...tokens.tokenizer import Ids
from ...tokens.visible import counted
from .calls import Call, DumpedRequest, DumpedRow, DumpFault, FoundFault, Mask
from .fields import Checked, Fields, logprob_findings, read_mask


class RowArrays(NamedTuple):
    """A row as it was put together: `first` is where its response begins, which mask and logprobs may be of."""

    ids: Ids
    first: int
    mask: str | None
    logprobs: str | None


def read_row(fields: Fields, row: RowArrays) -> tuple[list[Call], list[DumpedRow]]:
    """The calls that a row was made of, and the row itself."""
    ids, count = row.ids, len(row.ids) - row.first
    mask, wrong = _mask(fields, row, count)
    spans, sampled = _spans(fields, ids, mask)
    findings = list(wrong)
    if sampled is not None and len(sampled) != len(ids):
        raise InputError(f"has {len(sampled):,} entries, and there are {len(ids):,} ids", field=fields.named("kinds"))
    values = _logprobs(fields, row, mask, findings)
    calls = []
    for start, stop in spans:
        own: list[FoundFault] = []
        if values is not None:
            own = list(logprob_findings(values[start:stop], fields.place(row.logprobs or "")))
        logprobs = None if values is None else values[start:stop]
        calls.append(
            Call(
                ids[:stop], start, fields.place(), logprobs, None, _request(fields), _cause(fields), findings=tuple(own)
            )
        )
    return calls, [DumpedRow(ids, mask, fields.place(), sampled, tuple(findings))]


def _mask(fields: Fields, row: RowArrays, count: int) -> tuple[Mask, tuple[FoundFault, ...]]:
    """What is trained, by the mask or else by labels; where there are both, they are to say the same."""
    checked = read_mask(fields, row.mask, count, row.first)
    if fields.has(LABELS):
        labels = _labelled(fields, row.ids)
        found = (*checked.findings, *labels.findings, *_disagreeing(fields, checked.array, labels.array))
        checked = Checked(labels.array if checked.array is None else checked.array, found)
    if checked.array is not None:
        return checked.array, checked.findings
    if checked.findings:  # nobody knows what is trained
        return np.zeros(len(row.ids), np.bool_), checked.findings
    everything = np.arange(len(row.ids)) >= row.first
    return everything, ()


def _labelled(fields: Fields, ids: Ids) -> Checked:
    """What labels train: the tokens that they stand at, which they are to be."""
    labels, where = check_integers(fields.value[LABELS], fields.named(LABELS)), fields.place(LABELS)
    if len(labels) != len(ids):
        said = f"{len(labels):,} labels for {len(ids):,} tokens"
        return Checked(None, (FoundFault(DumpFault.MASK_LENGTH, where, said, len(labels)),))
    mask = labels != IGNORE
    wrong = mask & (labels != ids)
    if not wrong.any():
        return Checked(mask, ())
    at = int(wrong.argmax())
    said = f"the first is label {at:,}: {labels[at]}, and the token there is {ids[at]}"
    return Checked(mask, (FoundFault(DumpFault.LABELS_OTHER, where, said, int(wrong.sum())),))


def _disagreeing(fields: Fields, mask: Mask | None, labels: Mask | None) -> Iterator[FoundFault]:
    """Tokens that labels train and the mask does not, or the other way round: a trainer reads one of the two."""
    if mask is None or labels is None or not (mask != labels).any():
        return
    wrong = mask != labels
    at = int(wrong.argmax())
    who = "labels train it, and the mask does not" if labels[at] else "the mask trains it, and labels do not"
    yield FoundFault(DumpFault.LABELS_MASK, fields.place(LABELS), f"the first is token {at:,}: {who}", int(wrong.sum()))


def _spans(fields: Fields, ids: Ids, mask: Mask) -> tuple[list[tuple[int, int]], Mask | None]:
    """What was sampled at once, of that which the row trains; and which tokens were sampled, where the row tells."""
    if fields.has("kinds"):
        sampled = check_integers(fields.value["kinds"], fields.named("kinds")) == Kind.SAMPLED
    else:
        sampled = None
    if fields.has("completions"):
        spans = [_span(one, len(ids)) for one in fields.each("completions")]
        if sampled is None:
            sampled = np.zeros(len(ids), np.bool_)
            for start, stop in spans:
                sampled[start:stop] = True
        return [(start, stop) for start, stop in spans if mask[start:stop].any()], sampled
    return runs(mask), sampled


def _span(fields: Fields, count: int) -> tuple[int, int]:
    """Where a completion begins and ends in a row of so many tokens."""
    start, stop = fields.value.get("start"), fields.value.get("stop")
    if type(start) is not int or type(stop) is not int or not 0 <= start <= stop <= count:
        said = f"is from {shown(start)} to {shown(stop)}: no stretch of a row of {count:,} tokens"
        raise InputError(said, field=fields.path)
    return start, stop


def _logprobs(fields: Fields, row: RowArrays, mask: Mask, findings: list[FoundFault]) -> Any:
    """The logprobs over the whole row, NaN where there is none."""
    trained = int(mask.sum())
    if row.logprobs is None or not fields.has(row.logprobs):
        if trained:
            findings.append(FoundFault(DumpFault.NO_LOGPROBS, fields.place(), f"{counted(trained)} trained", trained))
        return None
    where, given = fields.place(row.logprobs), fields.floats(row.logprobs)
    total, response = len(row.ids), len(row.ids) - row.first
    if len(given) not in (total, response, trained):
        said = f"{len(given):,} logprobs for {total:,} tokens, {trained:,} of them trained"
        findings.append(FoundFault(DumpFault.LOGPROBS_LENGTH, where, said, trained))
        return None
    values = np.full(total, np.nan)
    if len(given) in (total, response):
        values[total - len(given) :] = given
    else:
        values[mask] = given
    return values


def _request(fields: Fields) -> DumpedRequest | None:
    """The conversation of a row, which is that of its last call."""
    messages, tools = (_parsed(fields.value.get(name)) for name in ("messages", "tools"))
    return DumpedRequest(messages, tools) if isinstance(messages, list) and "cause" not in fields.value else None


def _parsed(value: Any) -> Any:
    """A list of mappings, or JSON text of one."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) and all(isinstance(one, Mapping) for one in found) else None


def _cause(fields: Fields) -> str:
    """Why the exported row of a session is a branch."""
    said = [fields.value.get(name) for name in ("cause", "cause_detail")]
    return ": ".join(one for one in said if isinstance(one, str) and one)
