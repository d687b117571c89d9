"""Parses HTML pages: their tags, their content security policy, and the document that they embed."""

import base64
import hashlib
import html
import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import Any

from tokentrace.show import show

EVIL = "</script><img src=x onerror=alert(1)>\"'&<style>*{}</style><!-- ]]> \u202e\x1b[31m\x00 \u2028"
VOID = {"meta", "img", "input", "br", "link"}


def html_page(result: Any, title: str = "", *, tokenizer: Any = None) -> str:
    return show(result, title=title, tokenizer=tokenizer).html


class Page(HTMLParser):
    """Checks that tags nest, and collects tags, scripts, styles and the embedded data."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.inline: dict[str, list[str]] = {"script": [], "style": []}
        self.data = ""
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "style" or (tag == "script" and "type" not in dict(attrs)):
            self.inline[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in self.inline:
            return
        if self.tags[-1][1].get("type") == "application/json":
            self.data += data
        else:
            self.inline[self.open[-1]][-1] += data

    @property
    def policy(self) -> dict[str, list[str]]:
        """The sources that the page allows, by directive."""
        (content,) = (
            str(attributes["content"])
            for tag, attributes in self.tags
            if tag == "meta" and attributes.get("http-equiv") == "Content-Security-Policy"
        )
        return {name: sources for name, *sources in map(str.split, content.split(";"))}


def sources(texts: list[str]) -> list[str]:
    """Hashes of texts as a policy writes them."""
    digests = [hashlib.sha256(text.encode()).digest() for text in texts]
    return [f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests]


def assert_only_its_own_code_runs(text: str) -> None:
    """Assert that a page may run only its own script and style sheet, by hash."""
    page = Page(text)
    assert page.policy == {
        "default-src": ["'none'"],
        "style-src": sources(page.inline["style"]),
        "script-src": sources(page.inline["script"]),
        "base-uri": ["'none'"],
        "form-action": ["'none'"],
    }
    assert len(page.inline["style"]) == len(page.inline["script"]) == 1
    assert all(page.inline["style"] + page.inline["script"])
    tags = [tag for tag, _ in page.tags]
    head = ["html", "head", "meta", "meta", "meta", "meta", "title", "style"]
    assert tags == [*head, "body", "noscript", "p", "script", "script"]
    for _, attributes in page.tags:
        assert not {name for name in attributes if name.startswith("on") or name in ("style", "src", "href", "srcset")}


def read_page(text: str) -> dict[str, Any]:
    """The document embedded in a page."""
    document: dict[str, Any] = json.loads(Page(text).data)
    return document


def read_frame(text: str) -> dict[str, Any]:
    """The document embedded in a notebook's cell."""
    match = re.fullmatch(
        r'<iframe srcdoc="([^"]*)" sandbox="allow-scripts" style="[^"]*" title="tokentrace"></iframe>', text
    )
    assert match, text[:200]
    return read_page(html.unescape(match[1]))


def strings(value: Any) -> Iterator[str]:
    """Every text of a document."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from strings(item)


def said(text: str) -> str:
    """All text of a page's document."""
    return "\n".join(strings(read_page(text)))


COLUMNS = ("message", "hue", "field", "mask", "turn", "version")


def columns(document: dict[str, Any], index: int) -> dict[str, list[Any]]:
    """A track of a document, one entry per token, including those that it shares with its parent."""
    track = document["tracks"][index]
    entries: dict[str, list[Any]] = {name: [] for name in ("id", "text", "control", "logprob", *COLUMNS)}
    ids, texts = document["words"]
    for code in track["tokens"]:
        entries["id"].append(ids[code])
        entries["text"].append(texts[code])
        entries["control"].append(code in document["control"])
    for at in range(0, len(track["runs"]), 7):
        length, *values = track["runs"][at : at + 7]
        for name, value in zip(COLUMNS, values, strict=True):
            entries[name] += [value] * length
    entries["logprob"] = [None] * len(track["tokens"])
    for start, values in track["logprobs"]:
        entries["logprob"][start : start + len(values)] = values
    entries["hue"] = [document["hues"][hue][0] for hue in entries["hue"]]
    entries["field"] = [document["fields"][at] if track["fielded"] else None for at in entries["field"]]
    if track["parent"] >= 0:
        inherited = columns(document, track["parent"])
        entries = {name: [*inherited[name][: track["shared"]], *values] for name, values in entries.items()}
    return entries


def both_sides(document: dict[str, Any], index: int) -> tuple[list[int], list[int]]:
    """The ids of a contrast's base, and those that its hunks make of it."""
    contrast = document["contrasts"][index]
    base = columns(document, contrast["base"])["id"][: contrast["stop"]]
    other = columns(document, contrast["other"])["id"]
    result: list[int] = []
    at = 0
    for first, count in zip(contrast["hunks"][::2], contrast["hunks"][1::2], strict=True):
        for number in range(first, first + count):
            start, stop, other_start, other_stop = document["hunks"][4 * number : 4 * number + 4]
            result += base[at:start] + other[other_start:other_stop]
            at = stop
    result += base[at:]
    return base, result
