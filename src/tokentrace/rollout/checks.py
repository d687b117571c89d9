"""What people set, checked: whole numbers, seconds, rewards, lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import Any, Final

from ..errors import InputError, shown
from ..settings import whole

MOST: Final = 2**31 - 1
MOST_SEED: Final = 2**62


def count(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """A whole number from `least` to `most`; InputError names the setting."""
    found = whole(name, value, least=least, error=InputError)
    if found > most:
        raise InputError(f"{name} must be at most {most}, not {shown(value)}")
    return found


def seconds(name: str, value: Any, *, zero: bool = False) -> float | None:
    """Seconds, or None for no limit; InputError names the setting."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InputError(f"{name} must be a number of seconds, or None for no limit, not {shown(value)}")
    found = as_float(value)
    if found is None or found < 0 or (found == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise InputError(f"{name} must be {least} seconds and finite, or None for no limit, not {shown(value)}")
    return found


def reward(value: Any, what: str) -> float | None:
    """A reward as a float: any finite number, True and False, a tensor of one number; None stays None."""
    if value is None:
        return None
    found = None if isinstance(value, str | bytes) else as_float(value)
    if found is None:
        raise InputError(f"{what} is {shown(value)}: it must be a finite number, or None where there is none")
    return found


def as_float(value: Any) -> float | None:
    """A value as a finite float; None where it is none."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return found if math.isfinite(found) else None


def is_list(value: object) -> bool:
    """Whether it is a list or a tuple of things, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
