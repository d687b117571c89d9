"""The one schedule of waits for an engine: HTTP retries, endpoints of a router and whole runs share it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds to wait after each failure: `first`, then twice as long each time, up to `longest`.

    >>> [Backoff(0.5, 3.0).after(failures) for failures in (1, 2, 3, 4)]
    [0.5, 1.0, 2.0, 3.0]
    """

    first: float
    longest: float

    def after(self, failures: int) -> float:
        """Return the seconds to wait after so many failures in a row."""
        return min(self.first * 2.0 ** min(failures - 1, 60), self.longest)
