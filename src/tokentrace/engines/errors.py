"""Errors of engines, and how long to wait after a failure."""

from ..errors import TokentraceError


class EngineError(TokentraceError):
    """An engine failed, or cannot be used."""


class EngineUnavailable(EngineError):  # noqa: N818
    """The engine is away or too busy. The request may be sent again."""


class EngineRefusal(EngineError):  # noqa: N818
    """The engine refused the request: too long, outside its vocabulary, unknown model."""

    def __init__(self, problem: str, *, status: int | None = None) -> None:
        self.status = status
        super().__init__(problem)


class LogprobKindError(EngineRefusal):
    """The request was not sent: logprobs would not describe the sampled distribution."""


class EngineAnswerError(EngineError):
    """The engine's answer cannot be used."""


def backoff(failures: int, first: float, longest: float) -> float:
    """Return seconds to wait: `first`, then twice as many after each failure, up to `longest`.

    >>> [backoff(failures, 0.5, 3.0) for failures in (1, 2, 3, 4)]
    [0.5, 1.0, 2.0, 3.0]
    """
    return min(first * 2.0 ** min(failures - 1, 60), longest)
