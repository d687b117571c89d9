"""What a gateway logs: one line of JSON for each request, without what was said in it."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from typing import Any

LOGGER = logging.getLogger("tokentrace.gateway")


class Log:
    """Writes lines of JSON to the logger ``tokentrace.gateway``."""

    def __init__(self, logger: logging.Logger = LOGGER) -> None:
        self._logger = logger

    def request(self, method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
        """A request was answered, or its stream begun."""
        line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
        level = logging.INFO if status < 500 else logging.WARNING
        if self._logger.isEnabledFor(level):
            self._logger.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))

    def failure(self, error: BaseException) -> None:
        """Something failed that nobody foresaw: where, and of which type, but not with which words."""
        frames = traceback.extract_tb(error.__traceback__)
        where = [
            f"{frame.filename.rsplit('/tokentrace/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-12:]
        ]
        line = {"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}
        self._logger.error(json.dumps(line))
