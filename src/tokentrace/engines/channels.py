"""What engines tell of each sampled id beside its logprob, as they write it, checked. Pure: no I/O.

Top logprobs become ``(id, logprob)``, best first. Routed experts become lists of numbers: those that the model used
when it computed what an id was sampled from. Engines write them for every position that was read; the last sampled id
was never read, so each id has those of the position before it.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..errors import shown
from ..tokens.ids import INT32_MAX
from ..trajectory.inputs import POSITIVE_NOISE
from .protocol import EngineAnswerError

IMPOSSIBLE: Final = -9999.0
"""What vLLM writes for the logprob of an id that could not have been drawn; JSON has no infinity."""
_WIRE_TYPES: Final = {"int32": np.int32, "uint16": np.uint16, "uint8": np.uint8}
_ODD_ARRAY: Final = "routed_experts must be base64 of whole numbers"

Alternatives = tuple[tuple[int, float], ...]
Experts = npt.NDArray[Any]


def answered_top(
    rows: Sequence[Iterable[tuple[Any, Any]]], count: int, vocab_size: int | None, what: str
) -> list[Alternatives]:
    """The `count` best of the ids that are told of each place, as pairs of id and logprob in any order.

    Ids that could not have been drawn are left out: no logprob, or one of minus infinity.
    """
    size = INT32_MAX if vocab_size is None else vocab_size
    return [_best(row, count, size, f"{what}[{at}]") for at, row in enumerate(rows)]


def _best(row: Iterable[tuple[Any, Any]], count: int, size: int, what: str) -> Alternatives:
    found: dict[int, float] = {}
    for one, logprob in row:
        if type(one) is not int or not 0 <= one < size:
            raise EngineAnswerError(f"{what}: {shown(one)} is no id")
        if one in found:
            raise EngineAnswerError(f"{what}: id {one} is told twice")
        if logprob is None:
            continue
        if type(logprob) not in (float, int) or not logprob <= POSITIVE_NOISE:
            raise EngineAnswerError(f"{what}: the logprob of id {one} is {shown(logprob)}; logprobs are at most 0")
        if logprob > IMPOSSIBLE:
            found[one] = float(logprob)
    if not found:
        raise EngineAnswerError(f"{what}: no id is told")
    return tuple(sorted(found.items(), key=lambda pair: -pair[1])[:count])


def npy_experts(value: Any) -> Experts:
    """Routed experts as vLLM writes them: base64 of an ``.npy`` file, positions × layers × experts."""
    file = io.BytesIO(_decoded(value))
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ValueError as error:
        raise EngineAnswerError(f"{_ODD_ARRAY} in an .npy file: {error}") from error
    data = file.read()
    if (
        dtype.kind not in "iu"
        or fortran
        or len(shape) != 3
        or int(np.prod(shape, dtype=object)) * dtype.itemsize != len(data)
    ):
        raise EngineAnswerError(f"{_ODD_ARRAY}, positions × layers × experts, not {shape} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


def flat_experts(value: Any, kind: Any, width: int | None) -> Experts:
    """Routed experts as SGLang writes them: base64 of numbers in a row, `width` a position; None for one position."""
    if kind is not None and (not isinstance(kind, str) or kind not in _WIRE_TYPES):
        raise EngineAnswerError(f"routed_experts_dtype must be one of {', '.join(_WIRE_TYPES)}, not {shown(kind)}")
    data, dtype = _decoded(value), np.dtype(_WIRE_TYPES[kind or "int32"])
    count, rest = divmod(len(data), dtype.itemsize)
    if rest or not count or count % (width or count):
        raise EngineAnswerError(
            f"{_ODD_ARRAY}: {len(data)} bytes are not {width or 'some'} of {dtype} for each position"
        )
    return np.frombuffer(data, dtype).reshape(-1, width or count)


def experts_of(found: Experts, prompt: int, sampled: int) -> list[Any]:
    """The experts of each sampled id, out of those of all positions, or of the last that were asked for.

    `EngineAnswerError` where there are neither as many positions as were read nor as many as ids were sampled.
    """
    if not sampled:
        return []
    if len(found) not in (sampled, prompt + sampled - 1):
        raise EngineAnswerError(
            f"routed_experts has {len(found)} positions, where {prompt} ids of prompt were read and {sampled} sampled"
        )
    rows: list[Any] = found[-sampled:].tolist()
    return rows


def _decoded(value: Any) -> bytes:
    if not isinstance(value, str):
        raise EngineAnswerError(f"{_ODD_ARRAY}, not {shown(value)}")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:  # binascii's is one
        raise EngineAnswerError(f"{_ODD_ARRAY}: {error}") from error
