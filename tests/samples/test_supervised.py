"""Supervised rows: exactly what was rendered, trained exactly where an assistant samples, whatever is chosen of it."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tests.conversations import (
    CONVERSATIONS,
    HI,
    SIMPLE,
    Conversation,
    assistant,
    user,
)
from tests.samples.family_rows import (
    SHAPES,
    assistants,
    chats,
    make_renderer,
    rows,
    sample_of,
)
from tests.support import SPECIAL, rendered, rotating, some, tokenizer_json_for
from tokentrace import (
    RenderedTokens,
    TemplateError,
    TokentraceError,
    build_supervised_sample,
    build_supervised_samples,
    create_renderer,
)
from tokentrace.errors import RendererError, SampleError
from tokentrace.pocket import POCKET
from tokentrace.rendering import Past
from tokentrace.samples.sample import Sample
from tokentrace.samples.supervised import SampleBuilder, SampleSettings
from tokentrace.study.study import TemplateStudy
from tokentrace.tokens import Tokenizer
from tokentrace.tokens.kinds import Kind, Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""The tests of that warning catch it themselves."""
PARTS = ("reasoning", "content", "tool_calls", "stop")
# -- the default row


def test_row_has_the_ids_and_the_mask_of_the_rendering(any_family: str) -> None:
    renderer = make_renderer(any_family)
    made, trained = rows(any_family), 0
    for name, (_, tokens, sample) in made.items():
        assert_row_is_the_rendering(sample, tokens, name)
        trained += sample.trained
    assert trained > 100
    for name in rotating(made, any_family, 12):
        conversation, tokens, _ = made[name]
        assert_row_is_the_rendering(sample_of(renderer, conversation), tokens, name)


def assert_row_is_the_rendering(sample: Sample, tokens: RenderedTokens, name: str) -> None:
    assert np.array_equal(sample.ids, tokens.ids), name
    assert np.array_equal(sample.mask, tokens.mask), name
    assert np.array_equal(sample.messages, tokens.messages), name
    assert np.array_equal(sample.kinds == Kind.SAMPLED, tokens.mask), name


def test_refuses_what_the_renderer_refuses(any_family: str) -> None:
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


def test_labels_are_ids_where_there_is_loss_and_ignored_elsewhere(any_family: str) -> None:
    for name, (_, _, sample) in rows(any_family).items():
        expected = [int(index) if on else -100 for index, on in zip(sample.ids, sample.mask, strict=True)]
        assert sample.labels.tolist() == expected, name
        assert sample.attention_mask.tolist() == [1] * len(sample), name
        assert sample.position_ids.tolist() == list(range(len(sample))), name


def test_row_unpacks_into_two_lists() -> None:
    sample = sample_of(make_renderer("qwen3"), CONVERSATIONS["multi_turn"])
    ids, mask = sample
    assert type(ids) is list
    assert type(mask) is list
    assert all(type(value) is int for value in (*ids, *mask))
    assert (ids, mask) == (sample.ids.tolist(), sample.mask.astype(int).tolist())
    assert set(mask) == {0, 1}


def test_a_row_is_that_of_the_messages_as_they_were() -> None:
    builder = SampleBuilder(create_renderer(POCKET))
    given = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    [expected] = builder.build(copy.deepcopy(given))
    [row] = builder.build(given)
    for message in given:
        message["from"] = message.pop("role")
    for name in ("messages", "kinds", "parts"):
        assert getattr(row, name).tolist() == getattr(expected, name).tolist()


def test_what_a_row_knows_of_tokens_is_found_when_it_is_asked_for() -> None:
    """Whatever is done with a row before: it is copied, pickled, cut, or asked for something that it has not."""
    renderer = create_renderer(POCKET)

    def fresh() -> Sample:
        return build_supervised_sample(renderer, CONVERSATIONS["reasoning_content_and_call"].messages)

    def told(sample: Sample) -> list[Any]:
        return [getattr(sample, name).tolist() for name in ("ids", "mask", "messages", "kinds", "parts")]

    sample, expected = fresh(), told(fresh())
    assert sample._later is not None
    assert len({len(row) for row in expected}) == 1
    ways: list[Callable[[Sample], Sample]] = [
        copy.copy,
        copy.deepcopy,
        lambda one: pickle.loads(pickle.dumps(one)),
        lambda one: one.replace(name="x"),
        lambda one: one.slice(0, len(one)),
    ]
    for way in ways:
        assert told(way(fresh())) == expected
    with pytest.raises(AttributeError, match="no 'nothing'"):
        getattr(sample, "nothing")  # noqa: B009
    assert sample._later is not None
    assert (sample.parts is sample.parts, sample._later, told(sample)) == (True, None, expected)


def test_row_takes_one_render(any_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a renderer has seen such conversations; the first ones teach it how the template prompts and ends turns.

    Where the generation prompt may depend on the conversation (DeepSeek), each turn takes two more.
    """
    renderer = make_renderer(any_family)
    of_turn = 0 if renderer.study().template.asks_alike else 2
    builders = [SampleBuilder(renderer, SampleSettings(past=past)) for past in ("template", None)]
    shown = {name: row for name, row in rows(any_family).items() if name in SHAPES}
    for builder in builders:
        for conversation, _, _ in shown.values():
            builder.build(conversation.messages, conversation.tools)
    calls: list[int] = []
    run = TemplateStudy.run
    monkeypatch.setattr(TemplateStudy, "run", lambda *given: calls.append(1) or run(*given))
    more = set()
    for builder in builders:
        for name, (conversation, _, _) in shown.items():
            calls.clear()
            builder.build(conversation.messages, conversation.tools)
            assert calls, name
            turns = sum(message["role"] == "assistant" for message in conversation.messages)
            if len(calls) > 1 + of_turn * turns:
                more.add(name)
    assert not more


# -- which turns


def test_last_turn_alone_carries_loss(any_family: str) -> None:
    renderer = make_renderer(any_family)
    for name, (conversation, tokens, _) in rows(any_family).items():
        if name in SHAPES and (own := assistants(conversation)):
            sample = sample_of(renderer, conversation, turns="last")
            assert np.array_equal(sample.mask, tokens.mask & (tokens.messages == own[-1])), name


def test_turns_before_a_message_carry_no_loss(any_family: str) -> None:
    renderer = make_renderer(any_family)
    for name, (conversation, tokens, _) in rows(any_family).items():
        if name.startswith(("agentic", "multi_turn")):
            for since in (2, len(conversation.messages) - 1, len(conversation.messages)):
                sample = sample_of(renderer, conversation, since=since)
                assert np.array_equal(sample.mask, tokens.mask & (tokens.messages >= since)), (name, since)


@pytest.mark.parametrize("flag", [{"train": False}, {"weight": 0}, {"weight": 0.0}])
def test_flagged_turn_carries_no_loss(flag: dict[str, Any]) -> None:
    renderer = make_renderer("qwen3")
    conversation = CONVERSATIONS["agentic_no_reasoning"]
    plain = sample_of(renderer, conversation)
    messages = [message | flag if at == 3 else message for at, message in enumerate(conversation.messages)]
    said = [message | {"train": True, "weight": 1} if "tool_calls" in message else message for message in messages]
    for given_messages in (messages, said):
        sample = sample_of(renderer, Conversation(given_messages, conversation.tools), turns="flagged")
        assert np.array_equal(sample.ids, plain.ids)
        assert np.array_equal(sample.mask, plain.mask & (plain.messages != 3))
        assert not sample.notes


def test_flag_that_is_not_asked_for_is_told() -> None:
    messages = [HI, assistant("A.") | {"train": False}, user("B?"), assistant("B.") | {"weight": 0}]
    sample = sample_of(make_renderer("qwen2.5"), Conversation(messages))
    assert set(sample.messages[sample.mask].tolist()) == {1, 3}
    assert [note for note in sample.notes if "messages 1, 3" in note and "turns='flagged'" in note]
    silent = sample_of(make_renderer("qwen2.5"), Conversation([HI, assistant("A.") | {"train": True}]))
    assert not silent.notes


@pytest.mark.parametrize("value", ["no", 2, 0.5, [], {"on": True}])
@pytest.mark.parametrize("name", ["train", "weight"])
def test_flag_of_another_kind_is_refused(name: str, value: Any) -> None:
    messages = [HI, assistant("A.") | {name: value}]
    with pytest.raises(SampleError, match=rf"^message 1, {name}: .*{re.escape(repr(value))}"):
        sample_of(make_renderer("qwen2.5"), Conversation(messages), turns="flagged")


def test_conversation_without_an_assistant_trains_nothing(any_family: str) -> None:
    renderer = make_renderer(any_family)
    sample = build_supervised_sample(renderer, [HI])
    assert np.array_equal(sample.ids, renderer.render([HI]).ids)
    assert not sample.trained
    assert [one.trained for one in build_supervised_samples(renderer, [HI], past="expand")] == [0]


# -- whose text


@pytest.mark.parametrize("role", ["user", "tool"])
def test_other_roles_train_their_text_and_no_scaffold(any_family: str, role: str) -> None:
    renderer = make_renderer(any_family)
    failures = []
    seen = 0
    shown = [(name, row) for name, row in rows(any_family).items() if name in SHAPES]
    for name, (conversation, tokens, plain) in rotating(shown, any_family, 6):
        sample = sample_of(renderer, conversation, roles=[role])
        both = sample_of(renderer, conversation, roles=["assistant", role])
        body = tokens.select(role=role, field="content") & ~tokens.mask
        seen += int(body.sum())
        if not np.array_equal(sample.mask, body) or not np.array_equal(both.mask, body | plain.mask):
            failures.append(f"{name}: {tokens.decode(sample.mask)!r}, not {tokens.decode(body)!r}")
    assert not failures, some(failures)
    assert seen or (any_family, role) == ("gemma-3", "tool")  # whose template has no tools


# -- what of a turn


def test_parts_of_a_turn_are_all_of_it_and_none_twice(any_family: str) -> None:
    renderer = make_renderer(any_family)
    shown = [(name, row) for name, row in rows(any_family).items() if name in SHAPES]
    for name, (conversation, tokens, _) in rotating(shown, any_family, 6):
        masks = [sample_of(renderer, conversation, parts=[part]).mask for part in PARTS]
        assert np.array_equal(sum(mask.astype(int) for mask in masks), tokens.mask.astype(int)), name


def test_parts_carry_loss_together_as_each_does_alone(any_family: str) -> None:
    """Checked on two conversations: all subsets of the parts, in any order and by name or member."""
    renderer = make_renderer(any_family)
    for name in ("reasoning_content_and_call", "agentic_json_arguments"):
        if name not in rows(any_family):
            continue
        conversation, tokens, sample = rows(any_family)[name]
        for number in range(16):
            chosen = [part for bit, part in enumerate(PARTS) if number >> bit & 1]
            members = [Part[part.upper()] for part in reversed(chosen)]
            expected = tokens.mask & np.isin(sample.parts, members)
            assert np.array_equal(sample_of(renderer, conversation, parts=chosen).mask, expected), chosen
            assert np.array_equal(sample_of(renderer, conversation, parts=members).mask, expected), chosen


def test_fields_that_have_no_part_go_with_the_content() -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{% if m.name %}{{ m.name }}: {% endif %}{{ m.content }}</s>"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    made_up = tokenizer_json_for(source, "<|user|><|assistant|>")
    renderer = create_renderer(Tokenizer(made_up, variables=SPECIAL, fast=False), "default", chat_template=source)
    chat = Conversation([HI, assistant("Hello.") | {"name": "Ada"}])
    found = {part: sample_of(renderer, chat, parts=[part]) for part in PARTS}
    assert renderer.tokenizer.decode(found["content"].ids[found["content"].mask]) == "Ada: Hello."
    assert [found[part].trained for part in PARTS] == [0, 11, 0, 1]


# -- errors


@pytest.mark.parametrize(
    ("chosen", "kind", "named"),
    [
        ({"turns": "first"}, RendererError, ["'all'", "'last'", "'flagged'", "'first'"]),
        ({"past": "keep"}, RendererError, ["'template'", "'preserve'", "'expand'", "'keep'"]),
        ({"parts": ["thoughts"]}, SampleError, [*map(repr, PARTS), "'thoughts'"]),
        ({"parts": "tools"}, SampleError, [*map(repr, PARTS), "'tools'"]),
        ({"parts": [Part.SCAFFOLD]}, SampleError, [*map(repr, PARTS)]),
        ({"roles": [1]}, SampleError, ["strings"]),
        ({"past": "expand"}, SampleError, ["build_supervised_samples"]),
    ],
)
def test_settings_that_are_none_are_refused_with_the_choices(
    chosen: dict[str, Any], kind: type[Exception], named: Sequence[str]
) -> None:
    with pytest.raises(kind) as raised:
        sample_of(make_renderer("qwen2.5"), Conversation([HI]), **chosen)
    assert [name for name in named if name not in str(raised.value)] == []


@pytest.mark.parametrize("messages", [[], "text", [{"content": "x"}], [HI, {"role": "assistant", "content": 5.5}]])
@pytest.mark.parametrize("build", [build_supervised_sample, build_supervised_samples])
def test_messages_that_are_none_are_refused_as_by_render(build: Callable[..., Any], messages: Any) -> None:
    renderer = make_renderer("qwen2.5")
    with pytest.raises(TokentraceError) as refused:
        renderer.render(messages)
    with pytest.raises(type(refused.value)) as raised:
        build(renderer, messages)
    assert str(raised.value) == str(refused.value)


def test_refusal_of_the_template_comes_through() -> None:
    with pytest.raises(TemplateError):
        build_supervised_sample(make_renderer("gemma-3"), [user("One."), user("Two.")])


# -- for any conversation


@settings(max_examples=150, deadline=None)
@given(chats())
def test_trained_tokens_are_those_of_the_sampled_turns(messages: list[dict[str, Any]]) -> None:
    renderer = make_renderer("qwen3")
    chat = Conversation(messages, SIMPLE)
    tokens = renderer.render(messages, tools=SIMPLE)
    for past in ("template", "preserve"):
        sample = sample_of(renderer, chat, past=past)
        shown = tokens if past == "template" else renderer.with_past(Past.PRESERVE).render(messages, tools=SIMPLE)
        assert sample.trained == sum(turn.stop - turn.start for turn in shown.turns) == int(shown.mask.sum())
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                said = renderer.tokenizer.decode(sample.ids[sample.mask & (sample.messages == at)])
                assert message["content"].lstrip("\n").rstrip() in said
                assert past == "template" or message.get("reasoning_content", "").strip("\n") in said
    made = build_supervised_samples(renderer, messages, tools=SIMPLE, past="expand")
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert [int(at) for row in made for at in np.unique(row.messages[row.mask])] == turns
