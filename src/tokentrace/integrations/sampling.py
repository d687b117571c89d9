"""Sampling parameters as vLLM and SGLang name them, which trainers hand on, as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Final

from ..engines.protocol import SamplingParams
from ..errors import InputError, brief

_NOT_READ: Final = {
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "no_stop_trim",
    "include_stop_str_in_output",
    "detokenize",
    "logprobs",
}
"""What is about text, which is not read here, and logprobs, which are always asked for."""
_OFF: Final = {
    "min_p": (0.0,),
    "repetition_penalty": (1.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "min_tokens": (0, 1),
    "min_new_tokens": (0, 1),
    "ignore_eos": (False,),
    "n": (1,),
    "n_samples": (1,),
}
"""What must be as if it were not there, or logprobs would be of another distribution. SkyRL and OpenRLHF always ask for
``min_tokens`` 1. It is not passed on: a turn may be its stop token alone, with its own logprob."""


_OBJECT: Final = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", *_OFF)
"""What is read off vLLM's own object: what changes what is sampled."""


def sampling_of(params: Any, *, max_tokens: int | None = None) -> SamplingParams:
    """Sampling parameters of vLLM or SGLang, a mapping or vLLM's own object.

    `max_tokens` is how long a turn may be where they do not say. InputError names what cannot be honoured, such as stop
    texts.
    """
    if not isinstance(params, Mapping):
        fields = {name: getattr(params, name) for name in _OBJECT if hasattr(params, name)}
        if "temperature" not in fields:
            raise InputError(f"sampling parameters are a mapping of names to values, not {brief(params)}")
        params = fields
    left = {name: value for name, value in params.items() if name not in _NOT_READ}
    limits = [left.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    seeds = [left.pop(name, None) for name in ("seed", "sampling_seed")]
    values = {name: left.pop(name) for name in ("temperature", "top_p", "top_k") if left.get(name) is not None}
    stops = left.pop("stop_token_ids", None)
    if not (stops is None or isinstance(stops, list | tuple)):
        raise InputError(f"stop_token_ids must be a list of ids, not {brief(stops)}")
    left = {name: value for name, value in left.items() if not _is_empty(value)}
    if wrong := {name: value for name, value in left.items() if not _is_off(name, value)}:
        raise InputError(f"the sampling parameters {brief(wrong)} cannot be honoured here: leave them out")
    limit = next((one for one in limits if one is not None), max_tokens)
    if limit is None:
        raise InputError("the sampling parameters have no max_tokens: say how long a turn may be")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    seed = next((one for one in seeds if one is not None), None)
    return SamplingParams(limit, seed=seed, stop_token_ids=tuple(stops or ()), **values)


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | Sized) and not len(value))


def _is_off(name: str, value: Any) -> bool:
    return isinstance(value, int | float) and value in _OFF.get(name, ())
