"""Settings that are one of a few names."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, TypeVar

from .errors import RendererError

Setting = TypeVar("Setting", bound=StrEnum)


def choose(kind: type[Setting], name: str, value: Any) -> Setting:
    """The choice that a value names, or RendererError with all there are."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(str(choice)) for choice in kind)
        raise RendererError(f"{name} is one of {choices}, not {value!r}") from None
