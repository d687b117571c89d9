"""The text of each token, where characters are spelled by several."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tokentrace.tokens.spelling import spelled


@given(st.text(), st.lists(st.integers(0, 200)))
def test_text_cut_anywhere_is_shown_whole(text: str, cuts: list[int]) -> None:
    raw = text.encode()
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    pieces = [raw[start:stop] for start, stop in itertools.pairwise(edges)]
    shown = spelled(pieces)
    assert len(shown) == len(pieces)
    assert "".join(shown) == text


@given(st.lists(st.binary(max_size=6), max_size=12))
def test_bytes_that_are_no_text_are_shown_by_their_numbers(pieces: list[bytes]) -> None:
    raw = b"".join(pieces)
    shown = spelled(pieces)
    assert len(shown) == len(pieces)
    assert "\ufffd" not in "".join(shown) or "\ufffd".encode() in raw
    # reading the numbers back gives the very bytes: nothing is lost, nothing is made up
    said = raw.decode("utf-8", "surrogateescape")
    wanted = "".join(f"⟨{ord(char) - 0xDC00:02X}⟩" if "\udc80" <= char <= "\udcff" else char for char in said)
    assert "".join(shown) == wanted


def test_a_character_belongs_to_the_token_it_begins_in() -> None:
    family = "👩‍👧".encode()
    assert spelled([family[:2], family[2:4], family[4:]]) == ["👩", "", "\u200d👧"]
    assert spelled([b"\xf0", b"a"]) == ["⟨F0⟩", "a"]
    assert spelled([b"a\xe2", b"\x82"]) == ["a⟨E2⟩⟨82⟩", ""]
