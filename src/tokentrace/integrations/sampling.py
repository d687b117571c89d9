"""Sampling parameters as vLLM and SGLang name them, which trainers hand on, as ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ..engines.protocol import SamplingParams
from ..errors import InputError, shown

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
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_tokens": 0,
    "min_new_tokens": 0,
    "ignore_eos": False,
    "n": 1,
    "n_samples": 1,
}
"""What must be as if it were not there, or logprobs would be of another distribution."""


def sampling_of(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters of vLLM or SGLang; InputError names what cannot be honoured, such as stop texts."""
    left = {name: value for name, value in given.items() if name not in _NOT_READ}
    limits = [left.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    seeds = [left.pop(name, None) for name in ("seed", "sampling_seed")]
    values = {name: left.pop(name) for name in ("temperature", "top_p", "top_k") if left.get(name) is not None}
    stops = tuple(left.pop("stop_token_ids", None) or ())
    left = {name: value for name, value in left.items() if value not in (None, [], "", {})}
    if wrong := {name: value for name, value in left.items() if name not in _OFF or value != _OFF[name]}:
        raise InputError(f"the sampling parameters {shown(wrong)} cannot be honoured here: leave them out")
    limit = next((one for one in limits if one is not None), None)
    if limit is None:
        raise InputError("the sampling parameters have no max_tokens: say how long a turn may be")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    seed = next((one for one in seeds if one is not None), None)
    return SamplingParams(limit, seed=seed, stop_token_ids=stops, **values)
