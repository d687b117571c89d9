"""Staleness: how many versions of the weights lie between those that sampled a token and those that are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..errors import SampleError, brief
from ..settings import whole
from .sample import Sample, as_samples

_DIGITS: Final = re.compile("[0-9]{1,19}")
UNSAMPLED: Final = -1
"""The version and the staleness of a token that nothing sampled, or whose version is not recorded."""


def token_versions(sample: Sample) -> npt.NDArray[np.int64]:
    """The version that sampled each token; -1 if none did, or it is not recorded.

    Text of digits is its number: servers report 12 as ``"12"``. Raises SampleError for other text, and for negative
    versions.
    """
    versions = np.full(len(sample), UNSAMPLED, np.int64)
    for version, start, stop in sample.versions:
        number = int(version) if isinstance(version, str) and _DIGITS.fullmatch(version) else version
        if isinstance(number, str) or not 0 <= number < 2**63:
            raise SampleError(f"{sample!r} has version {brief(version)}: name versions by integers from 0 on")
        versions[start:stop] = number
    return versions


def token_staleness(sample: Sample, version: int) -> npt.NDArray[np.int64]:
    """How many versions lie between those that sampled each token and `version`, which is trained; -1 if none did.

    Raises SampleError if a token carries loss and has no version, or has a later one.
    """
    trained = checked_version(version)
    versions = token_versions(sample)
    missing = sample.mask & (versions == UNSAMPLED)
    if missing.any():
        raise SampleError(f"{sample!r}: token {int(missing.argmax())} carries loss and has no version")
    if len(versions) and int(versions.max()) > trained:
        raise SampleError(f"{sample!r} was sampled by version {int(versions.max())}, and {trained} is trained")
    return np.where(versions == UNSAMPLED, UNSAMPLED, trained - versions)


def checked_version(version: int) -> int:
    """The version of the weights that are trained. Raises SampleError if it is no integer from 0 on."""
    return whole("version, the integer that names the weights,", version, least=0, error=SampleError)


def row_staleness(sample: Sample, version: int) -> tuple[int, float]:
    """The largest and the mean staleness of the tokens that carry loss; -1 and NaN if there are none."""
    values = token_staleness(sample, version)[sample.mask]
    return (int(values.max()), float(values.mean())) if len(values) else (UNSAMPLED, float("nan"))


def fresh_samples(samples: Sequence[Sample], version: int, *, max_staleness: int) -> tuple[list[Sample], list[Sample]]:
    """The rows whose trained tokens are at most `max_staleness` versions old, and the other rows."""
    most = whole("max_staleness", max_staleness, least=0, error=SampleError)
    fresh: list[Sample] = []
    stale: list[Sample] = []
    for sample in as_samples(samples):
        (stale if row_staleness(sample, version)[0] > most else fresh).append(sample)
    return fresh, stale
