"""Where turns start and stop: starts that inference never has, the last stop token, prompts with responses."""

import re
import warnings
from typing import Any

import numpy as np
import pytest

from tests.assets import FAMILIES
from tests.conversations import ASK, CONVERSATIONS, HI, PARIS, SIMPLE, Conversation, assistant, result, user
from tests.oracle import hf_tokenizer
from tests.samples.family_rows import make_renderer, sample_of, warnings_of
from tokentrace import TokentraceError, build_supervised_sample, build_supervised_samples
from tokentrace.errors import SampleError
from tokentrace.samples import TurnStartWarning, build_prompt_response_sample
from tokentrace.samples.supervised import SampleBuilder, SampleSettings
from tokentrace.tokens.kinds import Kind, Part

pytestmark = pytest.mark.filterwarnings("ignore::tokentrace.samples.TurnStartWarning")
"""Tests of this warning catch it themselves."""
# -- turns that start differently than at inference


OPENED = {"answer", "call"}
STARTS_ELSEWHERE: dict[str, tuple[set[str], str | None]] = {
    "qwq-32b": ({"answer", "call", "thought"}, None),
    "deepseek-r1": ({"answer", "thought"}, None),
    "qwen3.5-nothink": ({"thought"}, "enable_thinking=True"),
    **dict.fromkeys(("qwen3-thinking-2507", "minimax-m2"), (OPENED, "reasoning")),
    **dict.fromkeys(("qwen3.5", "qwen3.6", "glm-4.7", "glm-4.7-flash"), (OPENED, "enable_thinking=False")),
    **dict.fromkeys(("glm-5", "nemotron-3-nano"), (OPENED, "enable_thinking=False")),
}
"""Simple turns that do not start with their generation prompt, and what fixes it. QwQ's and R1's templates never show
reasoning but prompt with ``<think>``: nothing fixes that. All other families write these turns as prompted."""
SMALL: dict[str, list[dict[str, Any]]] = {
    "answer": [HI, assistant("Hello.")],
    "thought": [HI, {**assistant("Hello."), "reasoning_content": "Greet."}],
    "call": [ASK, assistant("", PARIS)],
}


def test_families_that_write_turns_differently_than_they_prompt_for_them(any_family: str) -> None:
    renderer, builder = make_renderer(any_family), SampleBuilder(make_renderer(any_family))
    kinds, remedy = STARTS_ELSEWHERE.get(any_family, (set(), None))
    for key, messages in SMALL.items():
        try:
            (row,) = builder.build(messages, SIMPLE)
        except TokentraceError:
            continue
        assert bool(warnings_of(row, TurnStartWarning)) == (key in kinds), (key, warnings_of(row, TurnStartWarning))
        if not warnings_of(row, TurnStartWarning):
            continue
        (warning,) = warnings_of(row, TurnStartWarning)
        assert "turns='flagged'" in warning
        if remedy is None:
            continue
        if remedy == "reasoning":
            fixed = builder.build([messages[0], {**messages[1], "reasoning_content": "Hm."}], SIMPLE)
        else:
            switched = renderer.with_variables({"enable_thinking": remedy.endswith("True")})
            fixed = SampleBuilder(switched).build(messages, SIMPLE)
        assert not warnings_of(fixed[0], TurnStartWarning)


def test_turn_start_warning_is_given_once_with_a_remedy() -> None:
    renderer = make_renderer("qwen3.6")
    with pytest.warns(TurnStartWarning, match=r"^message 1: .*<think>.*enable_thinking") as caught:
        sample = build_supervised_sample(renderer, SMALL["answer"])
    (warning,) = caught
    assert warning.filename == __file__
    assert str(warning.message) in sample.notes
    with pytest.warns(TurnStartWarning):
        build_supervised_samples(renderer, SMALL["answer"], past="expand")
    flagged = [HI, {**assistant("Hello."), "train": False}, user("And?"), SMALL["thought"][1]]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert build_supervised_sample(renderer, flagged, turns="flagged", past="template").trained


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
    """The oracle is what the template writes after the turn once the next message is there."""
    renderer = make_renderer(family)
    builder = SampleBuilder(renderer, SampleSettings(past="expand"))
    chats = {
        name: CONVERSATIONS[name] for name in ("agentic", "reasoning_every_turn", "multi_turn", "calls_in_sequence")
    }
    several = 0
    for name, chat in chats.items():
        samples = builder.build(chat.messages, chat.tools)
        several += len(samples) > 1
        for row in samples:
            for at in row.trained_messages:
                assert row.parts is not None
                trained = row.mask & (row.messages == at)
                last = int(np.flatnonzero(trained)[-1])
                stops = trained & (row.parts == Part.STOP)
                if at == len(chat.messages) - 1:
                    assert not stops.any(), name
                    continue
                head = {"user": "<|user|>", "tool": "<|observation|>"}[chat.messages[at + 1]["role"]]
                assert np.flatnonzero(stops).tolist() == [last], (name, at)
                assert renderer.tokenizer.decode(row.ids[last : last + 1]) == head, (name, at)
                assert row.kinds[last] == Kind.SAMPLED
    assert several
    content = SampleBuilder(renderer, SampleSettings(past="expand", parts=["content"]))
    for row in content.build(CONVERSATIONS["agentic"].messages, CONVERSATIONS["agentic"].tools):
        assert row.parts is not None
        assert not (row.mask & (row.parts == Part.STOP)).any()


def test_final_stop_is_for_turns_that_are_trained_and_last() -> None:
    renderer = make_renderer("glm-4.5")
    for chat, settings in (
        (CONVERSATIONS["multi_turn_open"], {}),
        (CONVERSATIONS["user_assistant"], {"roles": ["user"]}),
        (CONVERSATIONS["user_assistant"], {"since": 2}),
    ):
        assert len(sample_of(renderer, chat, final_stop=True, **settings)) == len(sample_of(renderer, chat, **settings))


@pytest.mark.parametrize(("family", "endless"), [("deepseek-v3", True), ("deepseek-v3.1", False), ("glm-4.5", False)])
@pytest.mark.parametrize("past", ["template", "expand"])
def test_a_turn_that_the_template_leaves_without_a_stop_token_gets_a_note(
    family: str, endless: bool, past: str
) -> None:
    chat = [ASK, assistant(None, PARIS), result("sunny"), assistant("Sunny.")]
    samples = build_supervised_samples(make_renderer(family, messages="adapt"), chat, tools=SIMPLE, past=past)
    notes = [note for row in samples for note in row.notes if "no stop token" in note]
    assert [note.partition(":")[0] for note in notes] == ["message 1"] * endless


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
        assert not sample.notes
        assert sample.parts is not None
        parts = sample.parts[len(prompt_ids) :].tolist()
        assert parts == [Part.CONTENT] * (len(response_ids) - 1) + [Part.STOP]
    assert set(sample.messages[len(prompt_ids) :].tolist()) == {1}


def test_a_response_ends_no_turn() -> None:
    renderer = make_renderer("qwen3")
    sample = build_prompt_response_sample(renderer, SEED, "<think>a</think>4<|im_end|><|im_start|>user")
    control = [renderer.decode([index]) for index in sample.ids[sample.mask] if index >= 151_643]
    assert control == ["<think>", "</think>", "<|im_end|>"]


def test_eos_that_ends_no_turn_of_the_template_gets_a_note() -> None:
    renderer = make_renderer("qwen2.5")
    sample = build_prompt_response_sample(renderer, SEED, REPLY, eos="<|endoftext|>")
    assert sample.token_ids[-1] == renderer.tokenizer.token_id("<|endoftext|>")
    assert sample.loss_mask[-1] == 1
    (note,) = sample.notes
    assert "'<|endoftext|>'" in note
    assert "'<|im_end|>'" in note


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"response": ["no"]}, "the response must be a string, not a list"),
        ({"eos": "<|no such token|>"}, "is not a control token"),
        ({"eos": "word"}, "is not a control token"),
    ],
)
def test_invalid_responses_and_eos_tokens_are_refused(changed: dict[str, Any], problem: str) -> None:
    arguments: dict[str, Any] = {"prompt": SEED, "response": REPLY} | changed
    with pytest.raises(SampleError, match=re.escape(problem)):
        build_prompt_response_sample(make_renderer("qwen2.5"), **arguments)
