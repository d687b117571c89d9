"""Sampling parameters, checked once, for every engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from ..errors import brief
from ..settings import instance, items, number, whole
from ..trajectory.turns import PENALTIES
from .errors import EngineError

_MOST: Final = 2**31 - 1
_COLDEST: Final = 0.01
"""The lowest temperature besides 0. vLLM raises lower ones to this."""
_MOST_STOPS: Final = 32
"""SGLang accepts no more."""
_TINY: Final = 1e-9
_NUMBERS: Final = {
    "temperature": (0.0, 1e6),
    "top_p": (_TINY, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (_TINY, 2.0),
}
_COUNTS: Final = {"max_tokens": 1, "top_k": 0, "top_logprobs": 0}
_UNUSED: Final[dict[str, Any]] = {"min_p": 0.0, **PENALTIES, "stop": ()}
_LEFT_OUT: Final[dict[str, Any]] = {**_UNUSED, "top_logprobs": 0, "structure": None}
OPTIONAL: Final = tuple(_UNUSED)
"""Settings that not every engine has: see `Capabilities.sampling`."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. `top_k` 0 is all tokens; `temperature` 0 is greedy. Raises EngineError for invalid values."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    allow_raw_logprobs: bool = False
    """Accept logprobs of another distribution than the sampled one, instead of LogprobKindError."""
    top_logprobs: int = 0
    """How many of the likeliest ids to report at each place."""
    structure: Mapping[str, Any] | None = None
    """Holds the completion to JSON: ``{"type": "json_object"}``, or ``{"type": "json_schema", "schema": {…}}``."""
    min_p: float = 0.0
    """Leaves out tokens less likely than this share of the likeliest one's probability."""
    presence_penalty: float = 0.0
    """Lowers the logit of each sampled token once."""
    frequency_penalty: float = 0.0
    """Lowers the logit of each sampled token for each occurrence."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens of prompt and completion."""
    stop: tuple[str, ...] = ()
    """Texts: the completion ends with the id that completes one."""

    def __post_init__(self) -> None:
        values: dict[str, Any] = {
            name: number(name, getattr(self, name), *bounds, EngineError) for name, bounds in _NUMBERS.items()
        }
        for name, least in _COUNTS.items():
            values[name] = whole(name, getattr(self, name), least=least, most=_MOST, error=EngineError)
        stops = items("stop_token_ids", self.stop_token_ids, EngineError)
        values["stop_token_ids"] = tuple(
            whole(f"stop_token_ids[{at}]", one, least=0, most=_MOST, error=EngineError) for at, one in enumerate(stops)
        )
        values["stop"] = _stop(self.stop)
        instance("allow_raw_logprobs", self.allow_raw_logprobs, bool, EngineError)
        if self.structure is not None:
            values["structure"] = _structure(self.structure)
        if self.seed is not None:
            values["seed"] = whole("seed", self.seed, least=0, most=2**63 - 1, error=EngineError)
        if 0 < values["temperature"] < _COLDEST:
            raise EngineError(f"temperature must be 0 (greedy) or at least {_COLDEST}: engines raise lower ones")
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def optional(self) -> list[str]:
        """The settings in use that not every engine has."""
        return [name for name, unused in _UNUSED.items() if getattr(self, name) != unused]

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties in use, by name."""
        return {name: getattr(self, name) for name in self.optional if name in PENALTIES}

    def described(self) -> dict[str, Any]:
        """Return the parameters as JSON, as a trajectory records them, without optional ones that are not in use."""
        values = {name: getattr(self, name) for name in SamplingParams.__slots__}
        unused = {name for name, value in _LEFT_OUT.items() if values[name] == value}
        lists = {name: list(values[name]) for name in ("stop_token_ids", "stop")}
        return {name: value for name, value in (values | lists).items() if name not in unused}


def _stop(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else stop
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
        raise EngineError(f"stop must be texts, none of them empty, not {brief(stop)}")
    if len(texts) > _MOST_STOPS:
        raise EngineError(f"stop can have at most {_MOST_STOPS} texts, not {len(texts)}")
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise EngineError(f"stop has a text that is not Unicode: {error}") from error
    return tuple(texts)


def _structure(structure: Any) -> dict[str, Any]:
    """Return a copy of a structure that an engine can follow."""
    try:
        copy = json.loads(json.dumps(structure, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise EngineError(f"structure must be JSON: {error}") from error
    match copy:
        case {"type": "json_object", **other} if not other:
            return dict(copy)
        case {"type": "json_schema", "schema": dict(), **other} if not other:
            return dict(copy)
    raise EngineError(
        'structure must be {"type": "json_object"} or {"type": "json_schema", "schema": {...}}, not '
        f"{brief(structure)}"
    )
