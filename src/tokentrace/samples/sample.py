"""Samples: rows for a trainer, from trajectories and from conversations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, shown
from ..settings import as_float, is_number, items
from ..showing import ShowsItself
from ..tokens.kinds import Kinds
from ..tokens.tokenizer import Ids
from ..trajectory.channels import Channel
from ..trajectory.turns import LogprobKind, VersionSpan

if TYPE_CHECKING:
    from ..rendering.rendered import RenderedTokens

IGNORE: Final = -100
"""The label of a token that carries no loss."""

_PER_TOKEN: Final = ("mask", "messages", "kinds", "parts", "logprobs", "advantages")
_CODES: Final = {"ids": "iu", "mask": "b", "messages": "iu", "kinds": "iu", "parts": "iu"}
"""The kind of number that each array holds; floats by default."""
Span = TypeVar("Span", VersionSpan, "CompletionSpan")


class CompletionSpan(NamedTuple):
    """Tokens ``start`` to ``stop`` (exclusive) that an engine returned at once, and what their logprobs mean."""

    start: int
    stop: int
    logprobs_kind: LogprobKind = LogprobKind.UNKNOWN
    """Of which distribution the logprobs are."""
    temperature: float | None = None
    """None, here and below, where it was not recorded."""
    top_p: float | None = None
    top_k: int | None = None
    """0 is all tokens."""
    cached_tokens: int | None = None
    """How many ids of its prompt the engine had cached."""
    min_p: float | None = None
    """None, here and below, where it was not asked for."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class Later(NamedTuple):
    """Arrays of a row that are found when one of them is asked for: it is given in their place."""

    find: Callable[[], Mapping[str, npt.NDArray[Any]]]
    """All of them, by their names."""


@dataclass(frozen=True, slots=True, eq=False)
class Sample(ShowsItself):
    """One row: ids, which of them carry loss, and where each came from. All arrays have one entry per token.

    `logprobs` are those of the engine and NaN where nothing was sampled; `advantages` are 0 where there is no loss.
    `token_ids` and `loss_mask` are lists of the same, and ``ids, mask = sample`` unpacks into these two.
    """

    ids: Ids
    mask: npt.NDArray[np.bool_]
    """True where a token carries loss."""
    messages: npt.NDArray[np.int32]
    """The message of each token, -1 for none."""
    kinds: Kinds
    """The `Kind` of each token."""
    parts: npt.NDArray[np.uint8] | None = None
    """The `Part` of each token, where the row comes from a conversation."""
    logprobs: npt.NDArray[np.float32] | None = None
    advantages: npt.NDArray[np.float32] | None = None
    reward: float | None = None
    versions: tuple[VersionSpan, ...] = ()
    """Which weights sampled which tokens; positions are those of the row."""
    completions: tuple[CompletionSpan, ...] = ()
    """What the engine returned at once, and how it was sampled; empty for rows of conversations."""
    channels: Mapping[str, Channel] = field(default_factory=dict)
    """What engines told of tokens beside logprobs, by name; nothing where nothing was sampled."""
    name: str = ""
    """What it was made from: the name of a trajectory, the file of a conversation."""
    branch: int = -1
    """The branch of the trajectory; -1 where there is none."""
    notes: tuple[str, ...] = ()
    """What to know about it before it is trained on."""
    warnings: tuple[Warning, ...] = ()
    """Those of the notes that `build_supervised_sample` gives as warnings."""
    rendered: RenderedTokens | None = None
    """What it was rendered from, where a `SampleBuilder` made it; a stop token that it added is not in there."""
    offset: int = 0
    """The token of `rendered` that the row begins with: not 0 where its beginning was cut off."""
    _later: Later | None = field(default=None, init=False, repr=False)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """An array that was to be found later: asked for an attribute that has no value."""
            if name not in _PER_TOKEN:
                raise AttributeError(f"a sample has no {name!r}")
            later = self._later
            if later is None:  # another thread has found it in the meantime
                return object.__getattribute__(self, name)
            for found, array in later.find().items():
                object.__setattr__(self, found, array)
            object.__setattr__(self, "_later", None)
            return getattr(self, name)

    def __post_init__(self) -> None:
        for name in ("ids", *_PER_TOKEN):
            array, codes = getattr(self, name), _CODES.get(name, "f")
            if type(array) is Later:
                object.__setattr__(self, "_later", array)
                object.__delattr__(self, name)
                continue
            if array is None and name in ("parts", "logprobs", "advantages"):
                continue
            if not isinstance(array, np.ndarray) or array.ndim != 1 or array.dtype.kind not in codes:
                raise SampleError(f"{name} must be a numpy array, a row of {_WORDS[codes]}, not {_described(array)}")
            if array.shape != self.ids.shape:
                raise SampleError(f"{name} has {len(array)} entries, and there are {len(self.ids)} ids")
        if len(self.ids) and (self.ids.min() < 0 or (self.ids.dtype != np.int32 and self.ids.max() > 2**31 - 1)):
            raise SampleError("ids are 0 to 2**31 - 1")
        if self.reward is not None and (not is_number(self.reward) or as_float(self.reward) is None):
            raise SampleError(f"reward must be a finite number or None, not {shown(self.reward)}")
        for name, kind in (("versions", VersionSpan), ("completions", CompletionSpan)):
            spans = getattr(self, name)
            if not isinstance(spans, tuple) or not all(isinstance(span, kind) for span in spans):
                raise SampleError(f"{name} must be a tuple of {kind.__name__}, not {shown(spans)}")
            for span in spans:
                if not _is_place(span.start) or not _is_place(span.stop) or not span.start <= span.stop <= len(self):
                    where = f"{shown(span.start)}..{shown(span.stop)}"
                    raise SampleError(f"{name}: a span of {where} is outside the {len(self)} tokens")

        if not isinstance(self.channels, Mapping):
            raise SampleError(f"channels must be a mapping by name, not {shown(self.channels)}")
        for name, channel in self.channels.items():
            if not isinstance(channel, Channel) or len(channel) != len(self):
                raise SampleError(f"channels[{name!r}] must be a Channel of {len(self)} tokens, not {shown(channel)}")

    @property
    def token_ids(self) -> list[int]:
        return cast(list[int], self.ids.tolist())

    @property
    def loss_mask(self) -> list[int]:
        """1 where a token carries loss, else 0."""
        return cast(list[int], self.mask.astype(np.int8).tolist())

    @property
    def input_ids(self) -> Ids:
        return self.ids

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        """The ids where they carry loss, -100 elsewhere. Not shifted: that is what models do."""
        return np.where(self.mask, self.ids, IGNORE).astype(np.int64)

    @property
    def attention_mask(self) -> npt.NDArray[np.int64]:
        return np.ones(len(self.ids), np.int64)

    @property
    def position_ids(self) -> npt.NDArray[np.int64]:
        return np.arange(len(self.ids), dtype=np.int64)

    @property
    def trained(self) -> int:
        """How many tokens carry loss."""
        return int(np.count_nonzero(self.mask))

    @property
    def trained_messages(self) -> list[int]:
        """The messages that have tokens that carry loss, in order."""
        return cast(list[int], np.unique(self.messages[self.mask & (self.messages >= 0)]).tolist())

    def slice(self, start: int, stop: int) -> Sample:
        """The tokens `start` to `stop` as a sample of their own."""
        if not _is_place(start) or not _is_place(stop) or not start <= stop <= len(self):
            raise SampleError(f"{shown(start)}..{shown(stop)} is not a range of the {len(self)} tokens")
        arrays: dict[str, Any] = {
            name: getattr(self, name)[start:stop] for name in _PER_TOKEN if getattr(self, name) is not None
        }
        return dataclasses.replace(
            self,
            ids=self.ids[start:stop],
            versions=_cut(self.versions, start, stop),
            completions=_cut(self.completions, start, stop),
            channels={name: channel.slice(start, stop) for name, channel in self.channels.items()},
            offset=self.offset + start,
            **arrays,
        )

    def replace(self, **changes: Any) -> Sample:
        """A sample that differs in some fields."""
        known = [field.name for field in dataclasses.fields(self) if field.init]
        if unknown := [name for name in changes if name not in known]:
            raise SampleError(f"a sample has no {unknown[0]!r}; it has {', '.join(known)}")
        return dataclasses.replace(self, **changes)

    def __iter__(self) -> Iterator[list[int]]:
        yield self.token_ids
        yield self.loss_mask

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        label = f"{self.name!r}, " if self.name else ""
        return f"Sample({label}{len(self.ids)} tokens, {self.trained} trained)"


_WORDS: Final = {"iu": "integers", "b": "booleans", "f": "floats"}


def as_samples(samples: Any) -> list[Sample]:
    """A list of samples, checked: `SampleError` where it is empty, or holds something else."""
    if isinstance(samples, Sample | np.ndarray) or not isinstance(samples, Iterable):
        raise SampleError(f"samples must be a list of samples, not {_described(samples)}")
    found = items("samples", samples, SampleError)
    for number, sample in enumerate(found):
        if not isinstance(sample, Sample):
            raise SampleError(f"samples[{number}] must be a Sample, not {_described(sample)}")
    if not found:
        raise SampleError("there are no samples")
    return found


def _cut(spans: tuple[Span, ...], start: int, stop: int) -> tuple[Span, ...]:
    """What lies between two positions, counted from the first."""
    kept = ((span, max(span.start, start) - start, min(span.stop, stop) - start) for span in spans)
    return tuple(span._replace(start=first, stop=last) for span, first, last in kept if first < last)


def _is_place(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 0


def _described(value: Any) -> str:
    return f"{value.dtype} of shape {value.shape}" if isinstance(value, np.ndarray) else shown(value)
