"""Turns in channels, as openai-harmony writes and reads them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai_harmony as harmony
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.parsing.test_streaming import check as check_streams
from tokentrace import Renderer
from tokentrace.parsing.response import ParsedResponse

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "x", "parameters": {"type": "object"}}}
    for name in ("f", "g")
]
START = "<|start|>assistant"
FIXTURE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Said = tuple[str, ...]
"""("reasoning", text), ("content", text) or ("call", name, arguments): what a message comes to."""
# -- what both say


def encode(encoding: harmony.HarmonyEncoding, text: str) -> list[int]:
    """Text in which control tokens are written by name."""
    return encoding.encode(text, allowed_special="all")


def said_by(channel: str | None, recipient: str | None, text: str) -> list[Said]:
    """What a message of the assistant means here; nothing if it is empty and no call."""
    if recipient is not None:
        return [("call", recipient.removeprefix("functions."), text)]
    if not text:
        return []
    return [("reasoning" if channel == "analysis" else "content", text)]


def text_of(message: harmony.Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, harmony.TextContent))


def of_messages(messages: Sequence[harmony.Message]) -> list[Said]:
    assert all(message.author.role is harmony.Role.ASSISTANT for message in messages)
    return [said for one in messages for said in said_by(one.channel, one.recipient, text_of(one))]


def ours(response: ParsedResponse) -> list[Said]:
    said: list[Said] = []
    for part in response.parts:
        if part.call is None:
            said.append((part.kind.value, part.text))
        else:
            call = response.tool_calls[part.call]
            said.append(("call", call.name or "", call.arguments_text))
    return said


def check(renderer: Renderer, encoding: harmony.HarmonyEncoding, ids: list[int], **options: Any) -> ParsedResponse:
    """Parse, whole and streamed: parts do not overlap, and their tokens spell them."""
    response, at = check_streams(renderer, ids, [], **options), 0
    for part in response.parts:
        assert at <= part.span.start
        assert encoding.decode(ids[part.span.start : part.span.stop]) == part.text
        at = part.span.stop
    return response


# -- completions that openai-harmony writes


@dataclass(frozen=True)
class Spoken:
    """A message of the assistant, and how its header is laid out."""

    text: str
    channel: str = "final"
    to: str | None = None
    type: str | None = None
    late: bool = False
    """Whether the recipient comes after the channel."""
    glued: bool = False
    """Whether no white space stands before ``<|constrain|>``."""

    @property
    def said(self) -> list[Said]:
        return said_by(self.channel, self.to, self.text)

    def ids(self, encoding: harmony.HarmonyEncoding) -> list[int]:
        """With its head and its end; by openai-harmony where it writes headers like this."""
        if self.late or self.glued:
            to, kind = f" to={self.to}", f"{'' if self.glued else ' '}{self.type}" if self.type else ""
            named = f"<|channel|>{self.channel}"
            header = f"{START}{named}{to}{kind}" if self.late else f"{START}{to}{named}{kind}"
            body = encoding.encode(self.text, disallowed_special=())
            return [*encode(encoding, f"{header}<|message|>"), *body, *encode(encoding, "<|call|>")]
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, self.text).with_channel(self.channel)
        message = message.with_recipient(self.to) if self.to else message
        return encoding.render(message.with_content_type(self.type) if self.type else message)


def completion(encoding: harmony.HarmonyEncoding, spoken: Sequence[Spoken], end: str | None = None) -> list[int]:
    """A completion: the first head was the prompt's, and the last end may be another."""
    ids = [index for one in spoken for index in one.ids(encoding)]
    head = encode(encoding, START)
    assert ids[: len(head)] == head
    return [*ids[len(head) : -1], *(ids[-1:] if end is None else encode(encoding, end))]


HMM = Spoken("We need the weather.", "analysis")
PREAMBLE = Spoken("Let me look.", "commentary")
F = Spoken('{"city": "Zürich 🦩"}', "commentary", "functions.f", "<|constrain|>json")
G = Spoken('{"a": [1, {"b": null}]}', "commentary", "functions.g", "json")
PYTHON = Spoken("print('<|end|>')\n", "analysis", "python", "code")
SEARCH = Spoken('{"query": "x"}', "analysis", "browser.search", "code")
TURNS: dict[str, list[Spoken]] = {
    "answer": [Spoken("yo")],
    "reasoning and answer": [HMM, Spoken("It is sunny.\n\n")],
    "several thoughts": [HMM, Spoken("Hmm.", "analysis"), Spoken("", "analysis"), Spoken("…", "analysis"), Spoken("x")],
    "call": [HMM, F],
    "content type without constrain": [HMM, G],
    "no content type": [Spoken("{}", "commentary", "functions.f")],
    "recipient after the channel": [HMM, Spoken("{}", "commentary", "functions.f", "<|constrain|>json", late=True)],
    "recipient after, glued": [Spoken("{}", "commentary", "functions.f", "<|constrain|>json", late=True, glued=True)],
    "recipient before, glued": [Spoken("{}", "commentary", "functions.f", "<|constrain|>json", glued=True)],
    "recipient after, no type": [Spoken("{}", "commentary", "functions.f", late=True)],
    "preamble": [HMM, PREAMBLE, F],
    "calls in a row": [HMM, F, G, F],
    "call, thought, call": [F, HMM, G],
    "builtin tools": [HMM, PYTHON, SEARCH],
    "call on the channel of answers": [Spoken("{}", "final", "functions.f", "json")],
    "empty bodies": [
        Spoken("", "analysis"),
        Spoken("", "commentary"),
        Spoken("", "commentary", "functions.f"),
        Spoken(""),
    ],
    "unicode": [Spoken("é\u0301 🦩🪼 \u200b\ufffd\x00", "analysis"), Spoken("日本語\r\n\t")],
    "literal control tokens": [
        Spoken("<|end|><|start|>assistant<|channel|>final<|message|>", "analysis"),
        Spoken('{"a": "<|call|>"}', "commentary", "functions.f", "json"),
        Spoken("<|return|><|call|> <think></think> <tool_call>"),
    ],
    "unknown channel": [Spoken("aside", "notes"), Spoken("done")],
    "tag in a name": [Spoken("{}", "commentary", "functions.f<x>", "json")],
}

PIECES = [
    *("<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *(
        "<think>",
        "</think>",
        "<tool_call>",
        "to=functions.f",
        "analysis",
        "{",
        '"',
        "}",
        "\\",
        "\n",
        " ",
        "🦩",
        "\ufffd",
    ),
]
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=6).map("".join)
values = st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts, max_size=2)), max_size=3)
arguments = st.one_of(values.map(json.dumps), values.map(lambda one: json.dumps(one, ensure_ascii=False)), texts)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}", fullmatch=True)
recipients = st.one_of(names.map("functions.{}".format), st.sampled_from(["python", "browser.search", "browser.open"]))
channel_names = st.sampled_from(["analysis", "commentary", "final", "notes"])
plain = st.builds(Spoken, texts, channel_names)
called = st.builds(
    Spoken,
    arguments,
    channel_names,
    recipients,
    st.sampled_from([None, "json", "code", "<|constrain|>json"]),
    late=st.booleans(),
)
turns = st.lists(st.one_of(plain, called), min_size=1, max_size=5)
