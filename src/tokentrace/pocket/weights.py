"""Weights for the pocket model from elsewhere: a folder that a trainer saved, or its state dict."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import InputError, brief
from .model import Floats, read_safetensors


def weights_from(source: str | Path | Mapping[str, Any]) -> dict[str, Floats]:
    """The arrays of all safetensors of a folder, or copies of the arrays or tensors of a mapping, as float32.

    A copy is made because a trainer changes its tensors in place.
    """
    if isinstance(source, Mapping):
        return {str(name): _array(name, value) for name, value in source.items()}
    if not isinstance(source, str | Path):
        raise InputError(f"weights are a folder of safetensors or a mapping of arrays, not {brief(source)}")
    files = sorted(Path(source).glob("*.safetensors"))
    if not files:
        raise InputError(f"{source} has no safetensors")
    weights: dict[str, Floats] = {}
    for file in files:
        weights |= read_safetensors(file)
    return weights


def _array(name: Any, value: Any) -> Floats:
    if callable(getattr(value, "detach", None)):  # a tensor of torch, on any device and of any type
        value = value.detach().cpu().float().numpy()
    array = np.array(value, dtype=np.float32)
    if not np.isfinite(array).all():
        raise InputError(f"{name}: the new weights are not finite")
    return array
