"""However a completion is split, its events add up to the whole response; also with tokens lost or doubled."""

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.assets import FAMILIES
from tests.conversations import assistant, call, tool, user
from tests.support import make_renderer, per_family
from tokentrace import Renderer, TokentraceError
from tokentrace.formats.grammar import TurnGrammar
from tokentrace.parsing.events import ArgumentsDelta, CallNamed, ContentDelta, Done, Event, ReasoningDelta, events_of
from tokentrace.parsing.response import ParsedResponse, PartKind

SHORT = 16
LONG = int(os.environ.get("TOKENTRACE_EXAMPLES", -(-100_000 // len(FAMILIES))))
QUIET: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}

PARAMETERS = {
    **{key: {"type": kind} for key, kind in (("place", "string"), ("note", "string"), ("days", "integer"))},
    "exact": {"type": "boolean"},
    "where": {"type": "object", "properties": {"lat": {"type": "number"}, "tags": {"type": "array"}}},
    "either": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "integer"}}]},
}
TOOLS = [tool("look_up", "Looks up.", PARAMETERS, ["place"]), tool("stop", "Stops.", {}, [])]


@per_family
def renderer_of(family: str) -> Renderer:
    """The family's renderer with no trusted roles: no text that is rendered becomes a control token."""
    return make_renderer(family, trusted=[])


# -- the events of one completion


def merged(events: list[Event]) -> list[Event]:
    """Events with neighbouring deltas merged; the text of each delta can be encoded and is not empty."""
    out: list[Event] = []
    for event in events:
        if isinstance(event, (ReasoningDelta, ContentDelta, ArgumentsDelta)):
            assert event.text.encode("utf-8")
            if out and isinstance(last := out[-1], type(event)):
                out[-1] = replace(last, text=last.text + event.text)
                continue
        out.append(event)
    return out


def check_events(events: list[Event], whole: ParsedResponse) -> None:
    """Events add up to the whole response. An id written after the arguments comes too late for a stream."""
    assert events[-1] == Done(whole)
    expected = merged(events_of(whole))
    for at, event in enumerate(actual := merged(events[:-1])):
        if isinstance(event, CallNamed) and event.id is None and at < len(expected):
            expected[at] = replace(expected[at], id=None) if isinstance(expected[at], CallNamed) else expected[at]
    assert actual == expected


def stream(renderer: Renderer, ids: list[int], sizes: list[int], **options: Any) -> list[Event]:
    """The events of a completion fed in pieces of these sizes; all remaining ids come last."""
    parser, events, at = renderer.streaming_parser(**options), list[Event](), 0
    for size in [*sizes, len(ids)]:
        events += parser.feed(ids[at : at + size])
        at += size
    events += parser.finish()
    assert parser.finish() == []
    assert isinstance(events[-1], Done)
    assert parser.response is events[-1].response
    return events


def check_response(renderer: Renderer, ids: list[int], whole: ParsedResponse) -> None:
    """Invariants of a response: the span of every part holds its text; two parts share a token only where it
    spells the end of the one and the beginning of the other."""
    for one, other in itertools.pairwise(part.span for part in whole.parts):
        assert one.stop <= other.start + 1
        assert one.start <= other.start
    for part in whole.parts:
        assert 0 <= part.span.start <= part.span.stop <= len(ids)
        prompted = part.call == 0 and part.span == (0, 0)  # begun by the prompt, with nothing sampled of it
        assert prompted or (part.text and part.span.start < part.span.stop)
        assert (part.call is not None) == (part.kind is PartKind.TOOL_CALL)
        if part.call is not None:
            parsed = whole.tool_calls[part.call]
            assert (parsed.span, parsed.raw) == (part.span, part.text)
        assert part.text in spelled(renderer, ids[part.span.start : part.span.stop])
    for text, kind in ((whole.content, PartKind.CONTENT), (whole.reasoning_content or "", PartKind.REASONING)):
        assert text == "".join(part.text for part in whole.parts if part.kind is kind)
    assert [part.call for part in whole.parts if part.call is not None] == list(range(len(whole.tool_calls)))
    for parsed in whole.tool_calls:
        assert parsed.ok == (parsed.problem == "")
        assert parsed.name or not parsed.ok
    if whole.unread is not None:
        assert whole.unread.start < whole.unread.stop == len(ids)
        assert whole.stop_token == ids[whole.unread.start - 1]
        assert all(part.span.stop < whole.unread.start or part.call is not None for part in whole.parts)
    elif whole.stop_token is not None:
        assert whole.stop_token == ids[-1]


def spelled(renderer: Renderer, ids: list[int]) -> str:
    """Tokens as text, control tokens by their names; one that the vocabulary does not have is U+FFFD."""
    vocabulary = renderer.tokenizer.vocabulary
    return b"".join(vocabulary.token_bytes(index) or "\ufffd".encode() for index in ids).decode("utf-8", "replace")


def check(renderer: Renderer, ids: list[int], chunkings: list[list[int]], **options: Any) -> ParsedResponse:
    """Check one completion, parsed whole and streamed in pieces."""
    whole = renderer.parse_response(ids, **options)
    for sizes in [[], [1] * len(ids), *chunkings]:
        check_events(stream(renderer, ids, sizes, **options), whole)
    check_response(renderer, ids, whole)
    return whole


# -- completions


def pieces(grammar: TurnGrammar) -> list[str]:
    """The texts that a grammar is made of."""
    sources: list[Any] = [grammar.reasoning, grammar.content, grammar.calls, grammar.channels]
    texts: list[str] = [grammar.head, grammar.prompt]
    for source in sources:
        for one in fields(source) if source is not None else ():
            value = getattr(source, one.name)
            flat = itertools.chain.from_iterable(value) if isinstance(value, tuple) else [value]
            texts += [text for text in flat if isinstance(text, str) and one.name not in ("style", "strings", "others")]
    return sorted({text for text in [*texts, *map(str.strip, texts)] if text})


@cache
def delimiters(family: str) -> list[str]:
    """The texts of the family's grammar, halves of them, and tags of other families."""
    texts = [*pieces(renderer_of(family).grammar())]
    texts += [f"{tag}>" for tag in ("</parameter", "</function", "</invoke", "</think", "<think")]
    return sorted({*texts, *(text[: len(text) // 2] for text in texts if len(text) > 1)})


AWKWARD = [
    *("{", "}", '"', "\\", "[", "]", ",", ":", "<", ">", "/", "=", " ", "  ", "\n", "\n\n", "\r\n", "\t", "`", "'"),
    *("日本語", "🙂", "👩‍👩‍👧‍👦", "🇩🇪", "e\u0301\u0323", "\u1112\u1161\u11ab", "ſ", "\u200d", "\ufeff", "\u2028", "𐎀𒀀"),
    *("\0", "\x7f", "true", "None", "12", "1e999", "\\ud83d", "def f():\n", '{"name": "Bob"}'),
    *('{"name": "look_up", "arguments": {}}', "-1.5e3", "&amp;", "\u00a0"),
]


@cache
def texts(family: str) -> st.SearchStrategy[str]:
    piece = st.sampled_from(AWKWARD) | st.sampled_from(delimiters(family)) | st.text(max_size=4).filter(encodable)
    return st.lists(piece | st.sampled_from(["word ", "look_up", "place"]), max_size=6).map("".join)


def encodable(text: str) -> bool:
    return not any("\ud800" <= char <= "\udfff" for char in text)


KEYS = ["place", "note", "days", "exact", "where", "either", "other", "a b", "</x"]


@cache
def dictionaries(family: str) -> st.SearchStrategy[dict[str, Any]]:
    text = texts(family)
    flat = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    values = st.recursive(
        flat, lambda some: st.lists(some, max_size=2) | st.dictionaries(text, some, max_size=2), max_leaves=4
    )
    return st.dictionaries(st.sampled_from(KEYS), text | values, max_size=3)


@cache
@st.composite
def messages(draw: st.DrawFn, family: str) -> dict[str, Any]:
    """Messages of an assistant."""
    text, some = texts(family), dictionaries(family)
    calls = []
    for index in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(["look_up", "stop", "unheard_of"]))
        calls.append(call(name, draw(some), f"functions.{name}:{index}"))
    return assistant(draw(text), *calls, reasoning=draw(text) if draw(st.booleans()) else None)


def variants(message: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A message in the forms that one or another template requires; the last ones have less in them."""
    calls = message.get("tool_calls") or []
    for subset in (calls, calls[:1]) if calls else ():
        as_text = [one | {"function": one["function"] | {"arguments": json.dumps(arguments(one))}} for one in subset]
        short = [one | {"id": f"call0000{index}"} for index, one in enumerate(subset)]
        for some in (subset, short, as_text):
            yield message | {"tool_calls": some}
        yield message | {"tool_calls": as_text, "content": None}
    yield {key: value for key, value in message.items() if key != "tool_calls"}
    yield assistant("x")


def arguments(one: dict[str, Any]) -> Any:
    return one["function"]["arguments"]


def completion(family: str, message: dict[str, Any]) -> tuple[list[int], list[int]]:
    """The prompt and the completion of a message."""
    for variant in variants(message):
        try:
            rendered = renderer_of(family).render([user("Hi."), variant])
        except TokentraceError:
            continue
        has_calls = "tool_calls" in variant
        if rendered.turns and has_calls == any("tool_calls" in (name or "") for name in rendered.fields):
            turn = rendered.turns[-1]
            return rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]
    raise AssertionError(f"{family} renders no answer")


@cache
def telling_ids(family: str) -> list[int]:
    """Tokens that grammars are made of: control tokens, stop tokens, punctuation, and unknown ids."""
    renderer = renderer_of(family)
    ids = [index for text in [*delimiters(family), *AWKWARD] for index in renderer.tokenizer.encode(text).tolist()]
    vocabulary = renderer.tokenizer.vocabulary
    return sorted({*ids, *renderer.get_stop_token_ids(), vocabulary.size, vocabulary.size + 7})


@st.composite
def mutated(draw: st.DrawFn, family: str, ids: list[int]) -> list[int]:
    """A completion with something wrong."""
    out = list(ids)
    somewhere = st.integers(0, max(len(ids), 1))
    for kind in draw(st.lists(st.sampled_from(["cut", "drop", "double", "swap", "put", "spell", "end"]), max_size=4)):
        at, other = draw(somewhere) % (len(out) + 1), draw(somewhere) % (len(out) + 1)
        first, stop = min(at, other), max(at, other)
        if kind == "cut":
            out = out[:at]
        elif kind == "end":
            out = out[:-1]
        elif kind == "drop":
            out = out[:first] + out[min(stop, first + 4) :]
        elif kind == "double":
            out = out[:stop] + out[first:]
        elif kind == "swap" and stop < len(out):
            out[first], out[stop] = out[stop], out[first]
        elif kind == "put":
            out[at:at] = draw(st.lists(st.sampled_from(telling_ids(family)), min_size=1, max_size=3))
        elif kind == "spell":
            plain = renderer_of(family).tokenizer.encode_plain(draw(st.sampled_from(delimiters(family))))
            out[at:at] = plain.tolist()
    return out


def chunkings(count: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, max(1, min(9, count))), max_size=count)


def law(family: str) -> Any:
    @given(st.data())
    def hold(data: st.DataObject) -> None:
        prompt, ids = completion(family, data.draw(messages(family)))
        ids = data.draw(mutated(family, ids))
        options: dict[str, Any] = {"tools": data.draw(st.sampled_from([None, TOOLS]))}
        prefilled = data.draw(st.none() | st.just(0) | st.integers(0, len(ids)))
        if prefilled is not None:
            options["prompt_ids"], ids = prompt + ids[:prefilled], ids[prefilled:]
        check(renderer_of(family), ids, data.draw(st.lists(chunkings(len(ids)), min_size=1, max_size=2)), **options)

    return hold


@pytest.mark.parametrize("count", [SHORT, pytest.param(LONG, marks=pytest.mark.long)])
def test_events_come_to_the_whole_however_it_is_cut(any_family: str, count: int) -> None:
    settings(max_examples=count, **QUIET)(law(any_family))()


def test_white_space_before_empty_reasoning_is_a_part_of_its_own() -> None:
    renderer = renderer_of("qwen3")
    whole = check(renderer, renderer.tokenizer.encode("\n<think>\n\n</think>\n\nYes.<|im_end|>").tolist(), [])
    assert [part.text for part in whole.parts] == ["\n", "Yes."]
    parser = renderer.streaming_parser()
    parser.finish()
    with pytest.raises(TokentraceError, match="this parser has finished"):
        parser.feed([1])


# -- characters that several tokens spell

RARE = ["𒀀", "𐎀", "🫨", "🏴\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f", "𠮷", "ꙮ", "\U0001f9ff"]


def splits_a_character(renderer: Renderer, ids: list[int]) -> bool:
    """Whether a token ends inside a character."""
    ends = itertools.accumulate(renderer.tokenizer.vocabulary.token_bytes(index) for index in ids)
    return any("\ufffd" in text.decode("utf-8", "replace") for text in ends)


def test_a_character_of_several_tokens_is_streamed_once_and_whole(any_family: str) -> None:
    renderer = renderer_of(any_family)
    text = "a" + "b".join(RARE) + "c"
    message = assistant(text, call("look_up", {"place": text, "where": {text: [text]}}, "functions.look_up:0"))
    prompt, ids = completion(any_family, message)
    whole = check(renderer, ids, [[2] * len(ids), [3] * len(ids)], tools=TOOLS, prompt_ids=prompt)
    assert whole.content in (text, "")
    assert [one.arguments for one in whole.calls] in ([], [{"place": text, "where": {text: [text]}}])
    assert whole.content or whole.calls
    ids = renderer.tokenizer.encode_plain(text).tolist()
    assert splits_a_character(renderer, ids)
    only = check(renderer, ids, [[2] * len(ids), [3] * len(ids)], prompt_ids=prompt)
    assert (only.content, only.reasoning_content) in ((text, None), ("", text))
