"""Why rollouts end."""

from enum import StrEnum


class End(StrEnum):
    ANSWER = "answer"
    """The model answered without a call, and no simulated user replies."""
    USER = "user"
    """The simulated user ended the conversation."""
    LENGTH = "length"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    TOOL_TIME = "tool time"
    TIME = "time"
    """The completion or the tool results that were under way are left out."""
    ABORT = "abort"
    BRIDGE = "bridge"
    """The next prompt could not be proven to extend the stream."""
    ENGINE = "engine"
    HUNG = "hung"
    """The reward, the simulated user or a tool's `create` exceeded its time limit."""
    FAILED = "failed"
    """Something else failed, such as a tool's `create`, the template or the reward."""


FAILED_ENDS = frozenset({End.ABORT, End.BRIDGE, End.ENGINE, End.HUNG, End.FAILED})
"""Such a rollout has no reward and does not count in its group; see its notes."""
