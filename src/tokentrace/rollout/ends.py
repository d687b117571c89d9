"""Why rollouts end."""

from enum import StrEnum
from typing import Final


class End(StrEnum):
    """Why a rollout ended."""

    ANSWER = "answer"
    """The model answered without calling a tool, and there is no simulated user to reply."""
    USER = "user"
    """The simulated user ended the conversation."""
    LENGTH = "length"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    TOOL_TIME = "tool time"
    TIME = "time"
    """The rollout exceeded its time limit. Leaves out the completion or the tool results that were under way."""
    ABORT = "abort"
    BRIDGE = "bridge"
    """The next prompt could not be proven to extend the stream; the notes say why."""
    ENGINE = "engine"
    HUNG = "hung"
    """The reward, the simulated user or a tool's `create` exceeded its time limit; the notes say which."""
    FAILED = "failed"
    """Something else failed: a tool's `create`, the template, the reward; the notes say what."""


FAILED_ENDS: Final = frozenset({End.ABORT, End.BRIDGE, End.ENGINE, End.HUNG, End.FAILED})
"""Failures. Such a rollout has no reward and does not count in its group."""
