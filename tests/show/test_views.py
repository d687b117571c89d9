"""Views show every token, report what they leave out, and let no content control the browser or the terminal."""

import itertools
import json
import unicodedata
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tests.pages import EVIL
from tests.show.results import LAST_ONLY, rendering
from tokentrace import RenderedTokens, create_renderer
from tokentrace.pocket import POCKET
from tokentrace.show import json_view, plain_view, text_view
from tokentrace.show.document import ORIGINS
from tokentrace.show.results import document_of, edit
from tokentrace.show.visible import spelled, visible


def hostile() -> RenderedTokens:
    """Hostile text in every field of a conversation."""
    call = {"id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": {EVIL: EVIL}}}
    properties = {EVIL: {"type": "string", "description": EVIL}}
    schema = {"name": EVIL, "description": EVIL, "parameters": {"type": "object", "properties": properties}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": EVIL},
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "reasoning_content": EVIL, "tool_calls": [call]},
        {"role": "tool", "content": EVIL, "tool_call_id": EVIL},
    ]
    return create_renderer(POCKET).render(messages, tools=[{"type": "function", "function": schema}])


def terminal(rendered: RenderedTokens, *, color: str | None = "truecolor") -> str:
    console = Console(force_terminal=color is not None, color_system=color, width=100)  # type: ignore[arg-type]
    with console.capture() as printed:
        console.print(text_view(rendered))
    return printed.get()


# -- tracks


def hues(rendered: RenderedTokens) -> list[str]:
    (track,) = document_of(rendered).tracks
    return [ORIGINS[piece.hue].name for piece in track.pieces()]


def test_every_kind_of_token_has_a_hue_and_stops_name_their_messages() -> None:
    expected = "system user reasoning assistant calls result tools scaffold generation"
    assert set(hues(rendering())) == set(expected.split())
    (track,) = document_of(rendering()).tracks
    assert [(card.value, card.more) for card in track.cards] == [("<|end|>", "messages 2, 5, 7, 9")]
    template = "{{ day }}{% for m in messages %}{{ m.content.center(2) }}{% endfor %}"
    renderer = create_renderer(POCKET, "default", chat_template=template, day="Monday")
    assert hues(renderer.render([{"role": "user", "content": "Hello there"}])) == ["variables", "unknown"]


HAVE_A_SIGN = [*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD, *range(0x13430, 0x13440)]
"""Format characters that are visible."""


def test_visible_text_hides_nothing_and_cannot_act() -> None:
    assert visible("a\x1b[31m\x07\u202eb\ud800\n\t") == "a␛[31m␇⟨U+202E⟩b\ufffd\n\t"
    formats = [code for code in range(0x110000) if unicodedata.category(chr(code)) in ("Cf", "Zl", "Zp")]
    fillers = [0x34F, 0x115F, 0x1160, 0x17B4, 0x3164, 0xFFA0, 0x180B, 0xFE0F, 0xE0100]
    for code in [*formats, *fillers]:
        if code not in HAVE_A_SIGN:
            assert visible(f"a{chr(code)}b") == f"a⟨U+{code:04X}⟩b"
    for whole in ("\U0001f469\u200d\u2764\ufe0f\u200d\U0001f469", "می\u200cخواهم", "ᠠ\u180b"):
        assert visible(whole) == whole
    assert visible("\u2764\ufe0f\U000e0100") == "\u2764\ufe0f⟨U+E0100⟩"


def test_an_edit_is_the_smallest_change_and_long_renderings_are_cut_in_terminals() -> None:
    assert edit("", "abXcd", "abYYcd") == ("", "ab", "X", "YY", "cd")
    assert edit("", "aa", "aaa") == ("", "aa", "", "a", "")
    rendered = create_renderer(POCKET).render([{"role": "user", "content": "word " * 300}])
    assert f"{len(rendered) - 100} more tokens" in plain_view(rendered, limit=100)


def test_changes_and_notes_are_listed() -> None:
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning_content": "a <deep> thought"},
        {"role": "user", "content": "Really?"},
    ]
    rendered = create_renderer(POCKET, "default", chat_template=LAST_ONLY, preserve_all_thinking=True).render(messages)
    assert rendered.changes
    (track,) = document_of(rendered).tracks
    assert [(one.old, one.new) for one in track.edits] == [("", "<think>a <deep> thought</think>")]
    assert "a <deep> thought" in terminal(rendered, color=None)
    assert json_view(rendered)["changes"][0]["message"] == 1


# -- terminal and JSON


def test_the_terminal_shows_all_text_marks_sampled_tokens_and_obeys_no_escape_sequence() -> None:
    rendered = rendering()
    plain = terminal(rendered, color=None)
    for word in ("621 tokens", "247 sampled", "Oslo has 425,770", "⏎", "reasoning", "generation prompt"):
        assert word in plain
    assert "\x1b[" in terminal(rendered)
    assert "\x1b[31m" not in terminal(hostile()) + plain_view(hostile())


def test_plain_lines_hold_every_token_and_the_mask() -> None:
    rendered = rendering()
    lines = [line for line in plain_view(rendered).splitlines() if not line.startswith("#")]
    starts = [int(line.split()[0]) for line in lines]
    assert starts == sorted(starts)
    for start, line in zip(starts, lines, strict=True):
        assert (line[7] == "*") == rendered.sampled[start]
    assert sum(1 + line.count("│") for line in lines) == len(rendered)


def test_json_round_trips_and_has_one_entry_per_token() -> None:
    rendered = hostile()
    view = json_view(rendered)
    assert json.loads(json.dumps(view)) == view
    assert view["token_ids"] == rendered.token_ids
    for name in ("tokens", "message_indices", "roles", "fields", "sampled"):
        assert len(view[name]) == len(rendered)
    assert view["turns"][0]["stop_token"] == "<|end|>"
    assert view["turns"][0]["message"] == 2


# -- the texts of tokens


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
