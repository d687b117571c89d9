"""Turns of gpt-oss: parsed as openai-harmony's own parsers do, cut off, odd, or opened by the prompt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai_harmony as harmony
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.parsing.harmony_turns import (
    FIXTURE,
    START,
    TOOLS,
    TURNS,
    Said,
    Spoken,
    check,
    completion,
    encode,
    of_messages,
    ours,
    said_by,
    turns,
)
from tests.support import make_renderer
from tokentrace import Renderer
from tokentrace.parsing.response import CallStatus, Finish, ParsedResponse, PartKind, TokenRange

pytestmark = pytest.mark.xdist_group("gpt-oss")


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return make_renderer("gpt-oss")


def theirs(encoding: harmony.HarmonyEncoding, ids: list[int]) -> list[Said]:
    return of_messages(encoding.parse_messages_from_completion_tokens(ids, harmony.Role.ASSISTANT))


# -- completions that openai-harmony writes


@pytest.mark.parametrize("name", TURNS)
def test_what_harmony_renders_is_parsed_as_harmony_does(
    name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    spoken = TURNS[name]
    ids = completion(encoding, spoken)
    expected = [said for one in spoken for said in one.said]
    assert theirs(encoding, ids) == expected
    assert ours(check(renderer, encoding, ids)) == expected


@pytest.mark.parametrize("end", ["<|end|>", "<|return|>", "<|call|>"])
@pytest.mark.parametrize("name", TURNS)
def test_every_end_closes_every_message(
    name: str, end: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    """openai-harmony accepts each of them after each kind of message, and so a call closed with another is OK."""
    ids = completion(encoding, TURNS[name], end)
    response = check(renderer, encoding, ids)
    assert ours(response) == theirs(encoding, ids)
    assert response.open is None
    assert response.unread is None
    stopped = None if end == "<|end|>" else ids[-1]
    assert response.stop_token == stopped
    assert response.finish is (Finish.LENGTH if stopped is None else Finish.STOP)
    closed = renderer.parse_response(completion(encoding, TURNS[name]))
    assert [call.status for call in response.tool_calls] == [call.status for call in closed.tool_calls]


ends = st.sampled_from([None, "<|return|>", "<|call|>", "<|end|>"])


@FIXTURE
@given(spoken=turns, end=ends)
def test_any_turn_is_parsed_as_harmony_does(
    spoken: list[Spoken], end: str | None, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    ids = completion(encoding, spoken, end)
    expected = theirs(encoding, ids)
    assert expected == [said for one in spoken for said in one.said]
    assert ours(check(renderer, encoding, ids)) == expected


MESSAGES: list[dict[str, Any]] = [
    {"content": "yo"},
    {"content": "yo </think>\n", "reasoning_content": "hmm\n"},
    {
        "reasoning_content": "look",
        "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}],
    },
    {"content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]},
]


@pytest.mark.parametrize("message", MESSAGES)
def test_what_the_template_renders(
    message: dict[str, Any], encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    rendered = renderer.render([{"role": "user", "content": "hi"}, {"role": "assistant", **message}], tools=TOOLS)
    ids = rendered.ids[rendered.mask].tolist()
    response = check(renderer, encoding, ids, tools=TOOLS)
    assert ours(response) == theirs(encoding, ids)
    assert response.content == message.get("content", "")
    assert response.reasoning_content == message.get("reasoning_content")
    functions = [call["function"] for call in message.get("tool_calls", [])]
    assert [(call.name, call.arguments) for call in response.calls] == [(f["name"], f["arguments"]) for f in functions]
    assert response.stop_token == ids[-1]


# -- cut off


def whole(said: Sequence[Said]) -> list[Said]:
    """What is said without the character that is cut in two, which openai-harmony holds back."""
    stripped = [(*one[:-1], one[-1].rstrip("\ufffd")) for one in said]
    return [one for one in stripped if one[0] == "call" or one[-1]]


def check_cut(renderer: Renderer, encoding: harmony.HarmonyEncoding, ids: list[int]) -> None:
    """A completion without its end says what openai-harmony's stream has got to."""
    stream = harmony.StreamableParser(encoding, harmony.Role.ASSISTANT)
    for index in ids:
        stream.process(index)
    response = check(renderer, encoding, ids)
    finished = of_messages(stream.messages)
    count = len(finished)
    assert ours(response)[:count] == finished
    calls = [said for said in finished if said[0] == "call"]
    assert all(call.status is not CallStatus.TRUNCATED for call in response.tool_calls[: len(calls)])
    left = whole(ours(response)[count:])
    if stream.state is harmony.StreamState.EXPECT_START:
        assert left == []
        assert response.open is None
    elif stream.state is harmony.StreamState.HEADER:
        (start,) = encode(encoding, "<|start|>")
        begun = len(ids) - ids[::-1].index(start) if start in ids else 0
        check_header(response, left, encoding.decode(ids[begun:]))
    else:
        to, channel = stream.current_recipient, stream.current_channel
        assert left == whole(said_by(channel, to, stream.current_content))
        thinking = PartKind.REASONING if channel == "analysis" else None
        assert response.open == (PartKind.TOOL_CALL if to else thinking)
        assert not to or response.tool_calls[-1].status is CallStatus.TRUNCATED


def check_header(response: ParsedResponse, left: list[Said], header: str) -> None:
    """A header that is cut off says nothing but that it is one of a call; its name is known once something follows."""
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


@pytest.mark.parametrize("name", TURNS)
def test_cut_off_at_every_token(name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    ids = completion(encoding, TURNS[name])
    for count in range(len(ids)):
        check_cut(renderer, encoding, ids[:count])


@FIXTURE
@given(spoken=turns, share=st.floats(0, 1))
def test_any_turn_cut_off_anywhere(
    spoken: list[Spoken], share: float, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    ids = completion(encoding, spoken)
    check_cut(renderer, encoding, ids[: int(share * len(ids))])


# -- what is not as it should be


DONE = "<|channel|>final<|message|>done<|end|>"
ODD: dict[str, tuple[str, list[Said]]] = {
    "no <|end|> before a message": (
        f"<|channel|>analysis<|message|>hmm{START}<|channel|>final<|message|>yo<|return|>",
        [("reasoning", "hmm"), ("content", "yo")],
    ),
    "<|message|> and <|channel|> in a body": (
        "<|channel|>final<|message|>a<|channel|>b<|message|>c<|constrain|><|return|>",
        [("content", "a<|channel|>b<|message|>c<|constrain|>")],
    ),
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
        f"{DONE} and so{START}{DONE}",
        [("content", "done"), ("content", " and so"), ("content", "done")],
    ),
    "text before a header": (f"So: {DONE}", [("content", "So: "), ("content", "done")]),
    "text after the role": (f"{DONE}{START} so{DONE}", [("content", "done"), ("content", " so"), ("content", "done")]),
    "text before a call": (
        f"{DONE}ok to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>",
        [("content", "done"), ("content", "ok"), ("call", "f", "{}")],
    ),
    "no <|message|>": ("<|channel|>analysis I think so.<|end|>", [("reasoning", " I think so.")]),
    "no <|message|>, cut off": ("<|channel|>final I think", [("content", " I think")]),
    "role cut off": (f"{DONE}<|start|>assist", [("content", "done")]),
    "a channel's name without its mark": ("<|constrain|>analysis<|message|>yo<|end|>", [("content", "yo")]),
    "nothing but headers": (f"<|channel|>analysis<|end|>{START}<|end|>{START}<|channel|>final<|return|>", []),
    "odd words after the channel": ("<|channel|>analysis very odd indeed<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "a content type is no recipient": (
        "<|channel|>final <|constrain|>json<|message|>{}<|return|>",
        [("content", "{}")],
    ),
    "a lone word is no recipient": ("<|channel|>analysis python<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "to the user": ("<|channel|>commentary to=user<|message|>yo<|end|>", [("content", "yo")]),
    "to all": ("<|channel|>analysis to=all<|message|>hmm<|end|>", [("reasoning", "hmm")]),
    "type before the recipient": (
        "<|channel|>commentary json to=functions.f<|message|>{}<|call|>",
        [("call", "f", "{}")],
    ),
    "two recipients": (
        " to=functions.f<|channel|>commentary to=functions.g<|message|>{}<|call|>",
        [("call", "f", "{}")],
    ),
    "channel glued to the recipient": (
        "<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{}<|call|>",
        [("call", "f", "{}")],
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_turns_lose_nothing(name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    text, expected = ODD[name]
    assert ours(check(renderer, encoding, encode(encoding, text))) == expected


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
def test_another_role_is_content_as_written(
    foreign: str, end: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    """Made-up turns of others are visible, and nothing in them is a call."""
    ids = encode(encoding, f"{DONE}{foreign}{end}")
    response = check(renderer, encoding, ids)
    assert ours(response) == [("content", "done"), ("content", foreign)]
    assert response.finish is (Finish.STOP if end else Finish.LENGTH)


def test_a_made_up_result_ends_the_turn_inside_a_body(encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    made_up = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>sunny"
    ids = encode(encoding, f" to=functions.f<|channel|>commentary json<|message|>{{}}{made_up}")
    response = check(renderer, encoding, ids)
    assert ours(response) == [("call", "f", "{}"), ("content", made_up)]
    assert response.tool_calls[0].status is CallStatus.UNCLOSED


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
def test_only_the_assistant_goes_on_after_a_call(
    more: str, read: int, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    call = encode(encoding, " to=functions.f<|channel|>commentary json<|message|>{}")
    ids = [*call, *encode(encoding, more)]
    response = check(renderer, encoding, ids)
    assert ours(response) == [("call", "f", "{}"), ("content", "done")][: 1 + read]
    assert response.unread == (None if read else TokenRange(len(call) + 1, len(ids)))
    assert response.stop_token == (None if read else ids[len(call)])


WORDS = ["zebra", " otter", " fox\n"]
SOUP = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|constrain|>",
    "assistant",
    "user",
    " to=functions.f",
    " ",
]


@FIXTURE
@given(
    soup=st.lists(st.sampled_from([*SOUP, *WORDS]), max_size=14), end=st.sampled_from(["", "<|return|>", "<|call|>"])
)
def test_no_word_of_any_turn_is_lost(
    soup: list[str], end: str, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    """All words are in reasoning, content or a call, but for those that name channels and content types."""
    response = check(renderer, encoding, encode(encoding, "".join(soup) + end))
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
    kept = " ".join(part.text for part in response.parts)
    assert [kept.count(word.strip()) >= expected.count(word.strip()) for word in WORDS] == [True] * len(WORDS)
    assert response.finish is (Finish.STOP if end else Finish.LENGTH)


# -- what the prompt wrote


@pytest.mark.parametrize(
    ("opened", "rest", "expected"),
    [
        ("<|channel|>analysis<|message|>", f"hmm<|end|>{START}{DONE}", [("reasoning", "hmm"), ("content", "done")]),
        ("<|channel|>analysis<|message|>So", " hmm<|end|>", [("reasoning", " hmm")]),
        ("<|channel|>", "analysis<|message|>hmm<|end|>", [("reasoning", "hmm")]),
        (
            f"<|channel|>analysis<|message|>a<|end|>{START}<|channel|>final<|message|>",
            "b<|return|>",
            [("content", "b")],
        ),
        (" to=functions.f<|channel|>commentary json<|message|>", "{}<|call|>", [("call", "f", "{}")]),
        (" to=functions.", "f<|channel|>commentary json<|message|>{}<|call|>", [("call", "f", "{}")]),
        ("<|channel|>analysis<|message|>a<|end|>", f"{START}{DONE}", [("content", "done")]),
        (" to=functions.f<|channel|>commentary<|message|>{}<|call|>", f"{START}{DONE}", [("content", "done")]),
        (
            "<|channel|>final<|message|>a<|end|><|start|>user<|message|>b<|end|>",
            f"{START}{DONE}",
            [("content", "done")],
        ),
        ("", DONE, [("content", "done")]),
    ],
)
def test_what_the_prompt_opened(
    opened: str, rest: str, expected: list[Said], encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    prompt = renderer.render_ids([{"role": "user", "content": "hi"}], add_generation_prompt=True)
    response = check(renderer, encoding, encode(encoding, rest), prompt_ids=[*prompt, *encode(encoding, opened)])
    assert ours(response) == expected


def test_the_prompt_opened_reasoning_that_does_not_end(encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    prompt = encode(encoding, f"{START}<|channel|>analysis<|message|>")
    assert renderer.parse_response([], prompt_ids=prompt).open is PartKind.REASONING
    assert renderer.parse_response(encode(encoding, "a<|end|>"), prompt_ids=prompt).open is None


# -- what became of calls


STATUSES: dict[str, tuple[str, CallStatus, Any]] = {
    "ok": (' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', CallStatus.OK, {"a": 1}),
    "invalid": (" to=functions.f<|channel|>commentary json<|message|>{'a'}<|call|>", CallStatus.INVALID_JSON, None),
    "function that says code": (
        " to=functions.f<|channel|>commentary code<|message|>x<|call|>",
        CallStatus.INVALID_JSON,
        None,
    ),
    "empty": (" to=functions.f<|channel|>commentary json<|message|><|call|>", CallStatus.INVALID_JSON, None),
    "no object": (" to=functions.f<|channel|>commentary json<|message|>[1]<|call|>", CallStatus.MALFORMED, None),
    "twice": (
        ' to=functions.f<|channel|>commentary json<|message|>{"a": 1, "a": 2}<|call|>',
        CallStatus.DUPLICATE_ARGUMENT,
        {"a": 2},
    ),
    "truncated": (' to=functions.f<|channel|>commentary json<|message|>{"a', CallStatus.TRUNCATED, None),
    "complete, but cut off": (" to=functions.f<|channel|>commentary json<|message|>{}", CallStatus.TRUNCATED, {}),
    "unclosed": (
        f" to=functions.f<|channel|>commentary json<|message|>{{}}{START}<|channel|>final<|message|>yo<|return|>",
        CallStatus.UNCLOSED,
        {},
    ),
    "unknown": (" to=functions.h<|channel|>commentary json<|message|>{}<|call|>", CallStatus.UNKNOWN_TOOL, {}),
    "no name": (" to=functions.<|channel|>commentary json<|message|>{}<|call|>", CallStatus.MISSING_NAME, {}),
    "nobody": (" to=<|channel|>commentary<|message|>x<|call|>", CallStatus.MISSING_NAME, None),
    "no arguments": (" to=functions.f<|channel|>commentary json<|call|>", CallStatus.MALFORMED, None),
    "no arguments, no channel": (f" to=functions.f{START}{DONE}", CallStatus.UNCLOSED, None),
    "no namespace": (" to=f<|channel|>commentary<|message|>{<|call|>", CallStatus.INVALID_JSON, None),
}


@pytest.mark.parametrize("name", STATUSES)
def test_status_of_a_call(name: str, encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    text, status, values = STATUSES[name]
    (call,) = check(renderer, encoding, encode(encoding, text), tools=TOOLS).tool_calls
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
def test_other_tools_may_be_given_anything(
    header: str, text: str, status: CallStatus, values: Any, encoding: harmony.HarmonyEncoding, renderer: Renderer
) -> None:
    ids = encode(encoding, f" {header}<|message|>{text}<|call|>")
    (call,) = check(renderer, encoding, ids).tool_calls
    assert (call.status, call.arguments, call.arguments_text) == (status, values, text)
    (truncated,) = check(renderer, encoding, ids[:-1]).tool_calls
    assert truncated.status is CallStatus.TRUNCATED
    (unknown,) = check(renderer, encoding, ids, tools=TOOLS).tool_calls
    assert unknown.status is (CallStatus.UNKNOWN_TOOL if status is CallStatus.OK else status)


# -- tokens


def test_spans(encoding: harmony.HarmonyEncoding, renderer: Renderer) -> None:
    thought = encode(encoding, "<|channel|>analysis<|message|>hmm, well<|end|>")
    call = encode(encoding, f"{START} to=functions.f<|channel|>commentary json<|message|>{{}}<|call|>")
    response = renderer.parse_response([*thought, *call])
    assert [part.span for part in response.parts] == [(3, len(thought) - 1), (len(thought), len(thought) + len(call))]
    assert response.tool_calls[0].span == response.parts[1].span
    assert response.tool_calls[0].raw == encoding.decode(call)
