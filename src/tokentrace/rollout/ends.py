"""Why rollouts end."""

from enum import StrEnum
from typing import Final


class End(StrEnum):
    """Why a rollout ended."""

    ANSWER = "answer"
    """The model answered without calling anything, and nobody had more to say."""
    USER = "user"
    """The simulated user had heard enough."""
    LENGTH = "length"
    TURNS = "turns"
    TOKENS = "tokens"
    CONTEXT = "context"
    TOOL_TIME = "tool time"
    TIME = "time"
    """The rollout took longer than it may; what was being sampled or run then is not in it."""
    ABORT = "abort"
    BRIDGE = "bridge"
    """The next prompt could not be proven to extend the stream; the notes say why."""
    ENGINE = "engine"
    HUNG = "hung"
    """The reward, the simulated user or a tool's `create` took longer than it may; the notes say which."""
    FAILED = "failed"
    """Something else failed: a tool's `create`, the template, the reward; the notes say what."""


FAILED_ENDS: Final = frozenset({End.ABORT, End.BRIDGE, End.ENGINE, End.HUNG, End.FAILED})
"""Failures: such a rollout has no reward, and counts in no group."""
