"""Server-sent events from bytes that arrive in any pieces."""

from __future__ import annotations

from .errors import EngineAnswerError


class EventReader:
    r"""Returns the data of each event as soon as the event is whole.

    Ignores comments and fields other than ``data``. Raises EngineAnswerError for an event of more than `longest` bytes.

    >>> reader = EventReader()
    >>> reader.feed(b"data: 1\n\nda"), reader.feed(b"ta: 2\r\n"), reader.feed(b"\r\n")
    ([b'1'], [], [b'2'])
    """

    def __init__(self, longest: int | None = None) -> None:
        self._longest = longest
        self._line = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the events that end in this piece."""
        *lines, self._line = (self._line + piece).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
                self._size += len(line) + 1
            elif not line:
                if self._data:
                    events.append(b"\n".join(self._data))
                self._data, self._size = [], 0
        if self._longest is not None and self._size + len(self._line) > self._longest:
            raise EngineAnswerError(f"an event of the stream has more than {self._longest} bytes")
        return events
