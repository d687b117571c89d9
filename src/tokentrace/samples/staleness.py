"""Staleness: how many versions of the weights lie between those that sampled a token and those that are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, shown
from .sample import Sample, as_samples

_DIGITS: Final = re.compile("[0-9]{1,19}")
UNSAMPLED: Final = -1
"""The version and the staleness of a token that nothing sampled, or of which nobody said which weights did."""


def token_versions(sample: Sample) -> npt.NDArray[np.int64]:
    """The version that sampled each token; -1 where none did, or nobody said.

    A text of digits is the number that it spells: servers name versions by text, and tell 12 as ``"12"``.
    `SampleError` where a version is another text, or negative: nothing can be computed with it.

    >>> kinds = np.array([0, 1, 1], np.uint8)
    >>> sample = Sample(np.array([5, 6, 7], np.int32), kinds == 1, np.array([0, 1, 1], np.int32), kinds)
    >>> from tokentrace.trajectory import VersionSpan
    >>> token_versions(sample.replace(versions=(VersionSpan(41, 1, 2), VersionSpan(42, 2, 3)))).tolist()
    [-1, 41, 42]
    """
    out = np.full(len(sample), UNSAMPLED, np.int64)
    for version, start, stop in sample.versions:
        out[start:stop] = _numbered(version, f"{sample!r}: ")
    return out


def age(sampled_by: str | int, version: int, whose: str = "") -> int:
    """How many versions lie between those that sampled something and `version`."""
    found = checked_version(version) - _numbered(sampled_by, whose)
    if found < 0:
        raise SampleError(f"{whose}tokens were sampled by version {sampled_by}, and the version of now is {version}")
    return found


def _numbered(version: str | int, whose: str) -> int:
    found = version
    if isinstance(version, str) and _DIGITS.fullmatch(version):
        found = int(version)
    if isinstance(found, str) or not 0 <= found < 2**63:
        raise SampleError(
            f"{whose}tokens were sampled by version {shown(version)}: to compute with versions, name them by integers "
            "from 0 on"
        )
    return found


def token_staleness(sample: Sample, version: int) -> npt.NDArray[np.int64]:
    """How many versions lie between those that sampled each token and `version`, which is trained; -1 where none did.

    `SampleError` where a token carries loss and nobody said which weights sampled it, or where a later version did.
    """
    for span in sample.versions:
        age(span.version, version, f"{sample!r}: ")
    versions = token_versions(sample)
    unknown = sample.mask & (versions == UNSAMPLED)
    if unknown.any():
        raise SampleError(
            f"{sample!r}: token {int(unknown.argmax())} carries loss, and nobody said which weights sampled it"
        )
    return np.where(versions == UNSAMPLED, UNSAMPLED, checked_version(version) - versions)


def checked_version(version: int) -> int:
    """The version of the weights that are trained."""
    if isinstance(version, bool) or not isinstance(version, int | np.integer) or version < 0:
        raise SampleError(f"version must be the integer that the weights are called by, not {shown(version)}")
    return int(version)


def row_staleness(sample: Sample, version: int) -> tuple[int, float]:
    """The largest and the mean staleness of the tokens that carry loss; -1 and NaN where there are none."""
    values = token_staleness(sample, version)[sample.mask]
    return (int(values.max()), float(values.mean())) if len(values) else (UNSAMPLED, float("nan"))


@dataclass(frozen=True, slots=True)
class Stale:
    """A row that was left out because it is too old."""

    index: int
    """Its place among the rows that were given."""
    name: str
    branch: int
    staleness: int
    """The largest of the tokens that carry loss."""


@dataclass(frozen=True, slots=True)
class Fresh:
    """Rows that are new enough, and those that are not. `str()` of it is a line for people."""

    samples: tuple[Sample, ...]
    dropped: tuple[Stale, ...]
    most: int

    def __str__(self) -> str:
        total = len(self.samples) + len(self.dropped)
        if not self.dropped:
            return f"all {total} rows are at most {self.most} versions old"
        oldest = max(self.dropped, key=lambda row: row.staleness)
        return (
            f"{len(self.dropped)} of {total} rows are more than {self.most} versions old and left out; the oldest is "
            f"{oldest.name!r} with {oldest.staleness}"
        )


def fresh_samples(samples: Sequence[Sample], version: int, *, max_staleness: int) -> Fresh:
    """The rows of which no token that carries loss is more than `max_staleness` versions old, and what was left out."""
    if isinstance(max_staleness, bool) or not isinstance(max_staleness, int) or max_staleness < 0:
        raise SampleError(f"max_staleness must be a whole number from 0 on, not {shown(max_staleness)}")
    kept: list[Sample] = []
    dropped: list[Stale] = []
    for index, sample in enumerate(as_samples(samples)):
        oldest, _ = row_staleness(sample, version)
        if oldest > max_staleness:
            dropped.append(Stale(index, sample.name, sample.branch, oldest))
        else:
            kept.append(sample)
    return Fresh(tuple(kept), tuple(dropped), max_staleness)
