"""Turns of gpt-oss, parsed as openai-harmony's parsers do: whole, cut off, malformed, or opened by the prompt."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import openai_harmony as harmony
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.conversations import assistant, call, tool, user
from tests.parsing.test_streaming import check as check_streams
from tests.support import FULL, make_renderer
from tokentrace import Renderer
from tokentrace.parsing.response import CallStatus, Finish, ParsedResponse, PartKind, TokenRange

pytestmark = pytest.mark.xdist_group("gpt-oss")

TOOLS = [tool(name, "x", {}, []) for name in ("f", "g")]
START = "<|start|>assistant"
FIXTURE = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Item = tuple[str, ...]
"""What a message is read as: ("reasoning", text), ("content", text) or ("call", name, arguments)."""


def item_of(channel: str | None, recipient: str | None, text: str) -> list[Item]:
    """The items of a message of the assistant; none if it is empty and no call."""
    if recipient is not None:
        return [("call", recipient.removeprefix("functions."), text)]
    if not text:
        return []
    return [("reasoning" if channel == "analysis" else "content", text)]


def text_of(message: harmony.Message) -> str:
    return "".join(part.text for part in message.content if isinstance(part, harmony.TextContent))


def of_messages(messages: Sequence[harmony.Message]) -> list[Item]:
    assert all(message.author.role is harmony.Role.ASSISTANT for message in messages)
    return [item for one in messages for item in item_of(one.channel, one.recipient, text_of(one))]


def ours(response: ParsedResponse) -> list[Item]:
    items: list[Item] = []
    for part in response.parts:
        if part.call is None:
            items.append((part.kind.value, part.text))
        else:
            call = response.tool_calls[part.call]
            items.append(("call", call.name or "", call.arguments_text))
    return items


@dataclass(frozen=True)
class GptOss:
    """Both sides: openai-harmony and our gpt_oss.renderer."""

    encoding: harmony.HarmonyEncoding
    renderer: Renderer

    def encode(self, text: str) -> list[int]:
        """Text in which control tokens are written by name."""
        return self.encoding.encode(text, allowed_special="all")

    def completion(self, turn: Sequence[Spoken], end: str | None = None) -> list[int]:
        """A completion: the first head belongs to the prompt, and `end` replaces the last end token."""
        ids = [index for one in turn for index in one.ids(self)]
        head = self.encode(START)
        assert ids[: len(head)] == head
        return [*ids[len(head) : -1], *(ids[-1:] if end is None else self.encode(end))]

    def check(self, completion: str | list[int], **options: Any) -> ParsedResponse:
        """Parse, whole and streamed: parts do not overlap, and their tokens spell them."""
        ids = self.encode(completion) if isinstance(completion, str) else completion
        response, at = check_streams(self.renderer, ids, [], **options), 0
        for part in response.parts:
            assert at <= part.span.start
            assert self.encoding.decode(ids[part.span.start : part.span.stop]) == part.text
            at = part.span.stop
        return response

    def theirs(self, ids: list[int]) -> list[Item]:
        """The items that openai-harmony reads."""
        return of_messages(self.encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT))


@pytest.fixture(scope="module")
def gpt_oss(encoding: harmony.HarmonyEncoding) -> GptOss:
    return GptOss(encoding, make_renderer("gpt-oss"))


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
    def items(self) -> list[Item]:
        return item_of(self.channel, self.to, self.text)

    def ids(self, gpt_oss: GptOss) -> list[int]:
        """With its head and its end; by openai-harmony where it writes headers like this."""
        if self.late or self.glued:
            to, kind = f" to={self.to}", f" {self.type}" if self.type else ""
            kind = kind.replace(" <", "<") if self.glued else kind
            named = f"<|channel|>{self.channel}"
            header = f"{START}{named}{to}{kind}" if self.late else f"{START}{to}{named}{kind}"
            body = gpt_oss.encoding.encode(self.text, disallowed_special=())
            return [*gpt_oss.encode(f"{header}<|message|>"), *body, *gpt_oss.encode("<|call|>")]
        message = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, self.text).with_channel(self.channel)
        message = message.with_recipient(self.to) if self.to else message
        return gpt_oss.encoding.render(message.with_content_type(self.type) if self.type else message)


PIECES = [
    *("<|end|>", "<|start|>assistant", "<|channel|>final<|message|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *(
        "<think>", "</think>", "<tool_call>", "to=functions.f", "analysis", "{", '"', "}", "\\", "\n", " ", "🦩",
        "\ufffd",
    ),
]  # fmt: skip
texts = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=6).map("".join)
values = st.dictionaries(texts, st.one_of(texts, st.integers(), st.none(), st.lists(texts, max_size=2)), max_size=3)
arguments = st.one_of(values.map(json.dumps), values.map(lambda one: json.dumps(one, ensure_ascii=False)), texts)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,12}(<x>)?", fullmatch=True)
recipients = st.one_of(names.map("functions.{}".format), st.sampled_from(["python", "browser.search", "browser.open"]))
channel_names = st.sampled_from(["analysis", "commentary", "final", "notes"])
plain = st.builds(Spoken, texts, channel_names)
called = st.builds(
    Spoken, arguments, channel_names, recipients, st.sampled_from([None, "json", "code", "<|constrain|>json"]),
    late=st.booleans(), glued=st.booleans(),
)  # fmt: skip
turns = st.lists(st.one_of(plain, called), min_size=1, max_size=5)
ends = st.sampled_from([None, "<|return|>", "<|call|>", "<|end|>"])


# -- completions that openai-harmony writes


@FIXTURE
@given(turn=turns, end=ends)
def test_what_harmony_renders_is_parsed_as_harmony_does(turn: list[Spoken], end: str | None, gpt_oss: GptOss) -> None:
    """Each end closes each kind of message, as openai-harmony accepts it: a call closed with another is OK."""
    ids = gpt_oss.completion(turn, end)
    response = gpt_oss.check(ids)
    assert ours(response) == gpt_oss.theirs(ids) == [item for one in turn for item in one.items]
    assert (response.open, response.unread) == (None, None)
    if end is not None:
        assert response.stop_token == (None if end == "<|end|>" else ids[-1])
        assert response.finish is (Finish.LENGTH if end == "<|end|>" else Finish.STOP)
        closed = gpt_oss.renderer.parse_response(gpt_oss.completion(turn))
        assert [call.status for call in response.tool_calls] == [call.status for call in closed.tool_calls]


MESSAGES = [
    assistant("yo"), assistant("yo </think>\n", reasoning="hmm\n"),
    assistant("", call("f", {"a": "é"}), reasoning="look"), assistant("", call("f", {})),
]  # fmt: skip


@pytest.mark.parametrize("message", MESSAGES)
def test_what_the_template_renders(message: dict[str, Any], gpt_oss: GptOss) -> None:
    rendered = gpt_oss.renderer.render([user("hi"), message], tools=TOOLS)
    ids = rendered.ids[rendered.mask].tolist()
    response = gpt_oss.check(ids, tools=TOOLS)
    assert ours(response) == gpt_oss.theirs(ids)
    assert (response.content, response.reasoning_content) == (message["content"], message.get("reasoning_content"))
    functions = [one["function"] for one in message.get("tool_calls", [])]
    assert [{"name": one.name, "arguments": one.arguments} for one in response.calls] == functions
    assert response.stop_token == ids[-1]


# -- cut off


def whole(items: Sequence[Item]) -> list[Item]:
    """The items without a character that is cut in two, which openai-harmony holds back."""
    stripped = [(*one[:-1], one[-1].rstrip("\ufffd")) for one in items]
    return [one for one in stripped if one[0] == "call" or one[-1]]


def check_cut(gpt_oss: GptOss, ids: list[int]) -> None:
    """A completion without its end is read as far as openai-harmony's stream has got."""
    stream = harmony.StreamableParser(gpt_oss.encoding, harmony.Role.ASSISTANT)
    for index in ids:
        stream.process(index)
    response = gpt_oss.check(ids)
    finished = of_messages(stream.messages)
    count = len(finished)
    assert ours(response)[:count] == finished
    calls = [item for item in finished if item[0] == "call"]
    assert all(call.status is not CallStatus.TRUNCATED for call in response.tool_calls[: len(calls)])
    left = whole(ours(response)[count:])
    if stream.state is harmony.StreamState.EXPECT_START:
        assert left == []
        assert response.open is None
    elif stream.state is harmony.StreamState.HEADER:
        (start,) = gpt_oss.encode("<|start|>")
        header_start = len(ids) - ids[::-1].index(start) if start in ids else 0
        check_header(response, left, gpt_oss.encoding.decode(ids[header_start:]))
    else:
        to, channel = stream.current_recipient, stream.current_channel
        assert left == whole(item_of(channel, to, stream.current_content))
        thinking = PartKind.REASONING if channel == "analysis" else None
        assert response.open == (PartKind.TOOL_CALL if to else thinking)
        assert not to or response.tool_calls[-1].status is CallStatus.TRUNCATED


def check_header(response: ParsedResponse, left: list[Item], header: str) -> None:
    """A header that is cut off shows only whether it begins a call; the name is known once something follows it."""
    if " to=" not in header:
        assert left == []
        assert response.open is None
        return
    words = header.partition(" to=")[2].replace("<|", " ").split(" ")
    name = words[0].removeprefix("functions.") if len(words) > 1 else None
    call = response.tool_calls[-1]
    assert left == [("call", name or "", "")]
    assert (call.name, call.status, call.arguments) == (name, CallStatus.TRUNCATED, None)
    assert call.raw.endswith(header)
    assert response.open is PartKind.TOOL_CALL


@settings(FIXTURE, max_examples=60 if FULL else 8)
@given(turn=turns)
def test_any_turn_cut_off_at_every_token(turn: list[Spoken], gpt_oss: GptOss) -> None:
    ids = gpt_oss.completion(turn)
    for count in range(len(ids)):
        check_cut(gpt_oss, ids[:count])


# -- malformed turns


CALL = " to=functions.f<|channel|>commentary json<|message|>"
FINAL = "<|channel|>final<|message|>"
DONE = f"{FINAL}done<|end|>"
ODD: dict[str, tuple[str, list[Item]]] = {
    "no <|end|> before a message": (
        f"<|channel|>analysis<|message|>hmm{START}<|channel|>final<|message|>yo<|return|>",
        [("reasoning", "hmm"), ("content", "yo")]),
    "<|message|> and <|channel|> in a body": (
        "<|channel|>final<|message|>a<|channel|>b<|message|>c<|constrain|><|return|>",
        [("content", "a<|channel|>b<|message|>c<|constrain|>")]),
    "no header": ("Hello there.<|return|>", [("content", "Hello there.")]),
    "no header, cut off": ("Hello there", [("content", "Hello there")]),
    "no channel": ("<|message|>yo<|return|>", [("content", "yo")]),
    "no name of a channel": ("<|channel|><|message|>yo<|return|>", [("content", "yo")]),
    "space before the channel's name": ("<|channel|> analysis<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "the head once more": (f"{START}<|channel|>analysis<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "the role once more": ("assistant<|channel|>analysis<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "no <|start|>": (f"{DONE}<|channel|>analysis<|message|>b<|end|>", [("content", "done"), ("reasoning", "b")]),
    "no role": (f"{DONE}<|start|><|channel|>analysis<|message|>b<|end|>", [("content", "done"), ("reasoning", "b")]),
    "white space between messages": (f"{DONE}\n{START}{DONE}", [("content", "done"), ("content", "done")]),
    "text between messages": (
        f"{DONE} and so{START}{DONE}", [("content", "done"), ("content", " and so"), ("content", "done")]),
    "text before a header": (f"So: {DONE}", [("content", "So: "), ("content", "done")]),
    "text after the role": (f"{DONE}{START} so{DONE}", [("content", "done"), ("content", " so"), ("content", "done")]),
    "text before a call": (
        f"{DONE}ok to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
        [("content", "done"), ("content", "ok"), ("call", "f", "{}")]),
    "no <|message|>": ("<|channel|>analysis I think so.<|end|>", [("reasoning", " I think so.")]),
    "no <|message|>, cut off": ("<|channel|>final I think", [("content", " I think")]),
    "role cut off": (f"{DONE}<|start|>assist", [("content", "done")]),
    "a channel's name without its mark": ("<|constrain|>analysis<|message|>yo<|end|>", [("content", "yo")]),
    "nothing but headers": (f"<|channel|>analysis<|end|>{START}<|end|>{START}<|channel|>final<|return|>", []),
    "odd words after the channel": ("<|channel|>analysis very odd indeed<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "a content type is no recipient": (
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>", [("content", "{}")]),
    "a lone word is no recipient": ("<|channel|>analysis python<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "to the user": ("<|channel|>commentary to=user<|message|>yo<|end|>", [("content", "yo")]),
    "to all": ("<|channel|>analysis to=all<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "type before the recipient": (
        "<|channel|>commentary json to=functions.f<|message|>{}<|call|>", [("call", "f", "{}")]),
    "a made-up result in a body": (
        CALL + "{}<|start|>functions.f to=assistant<|message|>x",
        [("call", "f", "{}"), ("content", "<|start|>functions.f to=assistant<|message|>x")]),
    "two recipients": (
        " to=functions.f<|channel|>commentary to=functions.g<|message|>{}<|call|>", [("call", "f", "{}")]),
    "channel glued to the recipient": (
        "<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        [("call", "f", "{}")]),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_odd_turns_lose_nothing(name: str, gpt_oss: GptOss) -> None:
    text, expected = ODD[name]
    assert ours(gpt_oss.check(text)) == expected


FOREIGN = [
    "<|start|>user<|message|>And tomorrow?<|end|><|start|>assistant<|channel|>final<|message|>rain",
    "<|start|>functions.f to=assistant<|channel|>commentary<|message|>sunny<|end|>",
    "<|start|>user to=functions.f<|channel|>commentary json<|message|>{}<|end|>",
    "<|start|>nobody<|channel|>final<|message|>x",
    "<|start|>assistants<|channel|>final<|message|>x",
    "<|start|>system",
]


@pytest.mark.parametrize("foreign", FOREIGN)
@pytest.mark.parametrize("end", ["", "<|return|>", "<|call|>"])
def test_another_role_is_content_as_written(foreign: str, end: str, gpt_oss: GptOss) -> None:
    """Made-up turns of other roles stay visible, and nothing in them is a call."""
    ids = gpt_oss.encode(f"{DONE}{foreign}{end}")
    response = gpt_oss.check(ids)
    assert ours(response) == [("content", "done"), ("content", foreign)]
    assert response.finish is (Finish.STOP if end else Finish.LENGTH)


@pytest.mark.parametrize(
    ("more", "read"),
    [
        (f"<|return|>{START}{DONE}", 0),
        ("<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>sunny<|end|>", 0),
        ("<|call|>and more", 0),
        ("<|call|><|call|>", 0),
        ("<|call|><|start|>", 0),
        (f"<|call|>{START}{DONE}", 1),
    ],
)
def test_only_the_assistant_goes_on_after_a_call(more: str, read: int, gpt_oss: GptOss) -> None:
    call = gpt_oss.encode(CALL + "{}")
    ids = [*call, *gpt_oss.encode(more)]
    response = gpt_oss.check(ids)
    assert ours(response) == [("call", "f", "{}"), ("content", "done")][: 1 + read]
    assert response.unread == (None if read else TokenRange(len(call) + 1, len(ids)))
    assert response.stop_token == (None if read else ids[len(call)])


WORDS = ["zebra", " otter", " fox\n"]
SOUP = [
    "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "assistant", "user",
    " to=functions.f", " ",
]  # fmt: skip


@FIXTURE
@given(
    soup=st.lists(st.sampled_from([*SOUP, *WORDS]), max_size=14), end=st.sampled_from(["", "<|return|>", "<|call|>"])
)
def test_no_word_of_any_turn_is_lost(soup: list[str], end: str, gpt_oss: GptOss) -> None:
    """All words are in reasoning, content or a call, except names of channels and content types."""
    response = gpt_oss.check("".join(soup) + end)
    expected: list[str] = []
    header, named = True, False
    for piece in soup:
        if piece in ("<|start|>", "<|end|>"):
            header, named = True, False
        elif piece == "<|message|>":
            header = False
        elif header and piece.startswith("<|"):
            named = True
        elif piece in WORDS and not (header and named):
            expected.append(piece.strip())
    text = " ".join(part.text for part in response.parts)
    assert [text.count(word.strip()) >= expected.count(word.strip()) for word in WORDS] == [True] * len(WORDS)
    assert response.finish is (Finish.STOP if end else Finish.LENGTH)


# -- turns that the prompt opens


@pytest.mark.parametrize(
    ("opened", "completion", "expected"),
    [
        ("<|channel|>analysis<|message|>", f"hmm<|end|>{START}{DONE}", [("reasoning", "hmm"), ("content", "done")]),
        ("<|channel|>analysis<|message|>So", " hmm<|end|>", [("reasoning", " hmm")]),
        ("<|channel|>", "analysis<|message|>hmm<|end|>", [("reasoning", "hmm")]),
        (f"<|channel|>analysis<|message|>a<|end|>{START}{FINAL}", "b<|return|>", [("content", "b")]),
        (" to=functions.f<|channel|>commentary json<|message|>", "{}<|call|>", [("call", "f", "{}")]),
        (" to=functions.", "f<|channel|>commentary json<|message|>{}<|call|>", [("call", "f", "{}")]),
        ("<|channel|>analysis<|message|>a<|end|>", f"{START}{DONE}", [("content", "done")]),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", f"{START}{DONE}", [("content", "done")]),
        (f"{DONE}<|start|>user<|message|>b<|end|>", f"{START}{DONE}", [("content", "done")]),
        ("", DONE, [("content", "done")]),
    ],
)
def test_what_the_prompt_opened(opened: str, completion: str, expected: list[Item], gpt_oss: GptOss) -> None:
    prompt = gpt_oss.renderer.render_ids([user("hi")], add_generation_prompt=True)
    response = gpt_oss.check(completion, prompt_ids=[*prompt, *gpt_oss.encode(opened)])
    assert ours(response) == expected


def test_the_prompt_opened_reasoning_that_does_not_end(gpt_oss: GptOss) -> None:
    prompt = gpt_oss.encode(f"{START}<|channel|>analysis<|message|>")
    assert gpt_oss.renderer.parse_response([], prompt_ids=prompt).open is PartKind.REASONING
    assert gpt_oss.renderer.parse_response(gpt_oss.encode("a<|end|>"), prompt_ids=prompt).open is None


# -- statuses of calls


STATUSES: dict[str, tuple[str, CallStatus, Any]] = {
    "ok": (CALL + '{"a": 1}<|call|>', CallStatus.OK, {"a": 1}),
    "invalid": (CALL + "{'a'}<|call|>", CallStatus.INVALID_JSON, None),
    "function that says code": (CALL.replace("json", "code") + "x<|call|>", CallStatus.INVALID_JSON, None),
    "empty": (CALL + "<|call|>", CallStatus.INVALID_JSON, None),
    "no object": (CALL + "[1]<|call|>", CallStatus.MALFORMED, None),
    "twice": (CALL + '{"a": 1, "a": 2}<|call|>', CallStatus.DUPLICATE_ARGUMENT, {"a": 2}),
    "truncated": (CALL + '{"a', CallStatus.TRUNCATED, None),
    "complete, but cut off": (CALL + "{}", CallStatus.TRUNCATED, {}),
    "unclosed": (CALL + f"{{}}{START}<|channel|>final<|message|>yo<|return|>", CallStatus.UNCLOSED, {}),
    "unknown": (" to=functions.h<|channel|>commentary json<|message|>{}<|call|>", CallStatus.UNKNOWN_TOOL, {}),
    "no name": (" to=functions.<|channel|>commentary json<|message|>{}<|call|>", CallStatus.MISSING_NAME, {}),
    "nobody": (" to=<|channel|>commentary<|message|>x<|call|>", CallStatus.MISSING_NAME, None),
    "no arguments": (" to=functions.f<|channel|>commentary json<|call|>", CallStatus.MALFORMED, None),
    "no arguments, no channel": (f" to=functions.f{START}{DONE}", CallStatus.UNCLOSED, None),
    "no namespace": (" to=f<|channel|>commentary<|message|>{<|call|>", CallStatus.INVALID_JSON, None),
}


@pytest.mark.parametrize("name", STATUSES)
def test_status_of_a_call(name: str, gpt_oss: GptOss) -> None:
    text, status, values = STATUSES[name]
    (call,) = gpt_oss.check(text, tools=TOOLS).tool_calls
    assert (call.status, call.arguments) == (status, values)
    assert (call.problem == "") is (status is CallStatus.OK)


@pytest.mark.parametrize(
    ("header", "text", "status", "values"),
    [
        ("to=python<|channel|>analysis code", "print(1)", CallStatus.OK, None),
        ("to=python<|channel|>analysis", "[1, 2]", CallStatus.OK, None),
        ("to=python<|channel|>analysis", "", CallStatus.OK, None),
        ("to=browser.search<|channel|>analysis code", '{"query": "x"}', CallStatus.OK, {"query": "x"}),
        ("to=python<|channel|>analysis <|constrain|>json", "print(1)", CallStatus.INVALID_JSON, None),
        ("to=python<|channel|>analysis json", '{"code": 1}', CallStatus.OK, {"code": 1}),
    ],
)
def test_other_tools_take_any_text(header: str, text: str, status: CallStatus, values: Any, gpt_oss: GptOss) -> None:
    ids = gpt_oss.encode(f" {header}<|message|>{text}<|call|>")
    (call,) = gpt_oss.check(ids).tool_calls
    assert (call.status, call.arguments, call.arguments_text) == (status, values, text)
    (truncated,) = gpt_oss.check(ids[:-1]).tool_calls
    assert truncated.status is CallStatus.TRUNCATED
    (unknown,) = gpt_oss.check(ids, tools=TOOLS).tool_calls
    assert unknown.status is (CallStatus.UNKNOWN_TOOL if status is CallStatus.OK else status)


def test_the_parser_of_another_model_reads_what_is_cut_off() -> None:
    """The head of Qwen's turn is a control token of its own."""
    renderer = make_renderer("qwen3", tool_parser="harmony")
    parsed = renderer.parse_response(renderer.tokenizer.encode("<|channel|>final<|message|>Yes.<|end|>"))
    assert parsed.closing == "<|start|>assistant<|channel|>final<|message|>"
