"""The text of each token, where characters may be spelled by several of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable


def spelled(pieces: Iterable[bytes]) -> list[str]:
    """The text to show for each token, given the bytes of each.

    Where several tokens spell one character, the first shows it and the others show nothing. Bytes that are no text
    are shown by their numbers.

    >>> spelled([b"na", b"\\xc3", b"\\xafve", b"\\xff"])
    ['na', 'ï', 've', '⟨FF⟩']
    """
    texts: list[str] = []
    open_at, left = 0, b""  # a character that has begun: the token it began in, and its bytes so far
    for at, piece in enumerate(pieces):
        whole = "" if left else _text(piece)
        texts.append(whole)
        if whole:
            continue
        raw, started = left + piece, len(left)
        if not started:
            open_at = at
        offset, left = 0, b""
        while offset < len(raw):
            owner = open_at if offset < started else at
            size = _size(raw[offset])
            char = raw[offset : offset + size]
            if len(char) < size and _may_go_on(char):
                open_at, left = owner, char
                break
            text = _text(char)
            texts[owner] += text or f"⟨{raw[offset]:02X}⟩"
            offset += size if text else 1
    if left:
        texts[open_at] += "".join(f"⟨{byte:02X}⟩" for byte in left)
    return texts


def _size(first: int) -> int:
    """How many bytes a character has that begins with this one; 0 where none does."""
    if first < 0x80:
        return 1
    return 2 if 0xC2 <= first <= 0xDF else 3 if 0xE0 <= first <= 0xEF else 4 if 0xF0 <= first <= 0xF4 else 0


def _may_go_on(begun: bytes) -> bool:
    return all(0x80 <= byte <= 0xBF for byte in begun[1:])


def _text(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return ""
