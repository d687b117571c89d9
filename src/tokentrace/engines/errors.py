"""Errors of engines, and how long to wait after a failure."""

from dataclasses import dataclass

from ..errors import TokentraceError


class EngineError(TokentraceError):
    """An engine failed, or cannot be used."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine could not be reached or was too busy. No token was accepted, so the request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request: too long, outside its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


class LogprobKindError(EngineRefusal):
    """The request was not sent, because its logprobs would not describe the sampled distribution."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be used: ids or logprobs are missing or wrong, or it is malformed."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait after each failure: `first`, then twice as long each time, up to `longest`.

    >>> [Backoff(0.5, 3.0).after(failures) for failures in (1, 2, 3, 4)]
    [0.5, 1.0, 2.0, 3.0]
    """

    first: float
    longest: float

    def after(self, failures: int) -> float:
        return min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
