"""What one render may do and hold: steps, seconds, and bytes of values made.

A template is somebody else's program. Whatever it does is charged by the size of what it touches: a round of a loop
is a step, and so are some thousand characters looked at by Python's own C code, or a few parts walked through one by
one. What it makes is charged in bytes, whether it is kept or thrown away, so that no chain of harmless values adds
up to gigabytes. Outside a render nothing is charged; the limits of a single value hold all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable, Iterator
from types import MappingProxyType
from typing import Any, Final

from jinja2.utils import Namespace

MAX_STEPS: Final = 5_000_000
"""Steps one render may take: some seconds of Python."""
MAX_SECONDS: Final = 30
"""A backstop, looked at between steps."""
MAX_MADE: Final = 512 * 1024 * 1024
"""Bytes of values one render may make altogether."""
MAX_TEXT: Final = 64 * 1024 * 1024
"""No single value inside a template may grow past this many characters, nor may what it prints."""
MAX_PIECES: Final = 2_000_000
"""No value may fall into more pieces than this: each is an object of its own."""
MAX_BITS: Final = 100_000
"""No number may have more bits: Python's arithmetic is quadratic in them."""
MAX_KEY_DEPTH: Final = 100
"""No tuple used as a key may be nested deeper: Python hashes it by recursion in C, unguarded."""

_FEW: Final = 64
"""Containers of up to so many items are paid for by the step that makes them."""
_PIECE_BYTES: Final = 128
_VIEWS: Final[tuple[Any, ...]] = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS: Final = (dict, list, tuple, set, frozenset, *_VIEWS, MappingProxyType, Namespace)


class TooLarge(Exception):  # noqa: N818
    """A template tried to do more, or to hold more, than it may."""


class RenderBudget:
    """What is left to one render."""

    __slots__ = ("deadline", "left", "steps")

    def __init__(self, steps: int | None = None, made: int | None = None) -> None:
        self.steps = MAX_STEPS if steps is None else steps
        self.left = MAX_MADE if made is None else made
        self.deadline = time.monotonic() + MAX_SECONDS

    def step(self, count: int = 1) -> None:
        """Some work is done; is there still leave to do it? The clock is looked at now and then only."""
        before = self.steps
        self.steps = after = before - count
        if (before ^ after) >= 32 or after < 0:
            self.check()

    def check(self) -> None:
        if self.steps < 0:
            raise TooLarge(f"the template took more than {MAX_STEPS} steps; it seems to loop for ever")
        if time.monotonic() > self.deadline:
            raise TooLarge(f"the template took more than {MAX_SECONDS} seconds")

    def make(self, size: int) -> None:
        """`size` bytes of values are made."""
        self.left -= size
        if self.left < 0:
            raise TooLarge(f"the template made more than {MAX_MADE} bytes of values")
        if size > 4096:
            self.step(size >> 12)


class _Active(threading.local):
    budget: RenderBudget | None = None


_active = _Active()


class charging:  # noqa: N801
    """``with charging(budget):`` what is done inside, in this thread, is charged to it."""

    __slots__ = ("before", "budget")

    def __init__(self, budget: RenderBudget) -> None:
        self.budget = budget
        self.before: RenderBudget | None = None

    def __enter__(self) -> None:
        self.before = _active.budget
        _active.budget = self.budget

    def __exit__(self, *_: object) -> None:
        _active.budget = self.before


def spend(steps: int) -> None:
    budget = _active.budget
    if budget is not None:
        budget.step(steps)


def made(size: int) -> None:
    """A value of `size` bytes was made."""
    budget = _active.budget
    if budget is not None:
        budget.make(size)


def check_size(size: int) -> None:
    """Refuse to make a text of so many characters. To be asked before it is made; charges nothing."""
    if size > MAX_TEXT:
        raise TooLarge(f"the template tried to build a value of {size} characters (limit {MAX_TEXT})")


def check_pieces(count: int) -> None:
    """A value falls into so many pieces: refuse, or charge for them."""
    if count > _FEW:
        _charge_pieces(count, count, count * _PIECE_BYTES)


def check_count(count: int) -> None:
    """So many pieces were handed out one by one; the last thousand of them is charged."""
    _charge_pieces(count, 1024, 1024 * _PIECE_BYTES)


def check_items(count: int) -> None:
    """A container of so many items, which exist already, is made: refuse, or charge for it."""
    if count > _FEW:
        _charge_pieces(count, count >> 6, count * 8)


def _charge_pieces(count: int, steps: int, size: int) -> None:
    if count > MAX_PIECES:
        raise TooLarge(f"the template tried to make {count} pieces of a value (limit {MAX_PIECES})")
    budget = _active.budget
    if budget is not None:
        budget.step(steps)
        budget.make(size)


def check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise TooLarge(f"the template tried to compute a number of {bits} bits")


def looked_at(text: str | bytes) -> None:
    """Python's C code went through the text once."""
    if len(text) > 4096:
        spend(len(text) >> 12)


def searched(text: str | bytes, pattern: str | bytes) -> None:
    """Each character of the text was compared with each of the pattern."""
    spend(1 + (len(text) * len(pattern) >> 12))


def dear(size: int) -> None:
    """Something was done that may take time quadratic in `size`."""
    spend(size + (size * size >> 6))


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items, each a step."""
    budget = _active.budget
    if budget is None:
        yield from items
        return
    for item in items:
        budget.step()
        if type(item) is list:
            check_items(len(item))
        yield item


def listed(items: Iterable[Any]) -> list[Any]:
    """The items as a list that is paid for, with the small texts that nobody paid for yet."""
    found: list[Any] = []
    size = 0
    for item in items:
        found.append(item)
        size += 8 + (len(item) if isinstance(item, (str, bytes, list, tuple)) else 0)
        if len(found) % _FEW == 0:
            check_items(len(found) if len(found) > MAX_PIECES else 0)
            made(size + _FEW * _PIECE_BYTES)
            spend(_FEW >> 1)
            size = 0
    return found


def weigh(value: Any) -> int:
    """Charge for a look at every part of `value`, and say how many characters and parts there are.

    A part that is shared counts each time, because it is printed, compared and hashed each time: a list that holds
    itself twice, sixty levels deep, has few objects and more parts than there is time for. Each object is looked at
    once, so weighing is cheap even then.
    """
    if isinstance(value, (str, bytes)):
        looked_at(value)
        return len(value)
    if not isinstance(value, _CONTAINERS):
        return 1
    parts, size = _weights(value)
    if parts > MAX_PIECES or size > MAX_TEXT:
        raise TooLarge(f"the template tried to go through a value of {parts} parts and {size} characters")
    spend(1 + (parts >> 1) + (size >> 12))
    return parts + size


def _weights(value: Any) -> tuple[int, int]:
    """The parts of a container, and the characters in them, from the innermost out."""
    weights: dict[int, tuple[int, int]] = {}
    opened: dict[int, Collection[Any]] = {}
    stack = [value]
    while stack:
        part = stack[-1]
        if id(part) in weights:
            stack.pop()
            continue
        inner = opened.get(id(part))
        if inner is None:
            inner = opened[id(part)] = _inner(part)
            pending = [item for item in inner if isinstance(item, _CONTAINERS) and id(item) not in opened]
            if pending:
                stack += pending
                continue
        parts, size = len(inner), 0
        for item in inner:
            if isinstance(item, (str, bytes)):
                size += len(item)
            elif isinstance(item, _CONTAINERS):
                more = weights.get(id(item), (0, 0))  # (0, 0): a namespace that holds itself
                parts += more[0]
                size += more[1]
        weights[id(part)] = parts, size
    return weights[id(value)]


def _inner(part: Any) -> Collection[Any]:
    """What a container holds, as it stands."""
    if isinstance(part, dict):
        return [*dict.keys(part), *dict.values(part)]
    if isinstance(part, MappingProxyType):
        return [*part.keys(), *part.values()]
    if isinstance(part, Namespace):
        return [object.__getattribute__(part, "_Namespace__attrs")]
    return list(part) if isinstance(part, _VIEWS) else part


def weigh_key(key: Any) -> None:
    """Charge for hashing `key`."""
    if not isinstance(key, tuple):
        return
    weigh(key)
    level = [part for part in key if isinstance(part, tuple)]
    for _ in range(MAX_KEY_DEPTH):
        if not level:
            return
        level = [part for above in level for part in above if isinstance(part, tuple)]
    raise TooLarge(f"the template used a tuple nested more than {MAX_KEY_DEPTH} deep as a key")


_NAIVE_SEARCHES: Final = frozenset({"rfind", "rindex"})
"""Searches that Python does the naive way."""


def charge_method(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    """Charge a method by the size of what it will go through; refuse bytes that would be too large."""
    if isinstance(owner, (str, bytes)):
        looked_at(owner)
        for value in args:
            if isinstance(value, (str, bytes)) and name in _NAIVE_SEARCHES:
                searched(owner, value)
            elif isinstance(value, tuple):
                weigh(value)
                spend(len(value) >> 4)
        if isinstance(owner, bytes):
            _check_bytes(owner, name, args)
    elif isinstance(owner, int):
        check_size(max((value for value in args if isinstance(value, int)), default=0))  # to_bytes(10**9)
    elif isinstance(owner, (list, tuple)):
        spend(1 + (len(owner) >> 4) * max((weigh(value) for value in args), default=1))
        check_items(len(owner))
    else:
        if isinstance(owner, dict) and name == "copy":
            check_pieces(len(owner))
        for value in args:
            weigh(value)
            weigh_key(value)


def _check_bytes(owner: bytes, name: str, args: tuple[Any, ...]) -> None:
    """Refuse methods of bytes that would make too much. Bytes are not traced strings, which check themselves."""
    check_pieces(len(owner) if name in ("split", "rsplit", "splitlines") else 0)
    sizes = [abs(value) if isinstance(value, int) else weigh(value) for value in args]
    largest = max(sizes, default=8)
    grows = name in ("expandtabs", "join", "replace", "translate")
    if name == "join":
        owner_size = len(owner) * largest
        check_size(owner_size + largest)
    else:
        check_size((len(owner) + 1) * largest if grows and largest > 1 else max(len(owner), largest))
    spend(1 + (max(len(owner), largest) >> 12))
    if name in ("strip", "lstrip", "rstrip", "rfind", "rindex", "rsplit", "rpartition"):
        spend(len(owner) * largest >> 12)
