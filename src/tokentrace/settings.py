"""What a setting may be: one of a few names, a whole number, an object of a kind."""

from __future__ import annotations

from enum import StrEnum
from numbers import Integral
from typing import Any, TypeVar

import numpy as np

from .errors import RendererError, TokentraceError, shown

Setting = TypeVar("Setting", bound=StrEnum)
Object = TypeVar("Object")


def choose(kind: type[Setting], name: str, value: Any, error: type[TokentraceError] = RendererError) -> Setting:
    """The choice that a value names, or an error with all there are."""
    try:
        return kind(value)
    except (ValueError, TypeError, RecursionError):
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise error(f"{name} is one of {choices}, not {shown(value)}") from None


def whole(name: str, value: Any, *, least: int | None = None, error: type[TokentraceError] = RendererError) -> int:
    """A whole number, `least` or more, as an int; numbers of NumPy are numbers, booleans are not."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise error(f"{name} must be a whole number, not {shown(value)}")
    if least is not None and value < least:
        raise error(f"{name} must be at least {least}, not {shown(value)}")
    return int(value)


def flag(name: str, value: Any, error: type[TokentraceError] = RendererError) -> bool:
    """Yes or no, as a bool; None is no."""
    if value is None or isinstance(value, (bool, Integral, np.bool_)):
        return bool(value)
    raise error(f"{name} is True or False, not {shown(value)}")


def items(name: str, value: Any, error: type[TokentraceError] = RendererError) -> list[Any]:
    """The items of a list, or of anything else that holds items."""
    try:
        return list(value)
    except Exception:
        raise error(f"{name} must be a list, not {shown(value)}") from None


def instance(name: str, value: Any, kind: type[Object], error: type[TokentraceError] = RendererError) -> Object:
    """The value, if it is of a kind."""
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        raise error(f"{name} must be a {kinds}, not {shown(value)}")
    return value
