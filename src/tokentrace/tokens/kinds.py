"""What a token is in a stream or a conversation: one byte each."""

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
    """Text of a later message: a result, a user's words, an assistant's turn from the caller."""
    SCAFFOLD = 3
    """Written by the template around such text, including the generation prompt."""
    SYNTHETIC = 4
    """Inserted to close a turn that was cut off."""


Kinds = npt.NDArray[np.uint8]


class Part(IntEnum):
    """What a token of a conversation belongs to."""

    SCAFFOLD = 0
    """Written by the template, outside of what an assistant samples."""
    CONTENT = 1
    """The content of a message."""
    REASONING = 2
    """An assistant's reasoning, with the tags around it."""
    TOOL_CALLS = 3
    """An assistant's tool calls, with the tags around them."""
    STOP = 4
    """The token that ends an assistant's turn."""
    TOOLS = 5
    """Tool schemas."""
    OTHER = 6
    """Other fields of messages, and template variables."""
