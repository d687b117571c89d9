"""The gateway's log: a line of JSON a request, without a word of any conversation."""

from __future__ import annotations

import json
import logging
import time
import traceback
from collections.abc import Mapping
from typing import Any, Final

LOGGER: Final = logging.getLogger("tokentrace.gateway")


def log_request(method: str, path: str, status: int, seconds: float, details: Mapping[str, Any]) -> None:
    """Write a line of JSON for a request whose response has ended."""
    line = {"time": round(time.time(), 3), "method": method, "path": path, "status": status}
    level = logging.INFO if status < 500 else logging.WARNING
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, json.dumps({**line, "ms": round(seconds * 1000, 2), **details}, default=str))


def log_failure(error: BaseException) -> None:
    """Log an unforeseen failure: where and of which type, but not its message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = [f"{frame.filename.rsplit('/tokentrace/', 1)[-1]}:{frame.lineno} {frame.name}" for frame in frames[-12:]]
    LOGGER.error(json.dumps({"time": round(time.time(), 3), "failure": type(error).__name__, "where": where}))
