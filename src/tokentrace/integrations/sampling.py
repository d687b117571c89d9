"""Sampling parameters of trainers, which are those of vLLM and SGLang, as ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from typing import Any, Final

from ..engines.protocol import SamplingParams
from ..errors import InputError, brief

_IGNORED: Final = frozenset(
    {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "include_stop_str_in_output"}
    | {"detokenize", "logprobs"}
)
"""Parameters about text, which nobody reads here, and logprobs, which are always requested."""
_OFF: Final[Mapping[str, tuple[float, ...]]] = {
    **dict.fromkeys(("min_p", "presence_penalty", "frequency_penalty", "ignore_eos"), (0,)),
    **dict.fromkeys(("min_tokens", "min_new_tokens"), (0, 1)),
    **dict.fromkeys(("repetition_penalty", "n", "n_samples"), (1,)),
}
"""Values that change nothing. SkyRL and OpenRLHF always set ``min_tokens`` to 1; it is not passed on: a turn may be its
stop token alone."""
_PARAMETERS: Final = ("temperature", "top_p", "top_k", "max_tokens", "stop", "stop_token_ids", "seed", *_OFF)
"""Parameters of vLLM's object that change what is sampled."""


def sampling_of(
    params: Any, *, max_tokens: int | None = None, supports: Sequence[str] = (), allow_raw_logprobs: bool = False
) -> SamplingParams:
    """Sampling parameters of vLLM, SGLang or verl, a mapping or vLLM's object.

    `supports` names optional ones that the engine takes. Raises InputError for what cannot be honoured.
    """
    if not isinstance(params, Mapping):
        if not hasattr(params, "temperature"):
            raise InputError(f"sampling parameters are a mapping of names to values, not {brief(params)}")
        params = {name: getattr(params, name) for name in _PARAMETERS if hasattr(params, name)}
    remaining = {
        name: value
        for name, value in params.items()
        if name not in _IGNORED and value is not None and not (isinstance(value, Sized) and not len(value))
    }
    limits = [remaining.pop(name, None) for name in ("max_tokens", "max_new_tokens")]
    seeds = [remaining.pop(name, None) for name in ("seed", "sampling_seed")]
    stops = remaining.pop("stop_token_ids", ())
    names = ("temperature", "top_p", "top_k", *supports)
    values = {name: remaining.pop(name) for name in names if name in remaining}
    if not isinstance(stops, list | tuple):
        raise InputError(f"stop_token_ids must be a list of ids, not {brief(stops)}")
    off = {name for name, value in remaining.items() if isinstance(value, int | float) and value in _OFF.get(name, ())}
    if wrong := {name: value for name, value in remaining.items() if name not in off}:
        raise InputError(f"the sampling parameters {brief(wrong)} cannot be honoured here: leave them out")
    limit = next((one for one in limits if one is not None), max_tokens)
    if limit is None:
        raise InputError("the sampling parameters have no max_tokens: say how long a turn may be")
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values |= {"stop_token_ids": tuple(stops), "allow_raw_logprobs": allow_raw_logprobs}
    return SamplingParams(limit, seed=next((one for one in seeds if one is not None), None), **values)
