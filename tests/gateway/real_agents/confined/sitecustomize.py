"""Python loads this at startup if its folder is on the path: it forbids connections to other machines."""

import os
import sys

_LOOPBACK = ("127.", "localhost", "::1", "0.0.0.0")


def _watch(event: str, arguments: tuple) -> None:  # type: ignore[type-arg]
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event in ("socket.connect", "socket.sendto"):
        host = arguments[1][0] if isinstance(arguments[1], tuple) else None  # a string is the name of a local socket
    else:
        return
    host = host.decode("ascii", "replace") if isinstance(host, bytes) else host
    if host and not str(host).startswith(_LOOPBACK):
        with open(os.environ["CONFINED_LOG"], "a", encoding="utf-8") as log:
            log.write(f"{event} {host}\n")
        raise OSError(f"{event} {host}: agents under test stay on this machine")


sys.addaudithook(_watch)
