"""The text of each token, where characters are spelled by several."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tokentrace.show.visible import spelled


@given(st.text().map(str.encode) | st.binary(max_size=40), st.lists(st.integers(0, 200)))
def test_bytes_cut_anywhere_are_text_and_numbers(raw: bytes, cuts: list[int]) -> None:
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    pieces = [raw[start:stop] for start, stop in itertools.pairwise(edges)]
    texts = spelled(pieces)
    assert len(texts) == len(pieces)
    chars = raw.decode("utf-8", "surrogateescape")
    expected = (f"⟨{ord(char) - 0xDC00:02X}⟩" if "\udc80" <= char <= "\udcff" else char for char in chars)
    assert "".join(texts) == "".join(expected)


def test_a_character_belongs_to_the_token_it_begins_in() -> None:
    family = "👩‍👧".encode()
    assert spelled([family[:2], family[2:4], family[4:]]) == ["👩", "", "\u200d👧"]
    assert spelled([b"\xf0", b"a"]) == ["⟨F0⟩", "a"]
    assert spelled([b"a\xe2", b"\x82"]) == ["a⟨E2⟩", "⟨82⟩"]
