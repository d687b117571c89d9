"""What engines report for each sampled id: the likeliest ids and routed experts."""

import io
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import brief
from ..tokens.ids import check_ids
from ..trajectory.turns import POSITIVE_NOISE
from .errors import EngineAnswerError

Experts = npt.NDArray[Any]
Ranked = Sequence[tuple[int, float | None]]
TOP_LOGPROBS = "top_logprobs"
"""The channel of each token's likeliest ids, as ``(id, logprob)``, best first."""
ROUTED_EXPERTS = "routed_experts"
"""The channel of the experts that computed each token's distribution."""
_IMPOSSIBLE = -9999.0
"""vLLM's logprob of an impossible id: JSON has no infinity."""
ExpertType = Literal["int32", "uint16", "uint8"]
_BAD_ARRAY = "routed_experts must be whole numbers"


def best_ids(
    rows: Iterable[Ranked], count: int, vocab_size: int | None
) -> list[tuple[tuple[int, float], ...]]:
    """The `count` likeliest ids at each position, best first."""
    places = []
    for at, row in enumerate(rows):
        where = f"the likeliest ids at {at}"
        check_ids([one for one, _ in row], where, vocab_size=vocab_size, error=EngineAnswerError)
        if any(logprob is not None and not logprob <= POSITIVE_NOISE for _, logprob in row):
            raise EngineAnswerError(f"{where}: a logprob is above 0")
        possible = [(one, logprob) for one, logprob in row if logprob is not None and logprob > _IMPOSSIBLE]
        if not possible or len(dict(row)) < len(row):
            raise EngineAnswerError(f"{where}: there are none, or one is repeated")
        places.append(tuple(sorted(possible, key=lambda pair: -pair[1])[:count]))
    return places


def npy_experts(data: bytes) -> Experts:
    """Read vLLM's routed experts: an ``.npy`` file, positions × layers × experts."""
    try:
        experts: Experts = np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)
    except Exception as error:  # NumPy parses the header as Python code
        raise EngineAnswerError(f"{_BAD_ARRAY} in an .npy file: {error}") from error
    if experts.ndim != 3 or experts.dtype.kind not in "iu":
        raise EngineAnswerError(f"{_BAD_ARRAY}, positions × layers × experts, not {brief(experts)}")
    return experts


def flat_experts(data: bytes, kind: ExpertType, width: int | None) -> Experts:
    """Read SGLang's routed experts: `width` numbers per position; None for one position."""
    dtype = np.dtype(kind)
    count, extra = divmod(len(data), dtype.itemsize)
    if extra or not count or count % (width or count):
        raise EngineAnswerError(
            f"{_BAD_ARRAY}: {len(data)} bytes are not {width or 'some'} of {dtype} per id"
        )
    return np.frombuffer(data, dtype).reshape(-1, width or count)


def experts_of(experts: Experts, prompt: int, sampled: int) -> list[Any]:
    """The experts of each sampled id: those of the position before it."""
    if sampled and len(experts) not in (sampled, prompt + sampled - 1):
        raise EngineAnswerError(f"routed_experts has {len(experts)} positions for {prompt} + {sampled} ids")
    return list(experts[-sampled:].tolist()) if sampled else []
