"""Limits on one render: steps, seconds, and bytes of values.

Three rules keep a template from running or writing without end:

- each round of a loop, call and item of a lazy filter is a step, and every few check the clock;
- no value may pass a fixed size, which is checked before it is made (nested containers: before
  they are printed, compared or hashed);
- every new value is charged in bytes. Outside a render, nothing is charged.
"""

import threading
import time
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

from jinja2.utils import Namespace

MAX_STEPS = 5_000_000
MAX_SECONDS = 30
MAX_BYTES = 512 * 1024 * 1024
"""Of all values that one render makes."""
MAX_TEXT = 64 * 1024 * 1024
"""Characters of one value."""
MAX_ITEMS = 2_000_000
"""Items of one container, and pieces of a text that is cut."""
MAX_BITS = 100_000
"""Bits of a number: Python's arithmetic is quadratic in them."""
MAX_SEARCH = 1 << 34
"""Comparisons of characters in one search: some of Python's are naive."""
SMALL = 1024
"""The step that makes it pays for text up to this size…"""
_FEW = 64
"""…and for containers of up to this many items."""
_ITEM_SIZE = 32
_VIEWS: tuple[Any, ...] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (dict, list, tuple, set, frozenset, *_VIEWS, MappingProxyType, Namespace)


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


class charging:  # noqa: N801
    """Charges what the block makes to a budget."""

    def __init__(self, budget: RenderBudget) -> None:
        self._budget = budget

    def __enter__(self) -> None:
        self._before, _active.budget = _active.budget, self._budget

    def __exit__(self, *error: object) -> None:
        _active.budget = self._before


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
    if size > MAX_TEXT:
        raise TooLarge(f"the template tried to build a value of {size} characters (limit {MAX_TEXT})")


def check_items(count: int) -> None:
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
    out: list[Any] = []
    for item in counted(items):
        out.append(item)
        if len(out) % 1024 == 0:
            check_items(1024 if len(out) <= MAX_ITEMS else len(out))
    return out


def weigh(value: Any) -> int:
    """A value's characters and parts, shared ones each time. Raises TooLarge or RecursionError."""
    weights: dict[int, int] = {}

    def weight(part: Any) -> int:
        if isinstance(part, (str, bytes)):
            return len(part)
        if not isinstance(part, _CONTAINERS):
            return 1
        if id(part) not in weights:
            weights[id(part)] = 0  # a namespace may contain itself
            inner: Any = part
            if isinstance(part, Namespace):
                inner = (attrs_of(part),)
            elif isinstance(part, dict):  # as stored, not as a subclass returns them
                inner = (*dict.keys(part), *dict.values(part))
            elif isinstance(part, MappingProxyType):
                inner = (*part, *part.values())
            weights[id(part)] = sum(_ITEM_SIZE + weight(one) for one in inner)
        return weights[id(part)]

    size = weight(value)
    if size > MAX_TEXT:
        raise TooLarge(f"the template tried to process a value of {size} characters and parts")
    step(size >> 12)
    return size


def weighed(value: Any) -> Any:
    if isinstance(value, (list, tuple, dict)):
        weigh(value)
    return value


def attrs_of(namespace: Namespace) -> dict[str, Any]:
    """The attributes of a namespace: normal access finds the template's names first."""
    return object.__getattribute__(namespace, "_Namespace__attrs")  # type: ignore[no-any-return]
