"""Samples that are too long: refused, left out, or cut where that does no harm."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..settings import choose, whole
from ..tokens.ids import segments
from ..tokens.kinds import Kind, Part
from .sample import Sample


class Overlong(StrEnum):
    """What to do with a sample that is too long."""

    ERROR = "error"
    """It is refused with `SampleError`."""
    DROP = "drop"
    """It is left out."""
    TURNS = "turns"
    """It keeps the messages from the beginning that fit whole."""
    RIGHT = "right"
    """It keeps tokens from the beginning; the cut may fall inside a message, never inside the template's own tokens."""
    LEFT = "left"
    """It keeps the messages at the end that fit whole."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A sample that fits, or why it is left out."""

    sample: Sample | None
    """None where it is left out."""
    reason: str | None = None
    """Why it is left out; None where it is not."""
    cut: int = 0
    """How many tokens were removed."""


@dataclass(slots=True)
class _MessagePlace:
    """The place of a message: where its header starts, where its own tokens end, and where its close ends."""

    start: int
    end: int
    stop: int
    number: int


def truncate(sample: Sample, length: int, policy: Overlong | str) -> Truncated:
    """Make a sample fit into `length` tokens. One that fits is returned as it is, the same object.

    Of another, a run of its tokens is kept, with a note. Tokens of no message go with the message they belong to: the
    generation prompt or header before it, the close after it. ``right`` moves the cut back where it would fall inside
    a run of scaffold or of a synthetic close within one message, or leave only the scaffold of a message. With
    ``left``, what comes before all messages (a BOS token, tools) is lost. A sample is left out with a reason if all its
    trained tokens would be cut off, or if no whole message fits.
    """
    if not isinstance(sample, Sample):
        raise SampleError(f"truncate takes a Sample, not {brief(sample)}")
    policy = choose(Overlong, "policy", policy, SampleError)
    length = whole("length", length, least=1, error=SampleError)
    count = len(sample)
    if count <= length:
        return Truncated(sample)
    if policy is Overlong.ERROR:
        label = f"sample {sample.name!r}" if sample.name else "the sample"
        raise SampleError(
            f"{label} has {count} tokens, and {length} are allowed: cut it with another policy, or leave it out"
        )
    if policy is Overlong.DROP:
        return Truncated(None, f"it has {count} tokens, and {length} are allowed", count)
    start, stop = _range(sample, length, policy)
    if start == stop:
        what = "no token is left within" if policy is Overlong.RIGHT else "no whole message fits into"
        return Truncated(None, f"{what} {length} tokens", count)
    if sample.mask.any() and not sample.mask[start + 1 : stop].any():  # nothing precedes the first: it never trains
        return Truncated(None, f"nothing that carries loss is left within {length} tokens", count)
    end = "first" if start == 0 else "last"
    note = f"cut to the {end} {stop - start} of {count} tokens ({policy})"
    cut = sample.slice(start, stop)
    return Truncated(cut.replace(notes=(*cut.notes, note)), None, count - (stop - start))


def _range(sample: Sample, length: int, policy: Overlong) -> tuple[int, int]:
    """The range of tokens to keep; empty where nothing fits."""
    messages = _messages(sample)
    count = len(sample)
    if policy is Overlong.RIGHT:
        return 0, _cut_right(sample, messages, length)
    if policy is Overlong.TURNS:
        fitting = [message for message in messages if message.end <= length]
        if not fitting:
            return 0, 0
        last = fitting[-1]  # its close goes with it, or is cut off where it does not fit: it carries no loss
        return 0, last.stop if last.stop <= length else last.end
    # The generation prompt of a sampled token is in the message before: the cut would remove the speaker's name.
    opened = sample.mask | (sample.kinds == Kind.SAMPLED)
    starts = [message.start for message in messages if message.start >= count - length and not opened[message.start]]
    return (starts[0], count) if starts else (0, 0)


def _cut_right(sample: Sample, messages: list[_MessagePlace], length: int) -> int:
    """The last good place for a cut, at `length` or before it."""
    borders = {0, *(at for message in messages for at in (message.start, message.stop))}
    scaffold = [sample.kinds == Kind.SCAFFOLD, sample.kinds == Kind.SYNTHETIC]
    if sample.parts is not None:
        scaffold.append(sample.parts == Part.SCAFFOLD)

    def inside(cut: int) -> bool:
        return cut not in borders and any(run[cut - 1] and run[cut] for run in scaffold)

    cut = length
    while inside(cut):
        cut -= 1
    border = max(at for at in borders if at <= cut)
    empty = np.logical_or.reduce([run[border:cut] for run in scaffold]) & ~sample.mask[border:cut]
    return border if empty.all() else cut


def _messages(sample: Sample) -> list[_MessagePlace]:
    """The messages of a sample, in order: each run of one number, with the tokens of no message that go with it."""
    scaffold = _scaffold(sample)
    places: list[_MessagePlace] = []
    loose: int | None = None
    for start, stop in segments(sample.messages):
        number = int(sample.messages[start])
        if number < 0:
            loose = start
            continue
        begin = start
        if not places:
            begin = 0
        elif loose is not None:
            if places[-1].number == number:  # a turn that was resumed
                places[-1].end = places[-1].stop = stop
                loose = None
                continue
            begin = start if scaffold[start] else _after_close(sample, loose, start)
            places[-1].stop = begin
        places.append(_MessagePlace(begin, stop, stop, number))
        loose = None
    if places and loose is not None:
        places[-1].stop = _after_close(sample, loose, len(sample))
    return places


def _after_close(sample: Sample, start: int, stop: int) -> int:
    """Where the synthetic close that begins at `start` ends."""
    closing = sample.kinds[start:stop] == Kind.SYNTHETIC
    return stop if closing.all() else start + int(closing.argmin())


def _scaffold(sample: Sample) -> npt.NDArray[np.bool_]:
    scaffold: npt.NDArray[np.bool_] = sample.kinds == Kind.SCAFFOLD
    return scaffold if sample.parts is None else scaffold | (sample.parts == Part.SCAFFOLD)
