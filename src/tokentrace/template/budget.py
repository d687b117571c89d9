"""Limits on one render: steps, seconds, and bytes of values.

A template is somebody else's program. Three rules keep it from running or writing without end:

- each round of a loop, each call and each item of a lazy filter is a step; every few steps the clock is checked;
- no value may grow past a fixed size. Sizes are checked before a value is made or, for nested containers, before it is
  printed, compared or hashed;
- every new value is charged in bytes, so that many harmless values do not add up to gigabytes.

Outside a render nothing is charged, but the limits on a single value still apply.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

from jinja2.utils import Namespace

MAX_STEPS: Final = 5_000_000
"""Steps one render may take: a few seconds of Python."""
MAX_SECONDS: Final = 30
MAX_BYTES: Final = 512 * 1024 * 1024
"""Total bytes of values one render may make."""
MAX_TEXT: Final = 64 * 1024 * 1024
"""Characters a single value inside a template may have."""
MAX_ITEMS: Final = 2_000_000
"""Items a single container may have, and pieces a text may be cut into."""
MAX_BITS: Final = 100_000
"""Bits a number may have: Python's arithmetic is quadratic in them."""
MAX_SEARCH: Final = 1 << 34
"""Character comparisons that one search may take: some of Python's searches are naive."""
SMALL: Final = 1024
"""Text up to this size is paid for by the step that makes it."""

_FEW: Final = 64
"""Containers of up to this many items are paid for by the step that makes them."""
_ITEM_SIZE: Final = 32
_VIEWS: Final[tuple[Any, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, *_VIEWS, MappingProxyType, Namespace)


class TooLarge(Exception):  # noqa: N818
    """A template exceeded a limit on what it may do or make."""


class RenderBudget:
    """What one render may still do."""

    __slots__ = ("deadline", "left", "steps")

    def __init__(self, steps: int | None = None, size: int | None = None) -> None:
        self.steps = MAX_STEPS if steps is None else steps
        self.left = MAX_BYTES if size is None else size
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        before = self.steps
        self.steps = after = before - count
        if (before ^ after) >= 32 or after < 0:
            self.check()

    def check(self) -> None:
        if self.steps < 0:
            raise TooLarge(f"the template took more than {MAX_STEPS} steps; it seems to loop forever")
        if time.monotonic() > self.deadline:
            raise TooLarge(f"the template took more than {MAX_SECONDS} seconds")

    def charge(self, size: int) -> None:
        self.left -= size
        if self.left < 0:
            raise TooLarge(f"the template made more than {MAX_BYTES} bytes of values")
        if size > 4096:
            self.step(size >> 12)


class _Active(threading.local):
    budget: RenderBudget | None = None


_active = _Active()


@contextlib.contextmanager
def charging(budget: RenderBudget) -> Iterator[None]:
    """Charge what this thread does inside the block to `budget`."""
    before = _active.budget
    _active.budget = budget
    try:
        yield
    finally:
        _active.budget = before


def step(count: int = 1) -> None:
    if _active.budget is not None:
        _active.budget.step(count)


def charge(size: int) -> None:
    if _active.budget is not None:
        _active.budget.charge(size)


def charged(size: int, value: Any) -> Any:
    charge(size)
    return value


def check_size(size: int) -> None:
    """Raise TooLarge if a text of `size` characters would be too long. Call it before making the text."""
    if size > MAX_TEXT:
        raise TooLarge(f"the template tried to build a value of {size} characters (limit {MAX_TEXT})")


def check_items(count: int) -> None:
    """Charge for a container of `count` items before it is made. Raises TooLarge if that is too many."""
    if count > MAX_ITEMS:
        raise TooLarge(f"the template tried to build a value of {count} items (limit {MAX_ITEMS})")
    if count > _FEW:
        charge(count * _ITEM_SIZE)


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooLarge(f"the template tried to compute a number of {bits} bits")


def check_search(text: str, pattern: str) -> None:
    if len(text) * len(pattern) > MAX_SEARCH:
        raise TooLarge(f"the template searched {len(text)} characters for a text of {len(pattern)}")


def counted(items: Iterable[Any]) -> Iterator[Any]:
    for item in items:
        step()
        yield item


def listed(items: Iterable[Any]) -> list[Any]:
    """The items as a list, charged to the budget."""
    out: list[Any] = []
    for item in counted(items):
        out.append(item)
        if len(out) % 1024 == 0:
            check_items(1024 if len(out) <= MAX_ITEMS else len(out))
    return out


def weigh(value: Any) -> int:
    """Count the characters and parts of a value. Raises TooLarge if there are too many.

    A shared part counts each time, because it is printed, compared and hashed each time: a list that contains another
    twice, sixty levels deep, has few objects but 2**60 parts. Raises RecursionError if the value is nested too deeply
    for Python to hash.
    """
    weights: dict[int, int] = {}

    def weight(part: Any) -> int:
        if isinstance(part, (str, bytes)):
            return len(part)
        if not isinstance(part, _CONTAINERS):
            return 1
        if id(part) not in weights:
            weights[id(part)] = 0  # a namespace may contain itself
            inner = (attributes_of(part),) if isinstance(part, Namespace) else part
            if isinstance(part, (dict, MappingProxyType)):  # as stored, not as a subclass returns them
                inner = (*dict.keys(part), *dict.values(part)) if isinstance(part, dict) else (*part, *part.values())
            weights[id(part)] = sum(_ITEM_SIZE + weight(one) for one in inner)
        return weights[id(part)]

    size = weight(value)
    if size > MAX_TEXT:
        raise TooLarge(f"the template tried to process a value of {size} characters and parts")
    step(size >> 12)
    return size


def weighed(value: Any) -> Any:
    """Return `value` after checking its size: it is about to be compared, hashed or put into a container."""
    if isinstance(value, (list, tuple, dict)):
        weigh(value)
    return value


def attributes_of(namespace: Namespace) -> dict[str, Any]:
    """The attributes of a namespace. Normal attribute access would find the template's names first."""
    return object.__getattribute__(namespace, "_Namespace__attrs")  # type: ignore[no-any-return]
