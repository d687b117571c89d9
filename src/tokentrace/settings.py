"""What a setting may be: one of a few names, a number, a limit, an object of a kind."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from .errors import RendererError, TokentraceError, brief

Setting = TypeVar("Setting", bound=StrEnum)
Object = TypeVar("Object")


def choose(kind: type[Setting], name: str, value: Any, error: type[TokentraceError] = RendererError) -> Setting:
    """The choice that a value names, or an error with all there are."""
    try:
        return kind(value)
    except (ValueError, TypeError, RecursionError):
        choices = ", ".join(repr(str(choice)) for choice in kind)
        hint = near(value, map(str, kind)) if isinstance(value, str) else ""
        raise error(f"{name} is one of {choices}, not {brief(value)}{hint}") from None


def whole(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    error: type[TokentraceError] = RendererError,
) -> int:
    """A whole number from `least` to `most`, as an int; numbers of NumPy are numbers, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be a whole number, not {brief(value)}")
    found = int(value)
    if least is not None and found < least:
        raise error(f"{name} must be at least {least}, not {brief(value)}")
    if most is not None and found > most:
        raise error(f"{name} must be at most {most}, not {brief(value)}")
    return found


def number(name: str, value: Any, least: float, most: float, error: type[TokentraceError] = RendererError) -> float:
    """A number from `least` to `most`, as a float; numbers of NumPy are numbers, booleans are not."""
    found = as_float(value) if is_number(value) else None
    if found is None or not least <= found <= most:
        raise error(f"{name} must be a number from {least:g} to {most:g}, not {brief(value)}")
    return found


def limit(
    name: str,
    value: Any,
    *,
    unit: str = "seconds",
    zero: bool = False,
    error: type[TokentraceError] = RendererError,
) -> float | None:
    """A finite number above 0, or 0 too where `zero` says so; None is no limit."""
    if value is None:
        return None
    found = as_float(value) if is_number(value) else None
    if found is None or found < 0 or (found == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise error(f"{name} must be {least} {unit} and finite, or None for no limit, not {brief(value)}")
    return found


def is_number(value: Any) -> bool:
    """Whether it is a number, be it of NumPy or of Python; booleans are not."""
    return isinstance(value, Real) and not isinstance(value, bool)


def as_float(value: Any) -> float | None:
    """Anything that stands for one finite number, as a float; None for everything else."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return found if math.isfinite(found) else None


def flag(name: str, value: Any, error: type[TokentraceError] = RendererError) -> bool:
    """Yes or no, as a bool; None is no."""
    if value is None or isinstance(value, (bool, Integral, np.bool_)):
        return bool(value)
    raise error(f"{name} is True or False, not {brief(value)}")


def items(name: str, value: Any, error: type[TokentraceError] = RendererError) -> list[Any]:
    """The items of a list, or of anything else that holds items."""
    try:
        return list(value)
    except Exception:
        raise error(f"{name} must be a list, not {brief(value)}") from None


def instance(name: str, value: Any, kind: type[Object], error: type[TokentraceError] = RendererError) -> Object:
    """The value, if it is of a kind."""
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise error(f"{name} must be a {kinds}, not {brief(value)}")
    return value


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Settings that lie in one another, by their dotted names.

    >>> flat({"sampling": {"top_p": 1.0}, "seed": 3})
    {'sampling.top_p': 1.0, 'seed': 3}
    """
    if not isinstance(value, dict):
        return {place: value}
    found: dict[str, Any] = {}
    for key, inner in value.items():
        found |= flat(inner, f"{place}.{key}" if place else str(key))
    return found


def nearest(name: object, names: Iterable[str]) -> str:
    """A hint for a name that is not there: the one that was probably meant, or all that there are."""
    known = list(names)
    return near(name, known).removeprefix("; ") or f"there are {', '.join(known) or 'none'}"


def near(name: object, names: Iterable[str]) -> str:
    """The same where all names are told already: ``"; did you mean ...?"``, or nothing."""
    found = difflib.get_close_matches(str(name), list(names), 1)
    return f"; did you mean {found[0]!r}?" if found else ""
