"""What engines report for each sampled id besides its logprob: the likeliest ids and routed experts. Pure."""

import base64
import io
from collections.abc import Iterable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from ..errors import brief
from ..tokens.ids import INT32_MAX
from ..trajectory.turns import POSITIVE_NOISE
from .errors import EngineAnswerError

Experts: TypeAlias = npt.NDArray[Any]
Ranked: TypeAlias = Sequence[tuple[int, float | None]]
"""The likeliest ids at one position, with their logprobs."""
TOP_LOGPROBS: Final = "top_logprobs"
"""The channel of the likeliest ids at each token, as ``(id, logprob)``, best first."""
ROUTED_EXPERTS: Final = "routed_experts"
"""The channel of the experts that computed the distribution of each token."""
_IMPOSSIBLE: Final = -9999.0
"""vLLM's logprob of an id that could not have been drawn; JSON has no infinity."""
_WIRE_TYPES: Final = {"int32": np.int32, "uint16": np.uint16, "uint8": np.uint8}
_BAD_ARRAY: Final = "routed_experts must be base64 of whole numbers"


def best_ids(
    rows: Iterable[Ranked], count: int, vocab_size: int | None, what: str
) -> list[tuple[tuple[int, float], ...]]:
    """Return the `count` likeliest ids at each position, best first. Raises EngineAnswerError."""
    places = []
    for at, row in enumerate(rows):
        where = f"{what}: the likeliest ids at {at}"
        for one, logprob in row:
            if not 0 <= one < (INT32_MAX if vocab_size is None else vocab_size):
                raise EngineAnswerError(f"{where}: {one} is not an id of the vocabulary")
            if logprob is not None and not logprob <= POSITIVE_NOISE:
                raise EngineAnswerError(f"{where}: the logprob of id {one} is {brief(logprob)}; it must be at most 0")
        possible = [(one, logprob) for one, logprob in row if logprob is not None and logprob > _IMPOSSIBLE]
        if not possible or len(dict(row)) < len(row):
            raise EngineAnswerError(f"{where}: there are none, or one is repeated")
        places.append(tuple(sorted(possible, key=lambda pair: -pair[1])[:count]))
    return places


def npy_experts(text: str) -> Experts:
    """Read vLLM's routed experts: base64 of an ``.npy`` file, positions × layers × experts."""
    file = io.BytesIO(_decoded(text))
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
    except ValueError as error:
        raise EngineAnswerError(f"{_BAD_ARRAY} in an .npy file: {error}") from error
    data = file.read()
    size = int(np.prod(shape, dtype=object)) * dtype.itemsize  # the header may claim any size
    if dtype.kind not in "iu" or fortran or len(shape) != 3 or size != len(data):
        raise EngineAnswerError(f"{_BAD_ARRAY}, positions × layers × experts, not {shape} of {dtype}")
    return np.frombuffer(data, dtype).reshape(shape)


def flat_experts(text: str, kind: str | None, width: int | None) -> Experts:
    """Read SGLang's routed experts: base64 of numbers, `width` per position; None for one position."""
    if kind is not None and kind not in _WIRE_TYPES:
        raise EngineAnswerError(f"routed_experts_dtype must be one of {', '.join(_WIRE_TYPES)}, not {brief(kind)}")
    data, dtype = _decoded(text), np.dtype(_WIRE_TYPES[kind or "int32"])
    count, extra = divmod(len(data), dtype.itemsize)
    if extra or not count or count % (width or count):
        raise EngineAnswerError(f"{_BAD_ARRAY}: {len(data)} bytes are not {width or 'some'} of {dtype} per position")
    return np.frombuffer(data, dtype).reshape(-1, width or count)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise EngineAnswerError(f"{_BAD_ARRAY}: {error}") from error


def experts_of(experts: Experts, prompt: int, sampled: int) -> list[Any]:
    """Return the experts of each sampled id: those of the position before it. The engine never reads the last id.

    Raises EngineAnswerError if the number of positions does not fit.
    """
    if sampled and len(experts) not in (sampled, prompt + sampled - 1):
        raise EngineAnswerError(
            f"routed_experts has {len(experts)} positions for {prompt} prompt ids and {sampled} sampled ids"
        )
    return list(experts[-sampled:].tolist()) if sampled else []
