"""Server-sent events out of bytes that arrive in any pieces."""

from __future__ import annotations

from .protocol import EngineAnswerError


class EventReader:
    r"""The data of each event, as soon as the event is whole.

    Comments and fields other than ``data`` are passed over. A line ends with ``\n`` or ``\r\n``. An event may have
    `longest` bytes of data, and a line as many; one that has more is `EngineAnswerError`. None is no limit.

    >>> reader = EventReader()
    >>> reader.feed(b"data: 1\n\nda"), reader.feed(b"ta: 2\r\n"), reader.feed(b"\r\n")
    ([b'1'], [], [b'2'])
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._line = bytearray()
        """The line that has not ended yet."""
        self._data: list[bytes] = []
        self._size = 0
        """How many bytes the data of the event have so far, with a line's end each."""

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that end in this piece."""
        *ends, rest = piece.split(b"\n")
        found = []
        for end in ends:
            self._check(end)
            line = (bytes(self._line) + end if self._line else end).removesuffix(b"\r")
            self._line.clear()
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line) + 1
            elif not line:
                if self._data:
                    found.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        self._check(rest)
        self._line += rest
        return found

    def _check(self, part: bytes) -> None:
        if self._longest is not None and self._size + len(self._line) + len(part) > self._longest:
            raise EngineAnswerError(f"an event of the stream has more than {self._longest} bytes")
