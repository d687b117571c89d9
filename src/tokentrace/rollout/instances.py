"""What tells rollouts apart while they are under way."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import Final

_NAMES_UNDER_WAY: Final[set[str]] = set()
_NAMING: Final = threading.Lock()


@contextlib.contextmanager
def instance_name(name: str) -> Iterator[str]:
    """A name for as long as a rollout is under way, which no other in this process has meanwhile.

    Tools, simulated users and engines tell rollouts by it: two that shared one would share their state.
    """
    with _NAMING:
        names = itertools.chain([name], (f"{name}~{number}" for number in itertools.count(2)))
        own = next(one for one in names if one not in _NAMES_UNDER_WAY)
        _NAMES_UNDER_WAY.add(own)
    try:
        yield own
    finally:
        _NAMES_UNDER_WAY.discard(own)
