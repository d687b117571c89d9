"""Server-sent events out of bytes that arrive in any pieces."""

from __future__ import annotations


class EventReader:
    r"""The data of each event, as soon as the event is whole.

    Comments and fields other than ``data`` are passed over. A line ends with ``\n`` or ``\r\n``.

    >>> reader = EventReader()
    >>> reader.feed(b"data: 1\n\nda"), reader.feed(b"ta: 2\r\n"), reader.feed(b"\r\n")
    ([b'1'], [], [b'2'])
    """

    def __init__(self) -> None:
        self._tail = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece."""
        if b"\n" not in piece:
            self._tail += piece
            return []
        *lines, self._tail = (self._tail + piece).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found
