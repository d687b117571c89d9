"""Samples: rows for a trainer, and how to cut those that are too long."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..settings import as_float32, choose, is_integer, items, whole
from ..showing import ShowsItself
from ..tokens.ids import segments
from ..tokens.kinds import Kind, Part
from ..tokens.table import TokenTable
from ..trajectory.channels import Channel
from ..trajectory.turns import LogprobKind, VersionSpan

if TYPE_CHECKING:
    from ..rendering.rendered import RenderedTokens

IGNORE = -100


class CompletionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` of a completion, and how they were sampled."""

    start: int
    stop: int
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    temperature: float | None = None
    """None, here and below, if it was not recorded."""
    top_p: float | None = None
    top_k: int | None = None
    """0 means all tokens."""
    cached_tokens: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


Span = TypeVar("Span", VersionSpan, CompletionSpan)


@dataclass(frozen=True, slots=True, eq=False)
class Sample(ShowsItself, TokenTable):
    """One row: a table of tokens and its metadata. ``ids, mask = sample`` gives two lists."""

    reward: float | None = None
    versions: tuple[VersionSpan, ...] = ()
    completions: tuple[CompletionSpan, ...] = ()
    """Empty for rows of conversations."""
    channels: Mapping[str, Channel] = field(default_factory=dict)
    name: str = ""
    """Where it comes from: the name of a trajectory, the file of a conversation."""
    branch: int = -1
    """The branch of the trajectory; -1 if there is none."""
    notes: tuple[str, ...] = ()
    """What to know before training on it."""
    warnings: tuple[Warning, ...] = ()
    """The notes that `build_supervised_sample` gives as warnings, too."""
    rendered: RenderedTokens | None = None
    """Its rendering, if a `SampleBuilder` made it; without the stop token that it added."""
    offset: int = 0
    """The token of `rendered` that the row begins with."""

    def __post_init__(self) -> None:
        TokenTable.__post_init__(self)
        if callable(self.notes):
            self._defer("notes", self.notes)
        if self.reward is not None and as_float32(self.reward) is None:
            raise SampleError(f"reward must be a finite number (float32) or None, not {brief(self.reward)}")
        for name, kind in (("versions", VersionSpan), ("completions", CompletionSpan)):
            spans = getattr(self, name)
            if not isinstance(spans, tuple) or not all(isinstance(span, kind) for span in spans):
                raise SampleError(f"{name} must be a tuple of {kind.__name__}, not {brief(spans)}")
            for span in spans:
                self._check_range(span.start, span.stop, name)
        channels, count = self.channels, len(self)
        if not isinstance(channels, Mapping) or not all(
            isinstance(channel, Channel) and len(channel) == count for channel in channels.values()
        ):
            raise SampleError(f"channels must be Channels of {count} tokens by name, not {brief(channels)}")

    def _check_range(self, start: Any, stop: Any, what: str) -> None:
        if not (is_integer(start) and is_integer(stop) and 0 <= start <= stop <= len(self)):
            raise SampleError(
                f"{what}: {brief(start)}..{brief(stop)} is not a range of the {len(self)} tokens"
            )

    @property
    def token_ids(self) -> list[int]:
        return cast(list[int], self.ids.tolist())

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token carries loss, else 0."""
        return cast(list[int], self.mask.astype(np.int8).tolist())

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The ids where they carry loss, -100 elsewhere. Not shifted: models do that themselves."""
        return np.where(self.mask, self.ids, IGNORE).astype(np.int64)

    @property
    def trained(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def trained_messages(self) -> list[int]:
        return cast(list[int], np.unique(self.messages[self.mask & (self.messages >= 0)]).tolist())

    def slice(self, start: int, stop: int) -> Sample:
        """The tokens `start` to `stop` as a new sample."""
        self._check_range(start, stop, "slice")
        return dataclasses.replace(
            self,
            **{name: column[start:stop] for name, column in self.columns().items()},
            versions=_cut(self.versions, start, stop),
            completions=_cut(self.completions, start, stop),
            channels={name: channel.slice(start, stop) for name, channel in self.channels.items()},
            offset=self.offset + start,
        )

    def replace(self, **changes: Any) -> Sample:
        """A copy with some fields changed. Raises SampleError for an unknown field."""
        fields = [field.name for field in dataclasses.fields(self) if field.init]
        if unknown := [name for name in changes if name not in fields]:
            raise SampleError(f"a sample has no {unknown[0]!r}; it has {', '.join(fields)}")
        return dataclasses.replace(self, **changes)

    def __iter__(self) -> Iterator[list[int]]:
        yield self.token_ids
        yield self.loss_mask

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        return f"Sample({label}{len(self.ids)} tokens, {self.trained} trained)"


def as_samples(samples: Any) -> list[Sample]:
    """A list of samples. Raises SampleError if it is empty or has anything else."""
    if isinstance(samples, Sample | np.ndarray) or not isinstance(samples, Iterable):
        raise SampleError(f"samples must be a list of samples, not {brief(samples)}")
    checked = items("samples", samples, SampleError)
    for number, sample in enumerate(checked):
        if not isinstance(sample, Sample):
            raise SampleError(f"samples[{number}] must be a Sample, not {brief(sample)}")
    if not checked:
        raise SampleError("there are no samples")
    return checked


def _cut(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    moved = ((span, max(span.start, start) - start, min(span.stop, stop) - start) for span in spans)
    return tuple(span._replace(start=first, stop=last) for span, first, last in moved if first < last)


class Overlong(StrEnum):
    """What to do with a sample that is too long."""

    ERROR = "error"
    DROP = "drop"
    TURNS = "turns"
    """Keep the whole messages that fit, from the beginning."""
    RIGHT = "right"
    """Keep the start. The cut may be inside a message, not inside scaffold."""
    LEFT = "left"
    """Keep the whole messages that fit, from the end."""


@dataclass(frozen=True, slots=True)
class Truncated:
    """A sample that fits, or the `reason` why it is left out, and how many tokens were `cut`."""

    sample: Sample | None
    reason: str | None = None
    cut: int = 0


@dataclass(slots=True)
class _Extent:
    """Where a message's header starts, where its tokens end, and where its close ends."""

    start: int
    end: int
    stop: int
    number: int


def truncate(sample: Sample, length: int, policy: Overlong | str) -> Truncated:
    """Make a sample fit into `length` tokens.

    Of a longer sample, keeps a run of tokens and adds a note. Tokens outside messages go with a
    message: the generation prompt or header with the next, the close with the one before.
    ``right`` moves the cut back if it would fall inside scaffold or a synthetic close, or leave
    only a message's scaffold. ``left`` cuts off what is before all messages (a BOS token,
    tools). A sample without a trained token or a whole message is left out.
    """
    if not isinstance(sample, Sample):
        raise SampleError(f"truncate takes a Sample, not {brief(sample)}")
    policy = choose(Overlong, "policy", policy, SampleError)
    length = whole("length", length, least=1, error=SampleError)
    count = len(sample)
    if count <= length:
        return Truncated(sample)
    problem = f"has {count} tokens, but only {length} are allowed"
    if policy is Overlong.ERROR:
        label = f"sample {sample.name!r}" if sample.name else "the sample"
        raise SampleError(f"{label} {problem}: cut it with another policy, or leave it out")
    if policy is Overlong.DROP:
        return Truncated(None, f"it {problem}", count)
    start, stop = _range(sample, length, policy)
    if start == stop:
        what = "no token is left within" if policy is Overlong.RIGHT else "no whole message fits into"
        return Truncated(None, f"{what} {length} tokens", count)
    if sample.mask.any() and not sample.mask[start + 1 : stop].any():  # the first token never trains
        return Truncated(None, f"nothing that carries loss is left within {length} tokens", count)
    end = "first" if start == 0 else "last"
    note = f"cut to the {end} {stop - start} of {count} tokens ({policy})"
    cut = sample.slice(start, stop)
    return Truncated(cut.replace(notes=(*cut.notes, note)), None, count - (stop - start))


def _range(sample: Sample, length: int, policy: Overlong) -> tuple[int, int]:
    messages = _messages(sample)
    count = len(sample)
    if policy is Overlong.RIGHT:
        return 0, _cut_right(sample, messages, length)
    if policy is Overlong.TURNS:
        fitting = [message for message in messages if message.end <= length]
        if not fitting:
            return 0, 0
        # its close goes with it, or is cut off where it does not fit: it carries no loss
        last = fitting[-1]
        return 0, last.stop if last.stop <= length else last.end
    # a sampled token's generation prompt is in the message before
    opened = sample.mask | (sample.kinds == Kind.SAMPLED)
    starts = (message.start for message in messages if not opened[message.start])
    start = next((start for start in starts if start >= count - length), None)
    return (0, 0) if start is None else (start, count)


def _cut_right(sample: Sample, messages: list[_Extent], length: int) -> int:
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


def _messages(sample: Sample) -> list[_Extent]:
    """The messages in order: each run of one number."""
    scaffold = sample.kinds == Kind.SCAFFOLD
    if sample.parts is not None:
        scaffold |= sample.parts == Part.SCAFFOLD
    extents: list[_Extent] = []
    loose: int | None = None
    for start, stop in segments(sample.messages):
        number = int(sample.messages[start])
        if number < 0:
            loose = start
            continue
        begin = start
        if not extents:
            begin = 0
        elif loose is not None:
            if extents[-1].number == number:  # a turn that was resumed
                extents[-1].end = extents[-1].stop = stop
                loose = None
                continue
            begin = start if scaffold[start] else _after_close(sample, loose, start)
            extents[-1].stop = begin
        extents.append(_Extent(begin, stop, stop, number))
        loose = None
    if extents and loose is not None:
        extents[-1].stop = _after_close(sample, loose, len(sample))
    return extents


def _after_close(sample: Sample, start: int, stop: int) -> int:
    closing = sample.kinds[start:stop] == Kind.SYNTHETIC
    return stop if closing.all() else start + int(closing.argmin())
