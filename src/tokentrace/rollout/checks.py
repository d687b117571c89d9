"""What people set or return, checked: counts, rewards, lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from ..errors import InputError, shown
from ..settings import as_float, whole

MOST: Final = 2**31 - 1
MOST_SEED: Final = 2**62


def count(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """A whole number from `least` to `most`; InputError names the setting."""
    return whole(name, value, least=least, most=most, error=InputError)


def reward(value: Any, what: str) -> float | None:
    """A reward as a float: any finite number, True and False, a tensor of one number; None stays None."""
    found = None if isinstance(value, str | bytes) else as_float(value)
    if found is None and value is not None:
        raise InputError(f"{what} is {shown(value)}: it must be a finite number, or None where there is none")
    return found


def is_list(value: object) -> bool:
    """Whether it is a list or a tuple of things, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
