"""The views show every token, say what they leave out, and let no content act on the reader's browser or terminal."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from tests.conversations import CONVERSATIONS
from tokentrace import RenderedTokens, create_renderer
from tokentrace.pocket import EXAMPLE, POCKET
from tokentrace.show import html_fragment, html_page, json_view, plain_view, text_view
from tokentrace.show.html import rows_page
from tokentrace.show.pieces import Kind, blocks, counts, edited, pieces, stops, token_texts
from tokentrace.tokens.visible import visible

EVIL = "</script><img src=x onerror=alert(1)>\"'&<style>*{}</style><!-- ]]> \u202e\x1b[31m\x00 \u2028"
VOID = {"meta", "img", "input", "br", "link", "rect"}


class Page(HTMLParser):
    """Checks that tags nest, and gathers what a browser would see."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.shown: list[str] = []
        self.scripts: list[str] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        """What a browser would run or apply, if it may."""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "style" or (tag == "script" and "type" not in dict(attrs)):
            self.inline[tag].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in self.inline and "type" not in self.tags[-1][1]:
            self.inline[self.open[-1]][-1] += data
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif not self.open or self.open[-1] not in ("style", "u"):
            self.text.append(data)
            if "section" in self.open and "s" in self.open:
                self.shown.append(data)

    @property
    def policy(self) -> dict[str, list[str]]:
        """What the page allows, by directive."""
        (content,) = (
            str(attributes["content"])
            for tag, attributes in self.tags
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        )
        return {name: sources for name, *sources in map(str.split, content.split(";"))}


def sources(texts: list[str]) -> list[str]:
    """Texts as a policy names them."""
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests] or ["'none'"]


def assert_only_its_own_code_runs(text: str) -> None:
    """The law of every page that we write: its own script and style sheet, by hash, and nothing else."""
    page = Page(text)
    assert page.policy == {
        "default-src": ["'none'"],
        "style-src": sources(page.inline["style"]),
        "script-src": sources(page.inline["script"]),
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert all(page.inline["style"])
    for tag, attributes in page.tags:
        assert attributes.get("type") == "application/json" or tag != "script" or not attributes
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src", "href", "srcset")}
        assert not [value for value in attributes.values() if "javascript:" in (value or "") and tag != "meta"]


def example() -> RenderedTokens:
    given = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    return create_renderer(POCKET).render(given["messages"], tools=given["tools"], add_generation_prompt=True)


def hostile() -> RenderedTokens:
    """Hostile text in every place that a conversation has."""
    call = {"id": EVIL, "type": "function", "function": {"name": EVIL, "arguments": {EVIL: EVIL}}}
    properties = {EVIL: {"type": "string", "description": EVIL}}
    schema = {"name": EVIL, "description": EVIL, "parameters": {"type": "object", "properties": properties}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": EVIL},
        {"role": "user", "content": EVIL},
        {"role": "assistant", "content": EVIL, "reasoning_content": EVIL, "tool_calls": [call]},
        {"role": "tool", "content": EVIL, "tool_call_id": EVIL},
    ]
    rendered = create_renderer(POCKET).render(messages, tools=[{"type": "function", "function": schema}])
    rendered.notes.append(f"a note {EVIL}")
    return rendered


def terminal(rendered: RenderedTokens, *, color: bool = True) -> str:
    file = io.StringIO()
    Console(file=file, force_terminal=color, color_system="truecolor" if color else None, width=100).print(
        text_view(rendered)
    )
    return file.getvalue()


# -- pieces


@pytest.mark.parametrize("name", ["agentic", "content_emoji", "calls_parallel_answered", "reasoning_mixed"])
def test_pieces_cover_every_token_once_and_agree_with_its_arrays(name: str) -> None:
    given = CONVERSATIONS[name]
    rendered = create_renderer(POCKET).render(given.messages, tools=given.tools)
    at = 0
    for piece in pieces(rendered):
        assert piece.start == at < piece.stop
        at = piece.stop
        assert set(rendered.sampled[piece.start : piece.stop]) == {piece.sampled}
        assert set(rendered.fields[piece.start : piece.stop]) == {piece.field}
        assert set(rendered.message_indices[piece.start : piece.stop]) == {piece.message}
    assert at == len(rendered)
    assert sum(tokens for tokens, _ in counts(rendered).values()) == len(rendered)
    assert sum(drawn for _, drawn in counts(rendered).values()) == int(rendered.mask.sum())
    assert sum(block.tokens for block in blocks(rendered)) == len(rendered)
    assert "".join(token_texts(rendered)) == rendered.text


def test_every_kind_is_told_apart() -> None:
    kinds = {(piece.kind, piece.role, piece.field.split(".")[0]) for piece in pieces(example())}
    assert {kind for kind, _, _ in kinds} == set(Kind) - {Kind.UNKNOWN, Kind.VARIABLES}
    assert (Kind.REASONING, "assistant", "reasoning_content") in kinds
    assert (Kind.CALLS, "assistant", "tool_calls") in kinds
    assert (Kind.RESULT, "tool", "content") in kinds
    assert (Kind.PROMPT, None, "generation_prompt") in kinds


def test_unknown_origins_and_template_variables_have_kinds_of_their_own() -> None:
    template = "{{ day }}{% for m in messages %}{{ m.content.encode().decode() }}{% endfor %}"
    rendered = create_renderer(POCKET, "default", chat_template=template, day="Monday").render(
        [{"role": "user", "content": "Hello there"}]
    )
    assert [piece.kind for piece in pieces(rendered)] == [Kind.VARIABLES, Kind.UNKNOWN]


def test_stops_name_the_token_and_the_messages_it_ended() -> None:
    assert stops(example()) == {"<|end|>": [2, 5, 7, 9]}


def test_characters_of_several_tokens_are_shown_once() -> None:
    rendered = create_renderer(POCKET).render([{"role": "user", "content": "a 🗼 b"}])
    texts = token_texts(rendered)
    assert "🗼" in "".join(texts)
    assert "" in texts
    assert not any("\ufffd" in text for text in texts)


def test_visible_text_cannot_act() -> None:
    assert visible("a\x1b[31m\x07\u202eb\ud800\n\t") == "a␛[31m␇⟨U+202E⟩b\ufffd\n\t"


def test_an_edit_is_what_was_taken_out_and_put_in() -> None:
    assert edited("abXcd", "abYYcd") == ("ab", "X", "YY", "cd")
    assert edited("aa", "aaa") == ("aa", "", "a", "")


# -- HTML


@pytest.mark.parametrize("make", [html_page, html_fragment])
def test_html_is_well_formed_and_holds_the_whole_text(make: Any) -> None:
    rendered = example()
    page = Page(make(rendered))
    assert "".join(page.shown) == rendered.text


@pytest.mark.parametrize("make", [html_page, html_fragment])
def test_html_refers_to_nothing_outside(make: Any) -> None:
    text = make(example())
    assert not re.search(r"https?://|//[a-z]|@import|url\(", re.sub(r"(?m)^\s*//.*$", "", text))
    for _, attributes in Page(text).tags:
        assert not {"src", "href", "srcset", "action"} & set(attributes)


@pytest.mark.parametrize("make", [lambda: html_page(example()), lambda: html_page(hostile(), EVIL)])
def test_a_page_runs_and_applies_nothing_but_its_own_by_hash(make: Callable[[], str]) -> None:
    assert_only_its_own_code_runs(make())


def test_a_page_of_rows_runs_and_applies_nothing_but_its_own_by_hash() -> None:
    assert_only_its_own_code_runs(rows_page([(EVIL, hostile()), ("two", example())], EVIL))


def test_colours_by_message_are_classes_of_the_style_sheet() -> None:
    """A style attribute would be blocked: each class that a row has must be one that the sheet gives a hue."""
    page = Page(html_page(example()))
    rows = {attributes["class"] for tag, attributes in page.tags if tag == "section"}
    assert len(rows) > 3
    (sheet,) = page.inline["style"]
    for name in rows:
        assert f".tt .{str(name).split()[1]}{{--h:" in sheet
    many = create_renderer(POCKET).render([{"role": "user", "content": "a"}] * 40)
    for attributes in (found for tag, found in Page(html_page(many)).tags if tag == "section"):
        assert f".tt .{str(attributes['class']).split()[1]}{{--h:" in sheet


@pytest.mark.parametrize("make", [lambda r: html_page(r, EVIL), html_fragment])
def test_html_escapes_hostile_content(make: Any) -> None:
    text = make(hostile())
    page = Page(text)
    assert {tag for tag, _ in page.tags}.isdisjoint({"img", "iframe", "object", "link", "base"})
    assert sum(tag == "script" for tag, _ in page.tags) in (0, 2)
    assert sum(tag == "style" for tag, _ in page.tags) == 1
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "\x1b" not in text
    assert "\x00" not in text
    assert "\u202e" not in text
    assert "onerror=alert(1)" in "".join(page.text)


def test_the_page_knows_every_token_for_its_tooltips() -> None:
    rendered = hostile()
    page = Page(html_page(rendered))
    data = json.loads(page.scripts[0])
    assert data["ids"] == rendered.token_ids
    assert [data["fields"][piece[3]] for piece in data["pieces"]] == [p.field for p in pieces(rendered)]
    assert [data["texts"][str(index)] for index in data["ids"]] == rendered.tokens()
    inside = [attributes.get("class", "") for tag, attributes in page.tags if tag == "s"]
    assert len(inside) == len(data["pieces"]) + 3  # three in the key


def test_long_renderings_are_cut_and_say_so() -> None:
    rendered = create_renderer(POCKET).render([{"role": "user", "content": "word " * 300}])
    for text in (html_page(rendered, limit=100), html_fragment(rendered, limit=100)):
        assert f"Showing the first 100 of {len(rendered)} tokens" in text
    assert len(json.loads(Page(html_page(rendered, limit=100)).scripts[0])["ids"]) == 100
    assert f"{len(rendered) - 100} more tokens" in plain_view(rendered, limit=100)
    assert "Showing the first" not in html_page(rendered)


def test_a_page_of_twenty_thousand_tokens_stays_small() -> None:
    turns = [
        {"role": role, "content": "The answer is 42, as ever. " * 20}
        for _ in range(60)
        for role in ("user", "assistant")
    ]
    rendered = create_renderer(POCKET).render(turns)
    assert len(rendered) > 20_000
    assert len(html_page(rendered)) < 60 * len(rendered)


def test_changes_and_notes_are_listed() -> None:
    template = (
        "{% for m in messages %}{{ '<|turn|>' + m.role + '\n' }}"
        "{% if loop.last and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}"
        "{{ m.content + '<|end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|turn|>assistant\n' }}{% endif %}"
    )
    messages = [
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "Because.", "reasoning_content": "a <deep> thought"},
        {"role": "user", "content": "Really?"},
    ]
    rendered = create_renderer(POCKET, "default", chat_template=template, preserve_all_thinking=True).render(messages)
    rendered.notes.append("something to know")
    assert rendered.changes
    for text in (html_page(rendered), html_fragment(rendered)):
        assert "<ins>&lt;think&gt;a &lt;deep&gt; thought&lt;/think&gt;</ins>" in text
        assert "something to know" in text
    assert "a <deep> thought" in terminal(rendered, color=False)
    assert "# note: something to know" in plain_view(rendered)
    assert json_view(rendered)["changes"][0]["message"] == 1


def test_notebooks_show_the_fragment() -> None:
    rendered = example()
    assert rendered._repr_html_() == html_fragment(rendered)


# -- terminal and JSON


def test_the_terminal_shows_all_text_and_marks_what_is_sampled() -> None:
    rendered = example()
    plain = terminal(rendered, color=False)
    for word in ("621 tokens", "247 sampled", "Oslo has 425,770", "⏎", "reasoning", "generation prompt"):
        assert word in plain
    assert "\x1b[" in terminal(rendered)


@pytest.mark.parametrize("show", [terminal, plain_view])
def test_no_escape_sequence_of_the_content_reaches_the_terminal(show: Any) -> None:
    assert "\x1b[31m" not in show(hostile())


def test_plain_lines_hold_every_token_and_the_mask() -> None:
    rendered = example()
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
