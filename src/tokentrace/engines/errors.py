"""What can go wrong with an engine."""

from __future__ import annotations

from ..errors import TokentraceError


class EngineError(TokentraceError):
    """An engine cannot be used, or failed."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine could not be reached or was too busy. No token was accepted, so the request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request: too long, outside its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


class LogprobKindError(EngineRefusal):
    """Not sent: the logprobs would not be those of the distribution that is sampled from."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be used: ids or logprobs are missing or wrong, or it is not an answer."""
