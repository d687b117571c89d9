"""Supervised rows: the rendered ids, trained exactly where an assistant samples, for every selection of turns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.conversations import ASK, CONVERSATIONS, HI, PARIS, SIMPLE, Conversation, assistant, call, user
from tests.samples.family_rows import SHAPES, assistants, make_renderer, rows, sample_of
from tests.support import over_bytes, rendered, rotating, some
from tokentrace import RenderedTokens, build_supervised_sample, build_supervised_samples, create_renderer
from tokentrace.errors import RendererError, SampleError
from tokentrace.pocket import POCKET
from tokentrace.samples.sample import Sample
from tokentrace.tokens.kinds import Kind, Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""Tests of this warning catch it themselves."""
PARTS = ("reasoning", "content", "tool_calls", "stop")
# -- the default row


def test_row_has_the_ids_and_the_mask_of_the_rendering(any_family: str) -> None:
    renderer = make_renderer(any_family)
    samples, trained = rows(any_family), 0
    for name, (_, tokens, sample) in samples.items():
        assert_row_is_the_rendering(sample, tokens, name)
        trained += sample.trained
    assert trained > 100
    for name in rotating(samples, any_family, 12):
        conversation, tokens, _ = samples[name]
        assert_row_is_the_rendering(sample_of(renderer, conversation), tokens, name)


def assert_row_is_the_rendering(sample: Sample, tokens: RenderedTokens, name: str) -> None:
    assert np.array_equal(sample.ids, tokens.ids), name
    assert np.array_equal(sample.mask, tokens.mask), name
    assert np.array_equal(sample.messages, tokens.messages), name
    assert np.array_equal(sample.kinds == Kind.SAMPLED, tokens.mask), name


def test_raises_the_errors_of_the_renderer(any_family: str) -> None:
    renderer = make_renderer(any_family)
    refused = []
    for name, conversation in CONVERSATIONS.items():
        error = rendered(renderer, conversation)
        if not isinstance(error, RenderedTokens):
            with pytest.raises(type(error)) as raised:
                sample_of(renderer, conversation)
            assert str(raised.value) == str(error), name
            refused.append(name)
    assert bool(refused) == (any_family not in ("kimi-k2", "kimi-k2.5", "deepseek-v4"))


# -- selection of turns


def test_the_last_turn_alone_carries_loss_or_those_since_a_message(any_family: str) -> None:
    renderer = make_renderer(any_family)
    for name in rotating((name for name in rows(any_family) if name in SHAPES), f"turns {any_family}", 3):
        conversation, tokens, _ = rows(any_family)[name]
        if replies := assistants(conversation):
            sample = sample_of(renderer, conversation, turns="last")
            assert np.array_equal(sample.mask, tokens.mask & (tokens.messages == replies[-1])), name
        for since in (2, len(conversation.messages) - 1, len(conversation.messages)):
            if 0 <= since <= len(conversation.messages):
                sample = sample_of(renderer, conversation, since=since)
                assert np.array_equal(sample.mask, tokens.mask & (tokens.messages >= since)), (name, since)


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_flagged_turn_carries_no_loss(flag: dict[str, Any]) -> None:
    renderer = make_renderer("qwen3")
    conversation = CONVERSATIONS["agentic_no_reasoning"]
    plain = sample_of(renderer, conversation)
    messages = [message | flag if at == 3 else message for at, message in enumerate(conversation.messages)]
    explicit = [message | {"train": True, "weight": 1} if "tool_calls" in message else message for message in messages]
    for flagged in (messages, explicit):
        sample = sample_of(renderer, Conversation(flagged, conversation.tools), turns="flagged")
        assert np.array_equal(sample.ids, plain.ids)
        assert np.array_equal(sample.mask, plain.mask & (plain.messages != 3))
        assert not sample.notes


def test_a_flag_that_is_not_used_gets_a_note() -> None:
    messages = [HI, assistant("A.") | {"train": False}, user("B?"), assistant("B.") | {"weight": 0}]
    sample = sample_of(make_renderer("qwen2.5"), Conversation(messages))
    assert set(sample.messages[sample.mask].tolist()) == {1, 3}
    assert [note for note in sample.notes if "messages 1, 3" in note and "turns='flagged'" in note]
    silent = sample_of(make_renderer("qwen2.5"), Conversation([HI, assistant("A.") | {"train": True}]))
    assert not silent.notes


def test_conversation_without_an_assistant_trains_nothing(any_family: str) -> None:
    renderer = make_renderer(any_family)
    sample = build_supervised_sample(renderer, [HI])
    assert np.array_equal(sample.ids, renderer.render([HI]).ids)
    assert not sample.trained
    assert [one.trained for one in build_supervised_samples(renderer, [HI], past="expand")] == [0]


# -- selection of roles


@pytest.mark.parametrize("role", ["user", "tool"])
def test_other_roles_train_their_text_and_no_scaffold(any_family: str, role: str) -> None:
    renderer = make_renderer(any_family)
    failures = []
    seen = 0
    candidates = [(name, row) for name, row in rows(any_family).items() if name in SHAPES]
    for name, (conversation, tokens, plain) in rotating(candidates, any_family, 6):
        sample = sample_of(renderer, conversation, roles=[role])
        both = sample_of(renderer, conversation, roles=["assistant", role])
        body = tokens.select(role=role, field="content") & ~tokens.mask
        seen += int(body.sum())
        if not np.array_equal(sample.mask, body) or not np.array_equal(both.mask, body | plain.mask):
            failures.append(f"{name}: {tokens.decode(sample.mask)!r}, not {tokens.decode(body)!r}")
    assert not failures, some(failures)
    assert seen or (any_family, role) == ("gemma-3", "tool")  # its template has no tools


# -- parts of a turn


def test_parts_carry_loss_alone_and_together_and_are_all_of_a_turn(any_family: str) -> None:
    renderer = make_renderer(any_family)
    names = ("reasoning_content_and_call", "agentic_json_arguments", *rotating(SHAPES, any_family, 6))
    for name in (name for name in names if name in rows(any_family)):
        conversation, tokens, sample = rows(any_family)[name]
        assert np.array_equal(np.isin(sample.parts, [Part[part.upper()] for part in PARTS]) & tokens.mask, tokens.mask)
        for number in range(16) if name == names[0] else (1, 2, 4, 8):
            selected: list[Any] = [part for bit, part in enumerate(PARTS) if number >> bit & 1]
            members = [Part[part.upper()] for part in reversed(selected)]
            expected = tokens.mask & np.isin(sample.parts, members)
            for parts in (selected, members) if name == names[0] else (selected,):
                assert np.array_equal(sample_of(renderer, conversation, parts=parts).mask, expected), (name, parts)


def test_fields_that_have_no_part_go_with_the_content() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    renderer = over_bytes(source, controls="<|user|><|assistant|>")
    chat = Conversation([HI, assistant("Hello.") | {"name": "Ada"}])
    samples = {part: sample_of(renderer, chat, parts=[part]) for part in PARTS}
    assert renderer.tokenizer.decode(samples["content"].ids[samples["content"].mask]) == "Ada: Hello."
    assert [samples[part].trained for part in PARTS] == [0, 11, 0, 1]


# -- parts, compared with the parser


NO_REASONING = {
    *("qwen2.5", "qwen3-instruct-2507", "qwen3-vl", "qwen3-coder", "deepseek-v3", "kimi-k2", "llama-3.1", "llama-3.2"),
    *("mistral-nemo", "gemma-3", "deepseek-r1", "deepseek-v3.1"),  # the last two drop reasoning even in the last turn
}
"""Families whose turns have no reasoning part."""
BY_FIELD = {"reasoning_content": Part.REASONING, "content": Part.CONTENT, "tool_calls": Part.TOOL_CALLS}
WRITTEN_AS_ANOTHER_PART = {
    "gpt-oss": "content beside a call is written in the channel for reasoning",
    **dict.fromkeys(("deepseek-v3", "deepseek-r1"), "content that is None is printed as text before a call"),
}
"""Families whose templates write a field where the parser reads a different part."""


def test_the_parts_that_the_parser_reads_are_the_fields_that_the_trace_shows(any_family: str) -> None:
    kinds: set[int] = set()
    differing: list[str] = []
    for name, (_, tokens, sample) in rows(any_family).items():
        assert sample.parts is not None
        for turn in tokens.turns:
            turn_parts = sample.parts[turn.start : turn.stop]
            closed = turn.stop_token is not None and turn.start < turn.stop
            assert (turn_parts == Part.STOP).nonzero()[0].tolist() == ([len(turn_parts) - 1] if closed else []), name
            assert set(turn_parts.tolist()) <= {Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP}, name
            kinds |= set(turn_parts.tolist())
            for at in range(turn.start, turn.stop):
                expected = BY_FIELD.get(tokens.fields[at].split(".")[0])
                if expected is not None and sample.parts[at] != expected and "</think>" not in tokens.text:
                    differing.append(f"{name}, token {at}: {tokens.fields[at]} is {Part(sample.parts[at]).name}")
    assert not differing or any_family in WRITTEN_AS_ANOTHER_PART, differing[:5]
    assert kinds >= {Part.CONTENT, Part.STOP}
    assert (Part.TOOL_CALLS in kinds) == (any_family != "gemma-3")  # its template has no tools
    assert (Part.REASONING in kinds) == (any_family not in NO_REASONING)


def test_white_space_goes_with_reasoning_and_inline_reasoning_is_reasoning_whatever_follows() -> None:
    inline = "<think>\nHm, hm.\n</think>\n\n"
    for family, part, text, reply in (
        ("glm-4.6", "content", "yes", assistant("yes", reasoning="why")),
        *(("qwen3", "reasoning", inline, assistant(inline + more)) for more in ("", "Hello!")),
        *(("qwen3", "reasoning", inline, assistant(inline + more, PARIS)) for more in ("", "Look.")),
    ):
        renderer = make_renderer(family)
        sample = sample_of(renderer, Conversation([ASK, reply], SIMPLE), parts=[part])
        assert renderer.tokenizer.decode(sample.ids[sample.mask]) == text


CALLED = '<tool_call>\n{"name": "f", "arguments": {"s": "a </tool_call> b"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (assistant("Write <tool_call> first."), ["", "Write <tool_call> first.", ""]),
        (assistant("ok", reasoning="A </think>?"), ["<think>\nA </think>?\n</think>\n\n", "ok", ""]),
        (assistant("", call("f", {"s": "a </tool_call> b"})), ["", "", CALLED]),
    ],
    ids=["content", "reasoning", "tool_calls"],
)
def test_a_field_that_spells_a_delimiter_is_one_part(message: dict[str, Any], expected: list[str]) -> None:
    renderer = create_renderer(POCKET)
    samples = [build_supervised_sample(renderer, [HI, message], parts=[part]) for part in PARTS[:3]]
    assert [renderer.tokenizer.decode(sample.ids[sample.mask]) for sample in samples] == expected


# -- errors


@pytest.mark.parametrize(
    ("settings", "kind", "named"),
    [
        ({"turns": "first"}, RendererError, ["'all'", "'last'", "'flagged'", "'first'"]),
        ({"past": "keep"}, RendererError, ["'template'", "'preserve'", "'expand'", "'keep'"]),
        ({"parts": ["thoughts"]}, SampleError, [*map(repr, PARTS), "'thoughts'"]),
        ({"parts": "tools"}, SampleError, [*map(repr, PARTS), "'tools'"]),
        ({"parts": [Part.SCAFFOLD]}, SampleError, [*map(repr, PARTS)]),
        ({"roles": [1]}, SampleError, ["strings"]),
        ({"past": "expand"}, SampleError, ["build_supervised_samples"]),
        ({"since": 99}, SampleError, ["since is 99"]),
        ({"since": -1}, SampleError, ["since must be at least 0"]),
    ],
)
def test_invalid_settings_are_refused_with_the_choices(
    settings: dict[str, Any], kind: type[Exception], named: Sequence[str]
) -> None:
    with pytest.raises(kind) as raised:
        sample_of(make_renderer("qwen2.5"), Conversation([HI]), **settings)
    assert [name for name in named if name not in str(raised.value)] == []


def test_settings_are_read_anew_for_every_row() -> None:
    renderer, messages, named = create_renderer(POCKET), [HI, assistant("ok")], {"first": "assistant"}
    roles = named.values()
    assert build_supervised_sample(renderer, messages, roles=roles).trained_messages == [1]
    named["first"] = "user"
    assert build_supervised_sample(renderer, messages, roles=roles).trained_messages == [0]
    row = build_supervised_sample(renderer, messages, parts=iter(["content"]))
    assert renderer.tokenizer.decode(row.ids[row.mask]) == "ok"
    for wrong in ((2, 1, 3, 4), memoryview(bytearray(b"x"))):  # the first equals the parts of the rows before
        with pytest.raises(SampleError, match="parts must be some of"):
            build_supervised_sample(renderer, messages, parts=wrong)
    with pytest.raises(SampleError, match="weight: must be true or false"):
        build_supervised_sample(renderer, [HI, assistant("ok") | {"weight": np.array([0, 1])}])
