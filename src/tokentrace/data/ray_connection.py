"""A connection to a Ray cluster, for whatever is run there."""

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
    """Ray with its datasets, or InputError with what to install."""
    pyarrow()
    try:
        import ray
        import ray.data
    except ModuleNotFoundError:
        raise InputError("clusters are worked on with Ray: install tokentrace[ray]") from None
    except Exception as error:  # an installation that does not fit together
        raise InputError(f"Ray is installed and cannot be imported: {first_line(error)}") from error
    return ray


@contextlib.contextmanager
def connected(ray: Any, address: str | None) -> Iterator[None]:
    """Connected to a cluster inside the block; a connection that was there before stays."""
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
        with _environ("RAY_BACKEND_LOG_LEVEL", "fatal"):  # else it warns of how its own Ray Data begins actors
            ray.init(
                address=address,
                ignore_reinit_error=True,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except Exception as error:  # Ray raises all kinds, plain Exception among them, when a part of it does not start
        with contextlib.suppress(Exception):
            ray.shutdown()  # what it had started by then
        at = f" at {where!r}" if where else ""
        raise InputError(f"there is no Ray{at}: {first_line(error)}") from error
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _environ(name: str, value: str) -> Iterator[None]:
    """Set an environment variable inside the block, unless it is set already."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name, None)


def first_line(error: BaseException) -> str:
    """What an error says, on one line: those of Ray go on with the tracebacks of other machines."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0][:600]}" if text else type(error).__name__
