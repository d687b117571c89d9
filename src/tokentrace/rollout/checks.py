"""What people set or return, checked: counts, rewards, metrics, lists."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from ..errors import InputError, shown
from ..settings import as_float, whole

MOST: Final = 2**31 - 1
MOST_SEED: Final = 2**62
_LARGEST: Final = float(np.finfo(np.float32).max)


def count(name: str, value: Any, *, least: int = 1, most: int = MOST) -> int:
    """A whole number from `least` to `most`; InputError names the setting."""
    return whole(name, value, least=least, most=most, error=InputError)


def reward(value: Any, what: str) -> float | None:
    """A reward as a float: any number that float32 can hold, as rows have it, True and False, a tensor of one number;
    None stays None."""
    found = None if isinstance(value, str | bytes) else as_float(value)
    if value is not None and (found is None or abs(found) > _LARGEST):
        raise InputError(f"{what} is {shown(value)}: it must be a finite number (float32), or None where there is none")
    return found


def metrics(value: Any, who: str) -> tuple[dict[str, Any], str]:
    """Metrics as JSON can hold them, and a note where something in them had to become text for that.

    >>> metrics({"rows": 3, ("a", "b"): 1}, "look")
    ({'rows': 3, "('a', 'b')": 1}, "look: metrics that JSON cannot hold are kept as text: ('a', 'b')")
    """
    if not isinstance(value, Mapping):
        return {}, f"{who}: metrics must be a mapping, not {shown(value)}: they are not kept"
    made: dict[str, Any] = {}
    odd: list[str] = []
    for key, one in value.items():
        name = key if isinstance(key, str) else shown(key)
        if name != key:
            odd.append(name)
        try:
            made[name] = json.loads(json.dumps(one, default=str))
        except Exception:  # a cycle, a key that is not text, an object that cannot say what it is
            made[name] = shown(one)
            odd.append(name)
    return made, f"{who}: metrics that JSON cannot hold are kept as text: {', '.join(odd)}" if odd else ""
