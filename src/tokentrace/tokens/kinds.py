"""What a token of a stream is: one byte each."""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt


class Kind(IntEnum):
    """Where a token of a stream came from. Only `SAMPLED` ones carry loss."""

    PROMPT = 0
    """Part of the first prompt of a rollout."""
    SAMPLED = 1
    """Returned by an engine."""
    CONTEXT = 2
    """Text of a message that came later: a tool's result, a user's words, an assistant's turn put in by the caller."""
    SCAFFOLD = 3
    """Written by the template around it, the generation prompt included."""
    SYNTHETIC = 4
    """Put in to close a turn that was cut off."""


Kinds = npt.NDArray[np.uint8]
