"""A parsed completion is a message that renders back: after the same history, the same ids."""

import itertools
import warnings
from collections.abc import Iterator

import pytest

from tests.conversations import ALL, CONVERSATIONS, NESTED, PARIS, Conversation, assistant, call, user
from tests.parsing.forms import TOOLS, answered, ids_of
from tests.support import make_renderer, rotating, some
from tokentrace import Renderer, TokentraceError
from tokentrace.parsing.readback import UnreadableKind
from tokentrace.parsing.response import CallStatus, PartKind

VALUES = ["x", "", "line\n  two\n", "naïve 東京 🗼", '"quoted" \\n', 3, -0.5, True, None, [1, "two"], NESTED]


def turns() -> Iterator[Conversation]:
    """Every combination of reasoning, content and calls, and calls with every kind of argument."""
    for reasoning, content, calls in itertools.product((None, "Hm.\nSo."), ("", "Well,\n\nyes."), range(3)):
        chosen = [PARIS, call("now", {}, "call00002")][:calls]
        yield Conversation([user("Go."), assistant(content, *chosen, reasoning=reasoning)], ALL)
    for value in VALUES:
        yield Conversation([user("Go."), assistant("", call("run_code", {"code": value, "more": value}))], ALL)


def cases() -> Iterator[tuple[str, Conversation]]:
    """Every assistant message of the matrix, last in its conversation."""
    for name, conversation in CONVERSATIONS.items():
        for at, message in enumerate(conversation.messages):
            if message["role"] == "assistant":
                yield f"{name} {at}", Conversation(conversation.messages[: at + 1], conversation.tools)
    for number, conversation in enumerate(turns()):
        yield f"turn {number}", conversation


def differs(renderer: Renderer, conversation: Conversation) -> str | None:
    """How the parsed message renders differently from its source; None if it renders the same.

    Nothing is compared where `find_unreadable` reports that another message has the same tokens, nor where no model
    could write the turn: it goes on after a stop token, or has no generation prompt before it.
    """
    messages, tools, last = conversation.messages, conversation.tools, len(conversation.messages) - 1
    try:
        rendered = renderer.render(messages, tools=tools)
    except TokentraceError:
        return None
    last_turns = [turn for turn in rendered.turns if turn.message == last]
    unprompted = f"message {last}: the template writes this turn without the generation prompt"
    if not last_turns or any(note.startswith(unprompted) for note in rendered.notes):
        return None
    ids = rendered.token_ids[: last_turns[-1].stop]
    parsed = renderer.parse_response(ids[last_turns[-1].start :], tools=tools, prompt_ids=ids[: last_turns[-1].start])
    message = parsed.to_message()
    assert all(one["id"] and isinstance(one["function"]["arguments"], str) for one in message.get("tool_calls", ()))
    again = renderer.render([*messages[:-1], message], tools=tools).token_ids[: len(ids)]
    if again == ids or parsed.unread is not None:
        return None
    unreadable = [entry for entry in renderer.find_unreadable(messages, tools=tools) if entry.message == last]
    if any(entry.kind is UnreadableKind.CHANGED for entry in unreadable):
        return None
    return f"{renderer.tokenizer.decode(ids)[-200:]!r} is {renderer.tokenizer.decode(again)[-200:]!r}, {unreadable}"


@pytest.mark.filterwarnings("ignore::tokentrace.errors.LostTextWarning")
def test_a_parsed_message_renders_back(any_family: str) -> None:
    renderer = make_renderer(any_family)
    results = [(name, differs(renderer, conversation)) for name, conversation in rotating(cases(), any_family, 2)]
    wrong = [f"{name}: {how}" for name, how in results if how is not None]
    assert not wrong, some(wrong)


@pytest.mark.filterwarnings("ignore::tokentrace.errors.LostTextWarning")
def test_calls_that_cannot_be_run_are_in_the_message_as_they_were_written(any_family: str) -> None:
    """So is the text around and between them. The calls have no names, or are cut off."""
    renderer = make_renderer(any_family)
    tokenizer = renderer.tokenizer
    try:
        rendered = renderer.render([user("Go."), assistant("", PARIS, call("now", {}, "call00002"))], tools=ALL)
    except TokentraceError:  # one call in a turn
        rendered = renderer.render([user("Go."), assistant("", PARIS)], tools=ALL)
    turn = rendered.turns[-1]
    prompt, completion = rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]
    nameless = tokenizer.decode(completion).replace("get_weather", "").replace("now", "")
    cuts = (completion[:length] for length in rotating(range(1, len(completion)), any_family, 5))
    for ids in (tokenizer.encode(nameless).tolist(), *cuts):
        parsed = renderer.parse_response(ids, tools=ALL, prompt_ids=prompt)
        message = parsed.to_message()
        calls = [region.span.start for region in parsed.regions if region.kind is PartKind.TOOL_CALL]
        stop = len(ids) - (parsed.stop_token is not None)
        if calls and "tool_calls" not in message:
            text = tokenizer.decode(ids[calls[0] : stop])
            assert message["content"].lstrip() == text.lstrip(), text  # white space may belong to the turn's head


BAD = {
    "qwen3": '<tool_call>\n{"name": "look", "arguments": {"place": \n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=look>\n<parameter=place>\na\n</parameter>\n</tool_call>",
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{a"
    "<|tool_call_end|><|tool_calls_section_end|>",
    "mistral-nemo": '[TOOL_CALLS][{"name": "look", "arguments": {"place": }]',
}


@pytest.mark.parametrize("family", BAD)
def test_a_message_with_a_broken_call_renders_back(family: str) -> None:
    renderer = make_renderer(family)
    completion = [*ids_of(renderer, ("Let me look.", BAD[family])), renderer.get_stop_token_ids()[0]]
    parsed = renderer.parse_response(completion, tools=TOOLS, prompt_ids=answered(renderer))
    assert [attempt.ok for attempt in parsed.tool_calls] == [False]
    message = parsed.to_message()
    assert message == assistant(f"Let me look.{BAD[family]}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rendered = renderer.render([user("Go."), message], tools=TOOLS)
    turn = rendered.turns[-1]
    assert rendered.token_ids[turn.start : turn.stop][-len(completion) :] == completion


TWICE = '<tool_call>\n{"name": "look", "arguments": {"place": "a", "place": "b"}}\n</tool_call>'


@pytest.mark.parametrize(("text", "content"), [(f"Let me look.\n{BAD['qwen3']}", "Let me look."), (TWICE, "")])
def test_neither_white_space_before_a_broken_call_nor_a_repeated_argument_is_lost(text: str, content: str) -> None:
    renderer = make_renderer("qwen3")
    ids = [*ids_of(renderer, (text,)), renderer.get_stop_token_ids()[0]]
    parsed = renderer.parse_response(ids, tools=TOOLS, prompt_ids=answered(renderer))
    message = parsed.to_message()
    assert (parsed.content, message["content"]) == (content, text)
    if text == TWICE:
        assert parsed.tool_calls[0].status is CallStatus.DUPLICATE_ARGUMENT
        again = renderer.render([user("Go."), message], tools=TOOLS)
        assert again.token_ids[again.turns[-1].start : again.turns[-1].stop][-len(ids) :] == ids
