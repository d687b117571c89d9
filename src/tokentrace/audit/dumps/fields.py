"""The fields of a dump, checked: errors name the field, and who reads the file adds the line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...conversation.place import is_list
from ...errors import InputError, shown
from ...tokens.ids import check_ids
from ...tokens.tokenizer import Ids
from ...tokens.visible import counted
from ...trajectory.inputs import POSITIVE_NOISE
from .calls import Call, DumpedRequest, DumpFault, Floats, FoundFault, Mask


@dataclass(frozen=True, slots=True)
class Fields:
    """An object of a dump. `where` is its line, `path` what it is called there."""

    value: Mapping[str, Any]
    where: str
    path: str = ""

    def named(self, name: str) -> str:
        """What one of its fields is called from the top of the line."""
        return f"{self.path}.{name}" if self.path else name

    def place(self, name: str = "") -> str:
        """Where one of its fields is, for people."""
        field = self.named(name) if name else self.path
        return f"{self.where}, {field}" if field else self.where

    def has(self, *names: str) -> bool:
        """Whether it has all of these, and something in each."""
        return all(self.value.get(name) is not None for name in names)

    def first(self, *names: str) -> str | None:
        """The first of these that it has."""
        return next((name for name in names if self.value.get(name) is not None), None)

    def text(self, *names: str) -> str | None:
        """The first of these that it has, as text; numbers and the like are written out."""
        name = self.first(*names)
        if name is None:
            return None
        found = self.value[name]
        if isinstance(found, (Mapping, list)):
            raise InputError(f"must be text or a number, not {shown(found)}", field=self.named(name))
        return str(found)

    def number(self, name: str) -> float | None:
        found = self.value.get(name)
        if not isinstance(found, (int, float)) or isinstance(found, bool):
            return None
        try:
            return float(found)
        except OverflowError:
            raise InputError(f"is {shown(found)}, too large for a number", field=self.named(name)) from None

    def at(self, name: str) -> Fields:
        """A field that is an object itself; an empty one where it is not there."""
        found = self.value.get(name)
        if found is None:
            found = {}
        if not isinstance(found, Mapping):
            raise InputError(f"must be an object, not {shown(found)}", field=self.named(name))
        return Fields(found, self.where, self.named(name))

    def each(self, name: str) -> Iterator[Fields]:
        """The objects of a field that is a list of them."""
        for at, found in enumerate(self.listed(name)):
            path = f"{self.named(name)}[{at}]"
            if not isinstance(found, Mapping):
                raise InputError(f"must be an object, not {shown(found)}", field=path)
            yield Fields(found, self.where, path)

    def some(self, name: str | None) -> Iterator[Fields]:
        """The same of a field that may not be there."""
        return self.each(name) if name is not None and self.has(name) else iter(())

    def listed(self, name: str) -> Sequence[Any]:
        found: Any = self.value.get(name)
        if not is_list(found):
            raise InputError(f"must be a list, not {shown(found)}", field=self.named(name))
        listed: Sequence[Any] = found
        return listed

    def ids(self, name: str) -> Ids:
        if self.value.get(name) is None:
            raise InputError("is missing", field=self.named(name))
        return check_ids(self.value[name], self.named(name))

    def floats(self, name: str) -> Floats:
        """A list of numbers, NaN where there is none."""
        try:
            values = np.asarray(self.listed(name), np.float64)  # which makes NaN of None
        except (TypeError, ValueError, OverflowError):
            values = np.zeros((0, 0))
        if values.ndim != 1:
            raise InputError("must be one list of numbers", field=self.named(name))
        return values

    def messages(self, name: str) -> list[Mapping[str, Any]] | None:
        """A list of messages; None where it is not there or is none."""
        found: Any = self.value.get(name)
        return list(found) if is_list(found) and all(isinstance(one, Mapping) for one in found) else None


# -- numbers beside ids


class Checked(NamedTuple):
    """An array that fits the tokens, or None and what is wrong with it."""

    array: Any
    findings: tuple[FoundFault, ...]


def read_logprobs(fields: Fields, name: str | None, count: int) -> Checked:
    """The logprobs of so many sampled tokens: one for each, finite, at most 0."""
    where = fields.place(name or "")
    if not count:
        return Checked(None, ())
    if name is None or fields.value.get(name) is None or not len(fields.listed(name)):
        return Checked(None, (FoundFault(DumpFault.NO_LOGPROBS, where, f"{counted(count)} sampled", count),))
    values = fields.floats(name)
    if len(values) != count:
        said = f"{len(values):,} logprobs for {count:,} sampled tokens"
        return Checked(None, (FoundFault(DumpFault.LOGPROBS_LENGTH, where, said, count),))
    return Checked(values, tuple(logprob_findings(values, where)))


def logprob_findings(values: Floats, where: str) -> Iterator[FoundFault]:
    """What is wrong with the logprobs of one completion."""
    if len(values) and -np.inf < values.min() and values.max() <= POSITIVE_NOISE and values.any():
        return
    odd = ~np.isfinite(values)
    if odd.any():
        at = int(odd.argmax())
        yield FoundFault(DumpFault.LOGPROB_VALUE, where, f"token {at} of the completion: {values[at]}", int(odd.sum()))
    above = values > POSITIVE_NOISE
    if above.any():
        at = int(above.argmax())
        yield FoundFault(
            DumpFault.LOGPROB_POSITIVE, where, f"token {at} of the completion: {values[at]:g}", int(above.sum())
        )
    if len(values) >= 4 and not values.any():
        yield FoundFault(DumpFault.LOGPROBS_ZERO, where, f"all {len(values):,} of a completion", len(values))


def read_mask(fields: Fields, name: str | None, count: int, before: int = 0) -> Checked:
    """What is trained of a call: a mask of its `count` sampled tokens, or of the `before` of its prompt and these."""
    if name is None or fields.value.get(name) is None:
        return Checked(None, ())
    where, given = fields.place(name), fields.listed(name)
    if len(given) not in (count, before + count):
        said = f"{len(given):,} entries for {counted(before + count)}"
        said += f", {count:,} of them sampled" if before else ""
        return Checked(None, (FoundFault(DumpFault.MASK_LENGTH, where, said, len(given)),))
    wrong = next((at for at, one in enumerate(given) if one not in (0, 1)), None)
    if wrong is not None:
        return Checked(None, (FoundFault(DumpFault.MASK_VALUE, where, f"entry {wrong} is {shown(given[wrong])}", 1),))
    mask: Mask = np.zeros(before + count, np.bool_)
    mask[before + count - len(given) :] = np.asarray(given, np.bool_)
    return Checked(mask, ())


class CallFields(NamedTuple):
    """What a dump calls the parts of a call; the first of several names that is there counts."""

    prompt: str
    completion: str
    logprobs: tuple[str, ...] = ()
    mask: tuple[str, ...] = ()


def read_call(fields: Fields, names: CallFields, request: DumpedRequest | None = None, temperature: Any = None) -> Call:
    """A call that is an object with its prompt and its completion."""
    prompt, completion = fields.ids(names.prompt), fields.ids(names.completion)
    logprobs = read_logprobs(fields, fields.first(*names.logprobs), len(completion))
    mask = read_mask(fields, fields.first(*names.mask), len(completion), len(prompt))
    return Call(
        np.concatenate([prompt, completion]),
        len(prompt),
        fields.place(),
        logprobs.array,
        mask.array,
        request,
        temperature=temperature,
        findings=(*logprobs.findings, *mask.findings),
    )


def read_request(fields: Fields, reply: Any = None) -> DumpedRequest | None:
    """The messages and tools beside a call, where there are any."""
    return request_of(fields.messages("messages"), fields.messages("tools"), reply)


def request_of(
    messages: Sequence[Mapping[str, Any]] | None, tools: Sequence[Mapping[str, Any]] | None, reply: Any
) -> DumpedRequest | None:
    """What a call was asked, and what it answered; None where its messages are not known."""
    return None if messages is None else DumpedRequest(messages, tools, reply if isinstance(reply, Mapping) else None)
