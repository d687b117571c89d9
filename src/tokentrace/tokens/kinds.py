"""What a token of a stream is: one byte each."""

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


class Part(IntEnum):
    """What a token of a conversation says."""

    SCAFFOLD = 0
    """Nothing of its own: the template's, outside of what an assistant samples."""
    CONTENT = 1
    """What a message says."""
    REASONING = 2
    """What an assistant thinks, with the tags around it."""
    TOOL_CALLS = 3
    """What an assistant calls, with the tags around it."""
    STOP = 4
    """The token that ends an assistant's turn."""
    TOOLS = 5
    """Tool schemas."""
    OTHER = 6
    """Other fields of messages, and template variables."""
