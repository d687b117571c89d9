"""Check settings: one of a few names, a number, a limit, an object of a type."""

import math
import re
from enum import StrEnum
from numbers import Integral, Real
from typing import Any, TypeVar

import numpy as np

from .errors import RendererError, TokentraceError, brief

Setting = TypeVar("Setting", bound=StrEnum)
Object = TypeVar("Object")
ErrorType = type[TokentraceError]


def choose(kind: type[Setting], name: str, value: Any, error: ErrorType = RendererError) -> Setting:
    """The choice that `value` names. The error lists all."""
    try:
        return kind(value)
    except (ValueError, TypeError, RecursionError):
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise error(f"{name} must be one of {choices}, not {brief(value)}") from None


def whole(
    name: str,
    value: Any,
    *,
    least: int | None = None,
    most: int | None = None,
    error: ErrorType = RendererError,
) -> int:
    """A whole number from `least` to `most` as an int. Rejects booleans."""
    if type(value) is not int and not is_integer(value):
        raise error(f"{name} must be a whole number, not {brief(value)}")
    integer = int(value)
    if least is not None and integer < least:
        raise error(f"{name} must be at least {least}, not {brief(value)}")
    if most is not None and integer > most:
        raise error(f"{name} must be at most {most}, not {brief(value)}")
    return integer


def number(name: str, value: Any, least: float, most: float, error: ErrorType = RendererError) -> float:
    """A number from `least` to `most` as a float. Rejects booleans."""
    real = as_float(value) if is_number(value) else None
    if real is None or not least <= real <= most:
        raise error(f"{name} must be a number from {least:g} to {most:g}, not {brief(value)}")
    return real


def limit(
    name: str, value: Any, *, unit: str = "seconds", zero: bool = False, error: ErrorType = RendererError
) -> float | None:
    """A finite number above 0, or None for no limit. `zero` allows 0, too."""
    if value is None:
        return None
    real = as_float(value) if is_number(value) else None
    if real is None or real < 0 or (real == 0 and not zero):
        least = "at least 0" if zero else "more than 0"
        raise error(f"{name} must be {least} {unit} and finite, or None for no limit, not {brief(value)}")
    return real


def is_number(value: Any) -> bool:
    """True for Python and NumPy numbers, False for booleans."""
    return type(value) in (int, float) or (isinstance(value, Real) and not isinstance(value, bool))


def is_integer(value: Any) -> bool:
    """True for Python and NumPy integers, False for booleans."""
    return type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))


def as_float(value: Any) -> float | None:
    """A finite number as a float; None for anything else."""
    try:
        real = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None
    return real if math.isfinite(real) else None


def as_float32(value: Any) -> float | None:
    """A finite number that float32 can hold, as a float; None for anything else."""
    real = as_float(value) if is_number(value) else None
    return None if real is None or abs(real) > float(np.finfo(np.float32).max) else real


def flag(name: str, value: Any, error: ErrorType = RendererError) -> bool:
    """A bool; None is False."""
    if value is None or isinstance(value, (bool, Integral, np.bool_)):
        return bool(value)
    raise error(f"{name} is True or False, not {brief(value)}")


def items(name: str, value: Any, error: ErrorType = RendererError) -> list[Any]:
    """The items of any iterable as a list."""
    try:
        return list(value)
    except Exception:
        raise error(f"{name} must be a list, not {brief(value)}") from None


def instance(name: str, value: Any, kind: type[Object], error: ErrorType = RendererError) -> Object:
    """`value` if it is an instance of `kind`."""
    if not isinstance(value, kind):
        kinds = " or ".join(one.__name__ for one in (kind if isinstance(kind, tuple) else (kind,)))
        article = "an" if kinds[0] in "AEIOU" else "a"
        raise error(f"{name} must be {article} {kinds}, not {brief(value)}")
    return value


def explain_invalid(error: Exception, schema: Any) -> tuple[list[str | int], str]:
    """The path of a value that msgspec rejects, and what is wrong with it."""
    from msgspec.inspect import EnumType, type_info

    message, _, where = str(error).partition(" - at `$")
    path = [int(at) if at else name for name, at in re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", where)]
    if unknown := re.search(r"contains unknown field `(.*)`", message):
        path.append(unknown[1])
    kinds, fields = [type_info(schema)], dict[str, Any]()
    for step in path:
        kinds = [one for kind in kinds for one in getattr(kind, "types", (kind,))]
        fields = {field.encode_name: field.type for kind in kinds for field in getattr(kind, "fields", ())}
        items = [kind.item_type for kind in kinds if hasattr(kind, "item_type")]
        kinds = items if isinstance(step, int) else [fields[step]] if step in fields else []
    if unknown:
        return path, "there is no such setting" + (f"; there are {', '.join(fields)}" if fields else "")
    kinds = [one for kind in kinds for one in getattr(kind, "types", (kind,))]
    values = (kind.cls if isinstance(kind, EnumType) else getattr(kind, "values", ()) for kind in kinds)
    choices = ", ".join(str(one) for each in values for one in each)
    if choices:
        message = message.replace("Invalid enum value", f"must be one of {choices}, not")
    return path, message


def flat(value: Any, place: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names.

    >>> flat({"sampling": {"top_p": 1.0}, "seed": 3})
    {'sampling.top_p': 1.0, 'seed': 3}
    """
    if not isinstance(value, dict):
        return {place: value}
    names: dict[str, Any] = {}
    for key, inner in value.items():
        names |= flat(inner, f"{place}.{key}" if place else str(key))
    return names
