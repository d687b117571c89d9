"""Supervised rows: exactly what was rendered, trained exactly where an assistant samples, whatever is chosen of it."""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import support
from tests.assets import FAMILIES
from tests.conversations import (
    ASK,
    CONVERSATIONS,
    HI,
    PARIS,
    SIMPLE,
    SUNNY,
    Conversation,
    assistant,
    result,
    user,
)
from tests.oracle import hf_tokenizer
from tests.support import SPECIAL, per_vocabulary, rendered, some, tokenizer_json_for
from tokentrace import (
    HistoryWarning,
    InputError,
    RenderedTokens,
    Renderer,
    RendererError,
    Sample,
    SampleError,
    TemplateError,
    Tokenizer,
    TokentraceError,
    TurnStartWarning,
    build_prompt_response_sample,
    build_supervised_sample,
    build_supervised_samples,
    compare_histories,
    create_renderer,
)
from tokentrace.parsing.response import PartKind
from tokentrace.samples.supervised import SampleBuilder, SampleSettings
from tokentrace.study.turns import SampledTurn
from tokentrace.tokens.kinds import Kind, Part

make_renderer = functools.partial(support.make_renderer, messages="as_given")
"""The conversations of the matrix go to the template as they are: what it does to each is known."""

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.TurnStartWarning")
"""The tests of that warning catch it themselves."""

PARTS = ("reasoning", "content", "tool_calls", "stop")

SHAPES = {
    name: conversation
    for name, conversation in CONVERSATIONS.items()
    if not name.startswith(("arguments_", "content_", "tools_"))
    or name in ("content_none_alone", "content_one_text_part", "content_text_parts")
}
"""The matrix without what varies text alone, for tests that make several rows of each conversation."""


@per_vocabulary
def rows(family: str) -> dict[str, tuple[Conversation, RenderedTokens, Sample]]:
    """Every conversation that a family renders, and the default row of it."""
    renderer = make_renderer(family)
    builder = SampleBuilder(renderer)
    out = {}
    for name, conversation in CONVERSATIONS.items():
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            (made,) = builder.build(conversation.messages, conversation.tools)
            out[name] = (conversation, tokens, made)
    return out


@per_vocabulary
def expanded(family: str) -> dict[str, list[Sample]]:
    """The rows that ``past="expand"`` makes of each conversation."""
    builder = SampleBuilder(make_renderer(family), SampleSettings(past="expand"))
    out = {}
    for name, (conversation, _, _) in rows(family).items():
        if name in SHAPES and name != ASSISTANT_FIRST:
            out[name] = builder.build(conversation.messages, conversation.tools)
    return out


ASSISTANT_FIRST = "assistant_first"
"""No prompt asks for its first turn, and some templates refuse it where nothing follows."""


def sample_of(renderer: Renderer, conversation: Conversation, **chosen: Any) -> Sample:
    return build_supervised_sample(
        renderer, conversation.messages, tools=conversation.tools, **{"past": "template"} | chosen
    )


def told_of(sample: Sample, kind: type[Warning]) -> list[str]:
    return [str(warning) for warning in sample.warnings if isinstance(warning, kind)]


def assistants(conversation: Conversation) -> list[int]:
    return [at for at, message in enumerate(conversation.messages) if message["role"] == "assistant"]


# -- the default row


def test_row_has_the_ids_and_the_mask_of_the_rendering(any_family: str) -> None:
    renderer = make_renderer(any_family)
    trained = 0
    for name, (conversation, tokens, _) in rows(any_family).items():
        sample = sample_of(renderer, conversation)
        assert np.array_equal(sample.ids, tokens.ids), name
        assert np.array_equal(sample.mask, tokens.mask), name
        assert np.array_equal(sample.messages, tokens.messages), name
        assert np.array_equal(sample.kinds == Kind.SAMPLED, tokens.mask), name
        trained += sample.trained
    assert trained > 100


def test_refuses_what_the_renderer_refuses(any_family: str) -> None:
    renderer = make_renderer(any_family)
    for name, conversation in CONVERSATIONS.items():
        refused = rendered(renderer, conversation)
        if not isinstance(refused, RenderedTokens):
            with pytest.raises(type(refused)) as raised:
                sample_of(renderer, conversation)
            assert str(raised.value) == str(refused), name


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


def test_row_takes_one_render(any_family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a renderer has seen such conversations; the first ones teach it how the template prompts and ends turns."""
    renderer = make_renderer(any_family)
    builders = [SampleBuilder(renderer, SampleSettings(past=past)) for past in ("template", None)]
    shown = {name: row for name, row in rows(any_family).items() if name in SHAPES}
    for builder in builders:
        for conversation, _, _ in shown.values():
            builder.build(conversation.messages, conversation.tools)
    calls: list[int] = []
    run = Renderer._run
    monkeypatch.setattr(Renderer, "_run", lambda *given: calls.append(1) or run(*given))
    more = set()
    for builder in builders:
        for name, (conversation, _, _) in shown.items():
            calls.clear()
            builder.build(conversation.messages, conversation.tools)
            assert calls, name
            if len(calls) > 1:
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
    for name, (conversation, tokens, plain) in rows(any_family).items():
        if name not in SHAPES:
            continue
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
    for name, (conversation, tokens, _) in rows(any_family).items():
        if name not in SHAPES:
            continue
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


# -- parts, held against the parser

BLANK = "white space after the closing tag of reasoning: part of the reasoning here, of the content to the parser"
STOP = "the parser counts the stop token to the call that it ends"
CHANNEL = "content beside a call stands in the channel for reasoning, and the parser reads what it is written as"
UNOPENED = "the template writes these calls with no opening delimiter, and the parser takes the closing one for text"

PARSED_OTHERWISE: dict[str, set[str]] = {
    "qwq-32b": {BLANK},
    **{key: {BLANK} for key in ("glm-4.5", "glm-4.6", "glm-4.7", "glm-4.7-flash", "glm-5", "glm-5.1", "glm-5.2")},
    "minimax-m2": {BLANK},
    "deepseek-v3.2": {BLANK},
    "deepseek-v4": {BLANK},
    "kimi-k2.5": {BLANK},
    "nemotron-3-nano": {BLANK},
    "gpt-oss": {STOP, CHANNEL},
    "deepseek-v3": {UNOPENED},
    "deepseek-r1": {UNOPENED},
}
"""Where parts differ from what the parser reads."""

NO_REASONING = {
    "qwen2.5": "knows no reasoning",
    "qwen3-instruct-2507": "knows no reasoning",
    "qwen3-vl": "knows no reasoning",
    "qwen3-coder": "knows no reasoning",
    "deepseek-v3": "knows no reasoning",
    "deepseek-r1": "leaves all reasoning out, of the last turn too",
    "deepseek-v3.1": "leaves all reasoning out, of the last turn too",
    "kimi-k2": "knows no reasoning",
    "llama-3.1": "knows no reasoning",
    "llama-3.2": "knows no reasoning",
    "mistral-nemo": "knows no reasoning",
    "gemma-3": "knows no reasoning",
}
"""Families whose turns have no part that is reasoning."""

INLINE = {
    "inline_alone": Conversation([HI, assistant("<think>\nHm, hm.\n</think>\n\n")]),
    "inline_and_answer": Conversation([HI, assistant("<think>\nHm, hm.\n</think>\n\nHello!")]),
    "inline_and_call": Conversation([ASK, assistant("<think>\nHm, hm.\n</think>\n\n", PARIS)], SIMPLE),
    "inline_content_and_call": Conversation([ASK, assistant("<think>\nHm, hm.\n</think>\n\nLook.", PARIS)], SIMPLE),
}
"""Reasoning between tags in the content, with all that can follow it."""

BY_KIND = {
    PartKind.REASONING: Part.REASONING,
    PartKind.CONTENT: Part.CONTENT,
    PartKind.TOOL_CALL: Part.TOOL_CALLS,
}


def test_parts_are_what_the_parser_reads(any_family: str) -> None:
    renderer = make_renderer(any_family)
    shown = dict(rows(any_family))
    for name, conversation in INLINE.items():
        tokens = rendered(renderer, conversation)
        if isinstance(tokens, RenderedTokens):
            shown[name] = (conversation, tokens, sample_of(renderer, conversation))
    found: dict[str, str] = {}
    kinds = set()
    for name, (conversation, tokens, sample) in shown.items():
        for turn in tokens.turns:
            for cause, part in differences(renderer, conversation, tokens, sample, turn):
                found.setdefault(cause, f"{name}, message {turn.message}")
                kinds.add(part)
    assert set(found) - {""} == PARSED_OTHERWISE.get(any_family, set()), found
    assert kinds >= {Part.CONTENT, Part.STOP}
    assert (Part.TOOL_CALLS in kinds) == (any_family != "gemma-3")  # whose template has no tools
    assert (Part.REASONING in kinds) == (any_family not in NO_REASONING)


def differences(
    renderer: Renderer, conversation: Conversation, tokens: RenderedTokens, sample: Sample, turn: SampledTurn
) -> Iterator[tuple[str, Part]]:
    """For each part that the parser reads in a turn, why its tokens are of another part, or ``""``."""
    assert sample.parts is not None
    own = sample.parts[turn.start : turn.stop]
    ids = tokens.ids[turn.start : turn.stop]
    parsed = renderer.parse_response(ids, tools=conversation.tools, prompt_ids=tokens.ids[: turn.start])
    for part in parsed.parts:
        want = BY_KIND[part.kind]
        for at in range(*part.span):
            yield "" if own[at] == want else cause_of(renderer, sample, turn, at, want), want
    closed = turn.stop_token is not None and turn.start < turn.stop
    assert (own == Part.STOP).nonzero()[0].tolist() == ([len(own) - 1] if closed else [])
    assert set(own.tolist()) <= {Part.REASONING, Part.CONTENT, Part.TOOL_CALLS, Part.STOP}
    if closed:
        yield "", Part.STOP


def cause_of(renderer: Renderer, sample: Sample, turn: SampledTurn, at: int, want: Part) -> str:
    """Why a token is not of the part that the parser gives it; else the token and both parts."""
    assert sample.parts is not None
    own = sample.parts[turn.start : turn.stop]
    text = renderer.tokenizer.decode([int(sample.ids[turn.start + at])])
    if own[at] == Part.REASONING and want is Part.CONTENT and not text.strip():
        return BLANK
    if own[at] == Part.STOP and want is Part.TOOL_CALLS and at == len(own) - 1:
        return STOP
    if own[at] == Part.CONTENT and want is Part.REASONING and Part.TOOL_CALLS in own:
        return CHANNEL
    opening = renderer.tokenizer.token_id("<｜tool▁calls▁begin｜>")
    if text == "<｜tool▁calls▁end｜>" and opening not in sample.ids[turn.start : turn.stop]:
        return UNOPENED
    return f"{text!r} is {Part(own[at]).name}, and {want.name} to the parser"


def test_inline_reasoning_is_reasoning_whatever_follows() -> None:
    """The template takes it apart and writes its tags anew, so that nothing but the text is the message's own."""
    renderer = make_renderer("qwen3")
    for name, conversation in INLINE.items():
        sample = sample_of(renderer, conversation, parts=["reasoning"])
        shown = renderer.tokenizer.decode(sample.ids[sample.mask])
        assert shown == "<think>\nHm, hm.\n</think>\n\n", name


# -- the past, turn by turn

OVER = "a token reaches over the end of the prompt, as it does in the template's own ids"
OTHER_PROMPT = "the template writes such a turn with other words than it prompts with, the last one too"

PROMPTED_OTHERWISE: dict[str, set[str]] = {
    "qwen2.5": {OVER},
    "qwq-32b": {OVER, OTHER_PROMPT},
    "qwen3-instruct-2507": {OVER},
    "qwen3-thinking-2507": {OVER, OTHER_PROMPT},
    "qwen3-vl": {OVER},
    "qwen3-coder": {OVER},
    "qwen3.5": {OVER},
    "qwen3.5-nothink": {OTHER_PROMPT},
    "qwen3.6": {OVER},
    "glm-4.7": {OTHER_PROMPT},
    "glm-4.7-flash": {OTHER_PROMPT},
    "glm-5": {OTHER_PROMPT},
    "minimax-m2": {OVER, OTHER_PROMPT},
    "deepseek-v3": {OTHER_PROMPT},
    "deepseek-r1": {OTHER_PROMPT},
    "nemotron-3-nano": {OVER, OTHER_PROMPT},
}
"""Where an expanded row does not begin with the very ids of the prompt. Families not named here always do."""


def test_expanded_turn_comes_after_the_prompt_that_asks_for_it(any_family: str) -> None:
    """Its history, above all, is the prompt's to the letter: templates that rewrite it give more rows."""
    renderer = make_renderer(any_family)
    found: dict[str, str] = {}
    checked = 0
    for name, made in expanded(any_family).items():
        conversation = CONVERSATIONS[name]
        for row in made:
            for at in row.trained_messages:
                positions = np.flatnonzero(row.mask & (row.messages == at))
                prompt = rendered(renderer, Conversation(conversation.messages[:at], conversation.tools), prompt=True)
                if not len(positions) or not isinstance(prompt, RenderedTokens):
                    continue
                history = prompt.text[: prompt.rendering.tail]
                assert row.rendered.text.startswith(history), (name, at)
                if np.array_equal(row.ids[: positions[0]], prompt.ids):
                    checked += 1
                elif row.rendered.text.startswith(prompt.text):
                    found.setdefault(OVER, f"{name}, message {at}")
                else:
                    found.setdefault(OTHER_PROMPT, f"{name}, message {at}")
    assert set(found) == PROMPTED_OTHERWISE.get(any_family, set()), found
    assert checked > 2


NOTHING_WRITTEN = {("deepseek-v3", "content_none_alone"): "the template writes nothing for a message without content"}


def test_expanded_rows_train_every_turn_once(any_family: str) -> None:
    for name, made in expanded(any_family).items():
        own = assistants(CONVERSATIONS[name])
        nothing = (any_family, name) in NOTHING_WRITTEN
        assert [at for row in made for at in row.trained_messages] == ([] if nothing else own), name


def test_expanded_rows_go_on_as_long_as_they_can(any_family: str) -> None:
    """A row ends where the next one does not begin with it."""
    for name, made in expanded(any_family).items():
        for row, following in itertools.pairwise(made):
            stop = int(np.flatnonzero(row.mask)[-1]) + 1
            assert not np.array_equal(row.ids[:stop], following.ids[:stop]), name


NEVER_REWRITTEN = {
    "qwen2.5",
    "qwen3-instruct-2507",
    "qwen3-vl",
    "qwen3-coder",
    "minimax-m3",
    "deepseek-v3.2",
    "deepseek-v4",
    "kimi-k2",
    "llama-3.1",
    "llama-3.2",
    "gemma-3",
}
"""Templates that write every message as they did when it was the last."""

SYSTEM_MOVED = {"system_in_the_middle", "system_at_the_end"}
"""A system message that comes later, and that the template puts before all others."""

HARDLY_REWRITTEN = {
    # all up to the closing tag and line breaks at the beginning are cut off the content of past turns
    "qwq-32b": {
        "think_inline_in_history",
        "think_inline_empty",
        "think_inline_only_close",
        "think_inline_and_field",
        "call_content_with_newlines",
    },
    "deepseek-v3": SYSTEM_MOVED,
    "deepseek-r1": SYSTEM_MOVED,
    "deepseek-v3.1": SYSTEM_MOVED,
}
"""Templates that rewrite a message in these conversations alone; none of them has another turn after it."""


def test_history_that_is_never_rewritten_gives_the_default_row(any_family: str) -> None:
    made = expanded(any_family)
    alone = any_family in NEVER_REWRITTEN or any_family in HARDLY_REWRITTEN
    assert ({len(some_rows) for some_rows in made.values()} == {1}) == alone
    if alone:
        assert {name for name in made if not is_default(any_family, name)} == HARDLY_REWRITTEN.get(any_family, set())


def is_default(family: str, name: str) -> bool:
    """Whether the expanded row is the default one, up to the last token that carries loss."""
    (made,), sample = expanded(family)[name], rows(family)[name][2]
    stop = int(np.flatnonzero(sample.mask)[-1]) + 1 if sample.trained else len(made)
    same = np.array_equal(made.ids[:stop], sample.ids[:stop])
    return same and np.array_equal(made.mask[:stop], sample.mask[:stop])


@pytest.mark.parametrize("family", ["qwen3", "qwen3-thinking-2507", "gpt-oss", "mistral-nemo"])
def test_history_that_is_rewritten_takes_several_rows(family: str) -> None:
    assert len(expanded(family)["agentic_json_arguments"]) > 1


def test_history_is_the_prompts_where_a_turn_changes_what_comes_before_it() -> None:
    """Mistral shows the system message only as long as nothing answers the user; Harmony the reasoning beside calls."""
    mistral = expanded("mistral-nemo")["system_user_assistant"][0]
    assert "You are a careful assistant." in mistral.rendered.text
    (row, _) = expanded("gpt-oss")["agentic"]
    assert "I need the weather." in row.rendered.text
    assert "I need the weather." not in rows("gpt-oss")["agentic"][1].text


def test_preserved_row_is_that_of_a_renderer_that_keeps_all_thinking(any_family: str) -> None:
    renderer, keeping = make_renderer(any_family), make_renderer(any_family, preserve_all_thinking=True)
    for name, (conversation, _, _) in rows(any_family).items():
        if name in SHAPES:
            tokens = rendered(keeping, conversation)
            sample = sample_of(renderer, conversation, past="preserve")
            assert np.array_equal(sample.ids, tokens.ids), name
            assert np.array_equal(sample.mask, tokens.mask), name


# -- the warning, held against the comparison of histories

PARTS_OF_CONTENT = "content in parts, which the template leaves out; the remark is on turns that say something"
FIRST = "no prompt asks for a first message of the assistant's, so that there is nothing to compare with"
TAG_ALONE = "a closing tag with no opening one counts as reasoning in the content"

TOO_MANY: dict[str, set[str]] = {
    "content_one_text_part": {PARTS_OF_CONTENT},
    "content_text_parts": {PARTS_OF_CONTENT},
    ASSISTANT_FIRST: {FIRST},
    "think_inline_only_close": {TAG_ALONE},
}
"""Conversations for which the warning can be one too many, and why."""


def test_warned_of_every_turn_that_is_trained_otherwise_than_it_was_sampled(any_family: str) -> None:
    """The oracle takes every turn twice: as its prompt asked for it, and as the row of the whole conversation has it.

    What differs the same way when the turn is the last (a token that reaches over the end of the prompt, a thinking
    block that the template only prompts with) no choice of the past can mend, and no warning tells of it.
    """
    renderer = make_renderer(any_family)
    builder = SampleBuilder(renderer)
    missed, needless = [], []
    for name, (conversation, _, _) in rows(any_family).items():
        if name not in SHAPES:
            continue
        (made,) = builder.build(conversation.messages, conversation.tools)
        told = {int(at) for line in told_of(made, HistoryWarning) for at in re.findall(r"\d+", line.partition(":")[0])}
        changed = changed_turns(renderer, conversation)
        if changed - told:
            missed.append(f"{name}: {sorted(changed - told)}, told {told_of(made, HistoryWarning)}")
        if told - changed and name not in TOO_MANY:
            needless.append(f"{name}: {sorted(told - changed)}, told {told_of(made, HistoryWarning)}")
    assert not missed, some(missed)
    assert not needless, some(needless)


def changed_turns(renderer: Renderer, conversation: Conversation) -> set[int]:
    """The past turns that the row of the whole conversation writes otherwise than it does where they are the last."""
    past = [at for at in assistants(conversation) if 0 < at < len(conversation.messages) - 1]
    whole = own_differences(renderer, conversation) if past else {}
    out = set()
    for at in past:
        if not whole.get(at):
            continue
        alone = own_differences(renderer, Conversation(conversation.messages[: at + 1], conversation.tools))
        if whole.get(at) != alone.get(at):
            out.add(at)
    return out


def own_differences(renderer: Renderer, conversation: Conversation) -> dict[int, list[tuple[str, str]]]:
    """For each turn, how production and training differ in the turn itself and the prompt that opens it."""
    try:
        report = compare_histories(renderer, conversation.messages, tools=conversation.tools)
    except TokentraceError:
        return {}
    out: dict[int, list[tuple[str, str]]] = {}
    for step in report.steps:
        if step.message is None:
            continue
        found = step.compare("production", "training")
        out[step.message] = [("missing", "")] if found is None else []
        for difference in found.differences if found is not None else ():
            sides = (difference.left, difference.right)
            if any(part.message == step.message for side in sides for part in side.parts):
                # of GLM's turns, the head of the next one is part only where there is a next one
                shown = tuple(re.sub(r"<\|(user|observation)\|>$", "", side.text) for side in sides)
                if shown[0] != shown[1]:
                    out[step.message].append(shown)  # type: ignore[arg-type]
    return out


def test_warning_says_what_to_choose() -> None:
    renderer = make_renderer("qwen3")
    chat = CONVERSATIONS["reasoning_every_turn"]
    with pytest.warns(HistoryWarning, match=r"^message 1: trained without the reasoning") as told:
        sample = build_supervised_sample(renderer, chat.messages)
    (warning,) = told
    assert warning.filename == __file__
    assert all(f"'{past}'" in str(warning.message) for past in ("expand", "preserve", "template"))
    assert str(warning.message) in sample.notes
    with pytest.warns(HistoryWarning):
        assert len(build_supervised_samples(renderer, chat.messages)) == 1


@pytest.mark.parametrize("past", ["template", "preserve", "expand"])
def test_choice_is_not_warned_of(past: str) -> None:
    for family in ("qwen3", "qwen3-thinking-2507"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", TurnStartWarning)
            for name in ("reasoning_every_turn", "agentic", "multi_turn", "think_inline_in_history"):
                chat = CONVERSATIONS[name]
                made = build_supervised_samples(make_renderer(family), chat.messages, tools=chat.tools, past=past)
                assert made


def test_single_turn_is_not_warned_of(any_family: str) -> None:
    renderer = make_renderer(any_family)
    alone = 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", TurnStartWarning)
        for conversation, _, _ in rows(any_family).values():
            if assistants(conversation) == [len(conversation.messages) - 1]:
                alone += 1
                build_supervised_sample(renderer, conversation.messages, tools=conversation.tools)
    assert alone > 3


def test_turn_that_carries_no_loss_is_not_warned_of() -> None:
    chat = CONVERSATIONS["reasoning_every_turn"]
    with pytest.warns(HistoryWarning):
        build_supervised_sample(make_renderer("qwen3"), chat.messages)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_supervised_sample(make_renderer("qwen3"), chat.messages, turns="last").trained


def test_reasoning_that_is_never_shown_is_noted() -> None:
    sample = build_supervised_sample(make_renderer("qwen2.5"), CONVERSATIONS["reasoning_last"].messages)
    assert [note for note in sample.notes if note.startswith("message 1: ") and "does not show the reasoning" in note]


# -- turns that start where inference never does

STARTS_ELSEWHERE: dict[str, tuple[set[str], str | None]] = {
    "qwq-32b": ({"answer", "call", "thought"}, None),
    "qwen3-thinking-2507": ({"answer", "call"}, "reasoning"),
    "qwen3.5": ({"answer", "call"}, "enable_thinking=False"),
    "qwen3.5-nothink": ({"thought"}, "enable_thinking=True"),
    "qwen3.6": ({"answer", "call"}, "enable_thinking=False"),
    "glm-4.7": ({"answer", "call"}, "enable_thinking=False"),
    "glm-4.7-flash": ({"answer", "call"}, "enable_thinking=False"),
    "glm-5": ({"answer", "call"}, "enable_thinking=False"),
    "minimax-m2": ({"answer", "call"}, "reasoning"),
    "deepseek-r1": ({"answer", "thought"}, None),
    "nemotron-3-nano": ({"answer", "call"}, "enable_thinking=False"),
}
"""Which plain turns do not go on from the prompt for them, and what mends it. QwQ's and R1's templates show reasoning
nowhere and prompt with ``<think>``: nothing mends that. All other families write every such turn as they ask for it."""

SMALL: dict[str, list[dict[str, Any]]] = {
    "answer": [HI, assistant("Hello.")],
    "thought": [HI, {**assistant("Hello."), "reasoning_content": "Greet."}],
    "call": [ASK, assistant("", PARIS)],
}


def test_turn_that_inference_never_starts_is_told_and_no_other(any_family: str) -> None:
    """The oracle is the prompt itself: the row's ids before the turn's first sampled one are the prompt's, or not."""
    renderer = make_renderer(any_family)
    checked = 0
    for name, made in expanded(any_family).items():
        conversation = CONVERSATIONS[name]
        for row in made:
            told = {
                int(at) for line in told_of(row, TurnStartWarning) for at in re.findall(r"\d+", line.partition(":")[0])
            }
            assert all(line in row.notes for line in told_of(row, TurnStartWarning))
            for at in row.trained_messages:
                positions = np.flatnonzero(row.mask & (row.messages == at))
                prompt = rendered(renderer, Conversation(conversation.messages[:at], conversation.tools), prompt=True)
                if len(positions) and isinstance(prompt, RenderedTokens):
                    asked = np.array_equal(row.ids[: positions[0]], prompt.ids)
                    assert asked == (at not in told), (name, at, told_of(row, TurnStartWarning))
                    checked += 1
    assert checked > 20


def test_families_that_write_turns_otherwise_than_they_ask_for_them(any_family: str) -> None:
    renderer, builder = make_renderer(any_family), SampleBuilder(make_renderer(any_family))
    kinds, remedy = STARTS_ELSEWHERE.get(any_family, (set(), None))
    for kind, messages in SMALL.items():
        try:
            (made,) = builder.build(messages, SIMPLE)
        except TokentraceError:
            continue
        assert bool(told_of(made, TurnStartWarning)) == (kind in kinds), (kind, told_of(made, TurnStartWarning))
        if not told_of(made, TurnStartWarning):
            continue
        (said,) = told_of(made, TurnStartWarning)
        assert "turns='flagged'" in said
        if remedy is None:
            assert "Leave them out" in said
            continue
        assert ("reasoning" if remedy == "reasoning" else f"Set {remedy}") in said
        if remedy == "reasoning":
            mended = builder.build([messages[0], {**messages[1], "reasoning_content": "Hm."}], SIMPLE)
        else:
            switched = renderer.with_variables({"enable_thinking": remedy.endswith("True")})
            mended = SampleBuilder(switched).build(messages, SIMPLE)
        assert not told_of(mended[0], TurnStartWarning)


def test_start_is_warned_of_once_with_what_to_do() -> None:
    renderer = make_renderer("qwen3.6")
    with pytest.warns(TurnStartWarning, match=r"^message 1: .*<think>.*Set enable_thinking=False") as told:
        sample = build_supervised_sample(renderer, SMALL["answer"])
    (warning,) = told
    assert warning.filename == __file__
    assert str(warning.message) in sample.notes
    with pytest.warns(TurnStartWarning):
        build_supervised_samples(renderer, SMALL["answer"], past="expand")
    flagged = [HI, {**assistant("Hello."), "train": False}, user("And?"), SMALL["thought"][1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_supervised_sample(renderer, flagged, turns="flagged", past="template").trained
        assert build_supervised_sample(make_renderer("qwen3"), SMALL["answer"]).trained


def test_text_that_runs_into_the_prompt_is_told_as_such() -> None:
    """Qwen2.5's prompt ends in a line break; with one at the head of the content the two are one token."""
    (made,) = SampleBuilder(make_renderer("qwen2.5")).build([HI, assistant("\n\nHello.")])
    assert "white space" in told_of(made, TurnStartWarning)[0]
    (plain,) = SampleBuilder(make_renderer("qwen2.5")).build([HI, assistant("Hello.")])
    assert not told_of(plain, TurnStartWarning)


# -- the stop token of the last turn

GLM = ["glm-4.5", "glm-4.7-flash", "glm-5.2"]


@pytest.mark.parametrize("family", GLM)
@pytest.mark.parametrize(
    ("messages", "stop"),
    [([HI, assistant("Hello.")], "<|user|>"), ([ASK, assistant("", PARIS)], "<|observation|>")],
    ids=["answer", "call"],
)
def test_final_stop_is_the_head_of_the_next_turn(family: str, messages: list[dict[str, Any]], stop: str) -> None:
    renderer = make_renderer(family)
    chat = Conversation(messages, SIMPLE)
    plain, stopped = sample_of(renderer, chat), sample_of(renderer, chat, final_stop=True)
    assert stopped.token_ids == [*plain.token_ids, renderer.tokenizer.token_id(stop)]
    assert stopped.loss_mask == [*plain.loss_mask, 1]
    assert stopped.parts is not None
    assert (int(stopped.parts[-1]), int(stopped.messages[-1]), int(stopped.kinds[-1])) == (Part.STOP, 1, Kind.SAMPLED)
    assert [note for note in plain.notes if repr(stop) in note and "final_stop=True" in note]
    assert not [note for note in stopped.notes if "final_stop" in note]
    content = sample_of(renderer, chat, final_stop=True, parts=["content", "tool_calls"])
    assert (content.token_ids, content.loss_mask[-1]) == (stopped.token_ids, 0)
    after = {"<|user|>": user("More."), "<|observation|>": result("sunny")}[stop]
    whole = renderer.render([*messages, after], tools=SIMPLE)
    assert whole.token_ids[: len(stopped)] == stopped.token_ids
    assert whole.sampled[: len(stopped)] == [bool(on) for on in stopped.loss_mask]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith("glm-")])
def test_expanded_rows_train_the_stop_of_every_turn_that_another_message_follows(family: str) -> None:
    """The oracle is the template: what it writes right after the turn, once the next message is there."""
    renderer = make_renderer(family)
    builder = SampleBuilder(renderer, SampleSettings(past="expand"))
    chats = {
        name: CONVERSATIONS[name] for name in ("agentic", "reasoning_every_turn", "multi_turn", "calls_in_sequence")
    }
    several = 0
    for name, chat in chats.items():
        made = builder.build(chat.messages, chat.tools)
        several += len(made) > 1
        for row in made:
            for at in row.trained_messages:
                assert row.parts is not None
                own = row.mask & (row.messages == at)
                last = int(np.flatnonzero(own)[-1])
                stops = own & (row.parts == Part.STOP)
                if at == len(chat.messages) - 1:
                    assert not stops.any(), name
                    continue
                head = {"user": "<|user|>", "tool": "<|observation|>"}[chat.messages[at + 1]["role"]]
                assert np.flatnonzero(stops).tolist() == [last], (name, at)
                assert renderer.tokenizer.decode(row.ids[last : last + 1]) == head, (name, at)
                assert row.kinds[last] == Kind.SAMPLED
    assert several
    content = SampleBuilder(renderer, SampleSettings(past="expand", parts=["content"]))
    for row in content.samples(CONVERSATIONS["agentic"].messages, CONVERSATIONS["agentic"].tools):
        assert row.parts is not None
        assert not (row.mask & (row.parts == Part.STOP)).any()


LEFT_OPEN: dict[str, str] = {name: "<|user|>" for name in FAMILIES if name.startswith("glm-")}
"""Families that leave an answer without the token that the model ends it with."""


def test_turn_that_is_closed_gets_no_stop_token(any_family: str) -> None:
    renderer = make_renderer(any_family)
    chat = Conversation([HI, assistant("Hello.")])
    plain, stopped = sample_of(renderer, chat), sample_of(renderer, chat, final_stop=True)
    added = renderer.tokenizer.decode(stopped.ids[len(plain) :])
    assert np.array_equal(stopped.ids[: len(plain)], plain.ids)
    assert added == LEFT_OPEN.get(any_family, "")


def test_final_stop_is_for_turns_that_are_trained_and_last() -> None:
    renderer = make_renderer("glm-4.5")
    for chat, chosen in (
        (CONVERSATIONS["multi_turn_open"], {}),
        (CONVERSATIONS["user_assistant"], {"roles": ["user"]}),
        (CONVERSATIONS["user_assistant"], {"since": 2}),
    ):
        assert len(sample_of(renderer, chat, final_stop=True, **chosen)) == len(sample_of(renderer, chat, **chosen))


# -- a prompt and a response

SEED = [{"role": "system", "content": "You are a helpful assistant."}, {"role": "user", "content": "How are you?"}]
REPLY = "I'm good, thank you!"


def test_prompt_and_response_are_encoded_apart_as_transformers_would() -> None:
    tokenizer = hf_tokenizer("qwen2.5")
    prompt_str = tokenizer.apply_chat_template(SEED, tokenize=False, add_generation_prompt=True)
    response_str = REPLY + tokenizer.eos_token
    prompt_ids = tokenizer.encode(prompt_str, add_special_tokens=False)
    response_ids = tokenizer.encode(response_str, add_special_tokens=False)
    renderer = make_renderer("qwen2.5")
    for prompt in (SEED, prompt_str):
        sample = build_prompt_response_sample(renderer, prompt, REPLY)
        assert sample.token_ids == prompt_ids + response_ids
        assert sample.labels.tolist() == [-100] * len(prompt_ids) + response_ids
        assert sample.attention_mask.tolist() == [1] * len(sample)
        assert not sample.notes
        assert sample.parts is not None
        own = sample.parts[len(prompt_ids) :].tolist()
        assert own == [Part.CONTENT] * (len(response_ids) - 1) + [Part.STOP]
    assert set(sample.messages[len(prompt_ids) :].tolist()) == {1}


def test_eos_that_ends_no_turn_of_the_template_is_told() -> None:
    renderer = make_renderer("qwen2.5")
    sample = build_prompt_response_sample(renderer, SEED, REPLY, eos="<|endoftext|>")
    assert sample.token_ids[-1] == renderer.tokenizer.token_id("<|endoftext|>")
    assert sample.loss_mask[-1] == 1
    (note,) = sample.notes
    assert "'<|endoftext|>'" in note
    assert "'<|im_end|>'" in note


def test_response_after_tools_and_with_them() -> None:
    renderer = make_renderer("qwen3")
    asked = [ASK, assistant("", PARIS), SUNNY]
    sample = build_prompt_response_sample(renderer, asked, "Sunny.", tools=SIMPLE)
    prompt = renderer.render_ids(asked, tools=SIMPLE, add_generation_prompt=True)
    assert sample.token_ids[: len(prompt)] == prompt
    assert sample.trained == len(sample) - len(prompt)
    assert not sample.mask[: len(prompt)].any()


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"response": ["no"]}, "the response is a string, not a list"),
        ({"eos": "<|no such token|>"}, "no control token"),
        ({"eos": "word"}, "no control token"),
    ],
)
def test_prompt_and_response_that_are_none_are_refused(changed: dict[str, Any], problem: str) -> None:
    given_: dict[str, Any] = {"prompt": SEED, "response": REPLY} | changed
    with pytest.raises(SampleError, match=re.escape(problem)):
        build_prompt_response_sample(make_renderer("qwen2.5"), **given_)


def test_prompt_that_is_no_conversation_is_refused_as_by_render() -> None:
    with pytest.raises(InputError, match="empty"):
        build_prompt_response_sample(make_renderer("qwen2.5"), [], REPLY)


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

WORDS = st.text("abc \n<>|你🙂{}", max_size=12)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number in range(draw(st.integers(1, 4))):
        messages.append(user(draw(WORDS)))
        called = draw(st.booleans())
        turn = assistant(f"said{number} " + draw(WORDS), *([PARIS] if called else []))
        if draw(st.booleans()):
            turn["reasoning_content"] = f"thought{number} " + draw(WORDS)
        messages.append(turn)
        if called:
            messages.append(result(draw(WORDS)))
    return messages


@settings(max_examples=150, deadline=None)
@given(chats())
def test_trained_tokens_are_those_of_the_sampled_turns(messages: list[dict[str, Any]]) -> None:
    renderer = make_renderer("qwen3")
    chat = Conversation(messages, SIMPLE)
    tokens = renderer.render(messages, tools=SIMPLE)
    for past in ("template", "preserve"):
        sample = sample_of(renderer, chat, past=past)
        shown = tokens if past == "template" else renderer.preserving().render(messages, tools=SIMPLE)
        assert sample.trained == sum(turn.stop - turn.start for turn in shown.turns) == int(shown.mask.sum())
        for at, message in enumerate(messages):
            if message["role"] == "assistant":
                said = renderer.tokenizer.decode(sample.ids[sample.mask & (sample.messages == at)])
                assert message["content"].lstrip("\n").rstrip() in said
                assert past == "template" or message.get("reasoning_content", "").strip("\n") in said
    made = build_supervised_samples(renderer, messages, tools=SIMPLE, past="expand")
    turns = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    assert [int(at) for row in made for at in np.unique(row.messages[row.mask])] == turns
