"""A connection to a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from typing import Any

from ..errors import InputError
from .sources import pyarrow


def import_ray() -> Any:
    """Ray with its datasets. Raises InputError that says what to install."""
    pyarrow()
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("work on clusters needs Ray: install tokentrace[ray]") from None
    except Exception as error:  # a broken installation
        raise InputError(f"Ray is installed and cannot be imported: {first_line(error)}") from error
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connected to a cluster inside the block; an existing connection stays."""
    if ray.is_initialized():
        yield
        return
    where = address or os.environ.get("RAY_ADDRESS", "")
    if where.startswith("ray://"):
        raise InputError(
            f"{where} is an address of the Ray Client, which is outside the cluster and its storage: run this on a "
            "node of the cluster, or as a Ray job, with the address 'auto'"
        )
    host, colon, port = where.rpartition(":")
    try:
        if colon and port.isdecimal():
            socket.create_connection((host.strip("[]"), int(port)), timeout=30).close()  # Ray waits for minutes
        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init(address=address, ignore_reinit_error=True, **quiet)
    except Exception as error:  # Ray raises all kinds, also plain Exception
        with contextlib.suppress(Exception):
            ray.shutdown()
        at = f" at {where!r}" if where else ""
        raise InputError(f"there is no Ray{at}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


def first_line(error: BaseException) -> str:
    """An error on one line: those of Ray continue with the tracebacks of other machines."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:600]}" if text else type(error).__name__
