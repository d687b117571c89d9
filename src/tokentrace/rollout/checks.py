"""What people set, checked: whole numbers, seconds, rewards, lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Final

from ..errors import InputError

MOST: Final = 2**31 - 1
MOST_SEED: Final = 2**62


def whole(value: Any, name: str, *, least: int = 1, most: int = MOST) -> int:
    """A whole number from `least` to `most`, NumPy's among them; InputError names the setting."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InputError(f"{name} must be a whole number, not {shown(value)}")
    if not least <= int(value) <= most:
        raise InputError(
            f"{name} must be {f'at least {least}' if value < least else f'at most {most}'}, not {shown(value)}"
        )
    return int(value)


def seconds(value: Any, name: str, *, zero: bool = False) -> float | None:
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


def shown(value: Any) -> str:
    """A value for an error: short, and never the cause of another one."""
    try:
        text = repr(value)
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:80]}…"
