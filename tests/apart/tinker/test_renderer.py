"""Our renderer registered with tinker-cookbook: the template's ids and mask in the cookbook's own types."""

import functools
import json
from typing import Any

import pytest
from tinker_cookbook.renderers import ParseTermination, ToolCall, TrainOnWhat, get_renderer, register_renderer

from tests.oracle import Refusal, hf_ids, hf_tokenizer
from tokentrace.errors import InputError
from tokentrace.integrations.tinker import renderer_factory
from tokentrace.samples.pasts import HistoryWarning

THEIRS = {
    "qwen3": "qwen3",
    "qwen3-instruct-2507": "qwen3_instruct",
    "qwen3.5": "qwen3_5",
    "nemotron-3-nano": "nemotron3",
    "deepseek-v3.1": "deepseekv3",
}
"""Families whose template has a renderer in the cookbook."""

CALL = ToolCall(id="call00001", function=ToolCall.FunctionBody(name="get_weather", arguments='{"city": "Paris"}'))
SPEC = {
    "name": "get_weather",
    "description": "The weather.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hello, who are you?"}
ANSWER = {"role": "assistant", "content": "I am fine."}
THINKING = {"type": "thinking", "thinking": "Let me see."}
THOUGHT = {"role": "assistant", "content": [THINKING, {"type": "text", "text": "I am fine."}]}
CALLING = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "sunny", "tool_call_id": "call00001", "name": "get_weather"}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [USER, ANSWER],
    "system": [SYSTEM, USER, ANSWER],
    "two": [USER, ANSWER, USER, ANSWER],
    "thought": [USER, THOUGHT],
    "two thoughts": [USER, THOUGHT, USER, THOUGHT],
    "call": [USER, CALLING, RESULT, ANSWER],
    "thought and call": [USER, {**CALLING, "content": [THINKING]}, RESULT, THOUGHT],
}
NOT_THE_TEMPLATE = {
    ("qwen3", "thought and call"): "the cookbook drops what was thought before the call, and the template keeps it",
    ("qwen3.5", "thought and call"): "the same",
    ("deepseek-v3.1", "call"): "the cookbook writes calls and results in another form than the template",
    ("deepseek-v3.1", "thought and call"): "the same",
}
"""Prompts that the cookbook's renderer writes differently from the template."""


register_renderer("tokentrace", renderer_factory(lost="ignore"))
register_renderer("tokentrace, patched", renderer_factory(lost="ignore", use_patched=True))


@functools.cache
def renderer(family: str, name: str = "tokentrace") -> Any:
    return get_renderer(name, hf_tokenizer(family), model_name=family)


def template_ids(family: str, messages: list[dict[str, Any]], **options: Any) -> list[list[int]]:
    """The ids from transformers, with arguments as JSON and as a mapping: templates accept one or the other."""
    converted = [renderer(family).to_openai_message(message) for message in messages]
    renderings = [hf_ids(family, converted, **options)]
    for message in converted:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    renderings.append(hf_ids(family, converted, **options))
    return [ids for ids in renderings if not isinstance(ids, Refusal)]


@pytest.mark.parametrize("case", CONVERSATIONS)
@pytest.mark.parametrize("family", THEIRS)
def test_prompts_are_the_templates(family: str, case: str) -> None:
    messages = CONVERSATIONS[case][:-1]
    ours = renderer(family).build_generation_prompt(messages).to_ints()
    assert ours in template_ids(family, messages, add_generation_prompt=True)
    theirs = renderer(family, THEIRS[family]).build_generation_prompt(messages).to_ints()
    assert (ours == theirs) is ((family, case) not in NOT_THE_TEMPLATE)


@pytest.mark.parametrize("case", ["plain", "two", "thought", "two thoughts"])
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3.1"])
def test_examples_train_what_the_cookbooks_own_renderer_trains(family: str, case: str) -> None:
    messages = CONVERSATIONS[case]
    trained = []
    for name in ("tokentrace", THEIRS[family]):
        model_input, weights = renderer(family, name).build_supervised_example(messages)
        assert len(weights) == model_input.length
        trained.append([id for id, weight in zip(model_input.to_ints(), weights.tolist(), strict=True) if weight])
    assert trained[0] == trained[1]
    assert renderer(family).build_supervised_example(messages)[0].to_ints() in template_ids(family, messages)


def trained_text(family: str, messages: list[dict[str, Any]], what: TrainOnWhat) -> str:
    model_input, weights = renderer(family).build_supervised_example(messages, what)
    ids = [id for id, weight in zip(model_input.to_ints(), weights.tolist(), strict=True) if weight]
    return str(hf_tokenizer(family).decode(ids))


def test_every_train_on_what_is_honoured() -> None:
    family = "qwen3-instruct-2507"
    messages = [SYSTEM, USER, CALLING, RESULT, ANSWER, USER, CALLING, RESULT, ANSWER]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    answer, question = "I am fine.<|im_end|>", "Hello, who are you?"
    trained = {what: trained_text(family, messages, what) for what in TrainOnWhat if what != TrainOnWhat.CUSTOMIZED}
    assert trained == {
        TrainOnWhat.LAST_ASSISTANT_MESSAGE: answer,
        TrainOnWhat.LAST_ASSISTANT_TURN: call + answer,
        TrainOnWhat.ALL_ASSISTANT_MESSAGES: (call + answer) * 2,
        TrainOnWhat.ALL_MESSAGES: "Be brief." + (question + call + "sunny" + answer) * 2,
        TrainOnWhat.ALL_USER_AND_SYSTEM_MESSAGES: "Be brief." + question * 2,
        TrainOnWhat.ALL_TOKENS: hf_tokenizer(family).decode(
            renderer(family).build_supervised_example(messages)[0].to_ints()
        ),
    }
    flagged = [{**message, "trainable": at in (1, 4)} for at, message in enumerate(messages)]
    assert trained_text(family, flagged, TrainOnWhat.CUSTOMIZED) == question + answer
    assert not trained_text(family, messages[:-1], TrainOnWhat.LAST_ASSISTANT_MESSAGE)
    for wrong, what in ((messages, TrainOnWhat.CUSTOMIZED), (flagged, TrainOnWhat.ALL_MESSAGES)):
        with pytest.raises(InputError, match="trainable"):
            renderer(family).build_supervised_example(wrong, what)


def test_a_template_that_drops_reasoning_has_no_extension_property_and_warns() -> None:
    assert not renderer("qwen3").has_extension_property
    assert renderer("qwen3-instruct-2507").has_extension_property
    assert renderer("deepseek-v3.1").has_extension_property
    messages = CONVERSATIONS["two thoughts"]
    with pytest.warns(HistoryWarning):
        renderer("qwen3").build_supervised_example(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    examples = renderer("qwen3").build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)
    assert len(examples) == 2
    patched = renderer("qwen3", "tokentrace, patched")
    assert patched.has_extension_property
    assert len(patched.build_supervised_examples(messages, TrainOnWhat.ALL_ASSISTANT_MESSAGES)) == 1


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_tools_are_written_where_the_template_writes_them(system: str) -> None:
    ours, theirs = renderer("qwen3"), renderer("qwen3", "qwen3")
    prompts = [
        one.build_generation_prompt([*one.create_conversation_prefix_with_tools([SPEC], system), USER]).to_ints()
        for one in (ours, theirs)
    ]
    system_messages = [{"role": "system", "content": system}] if system else []
    tools = [{"type": "function", "function": SPEC}]
    assert prompts[0] == prompts[1] == hf_ids("qwen3", [*system_messages, USER], tools, add_generation_prompt=True)


def test_responses_are_parsed_into_the_cookbooks_types() -> None:
    ours, tokenizer = renderer("qwen3"), hf_tokenizer("qwen3")
    text = (
        "<think>\nhm\n</think>\n\nok\n"
        '<tool_call>\n{"name": "f", "arguments": {"a":  1}}\n</tool_call>\n<tool_call>\n{"name": }\n</tool_call>'
    )
    ids = tokenizer.encode(text, add_special_tokens=False)
    message, ended = ours.parse_response([*ids, *ours.get_stop_sequences()])
    assert ended is ParseTermination.STOP_SEQUENCE
    assert message["content"] == [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "ok"}]
    assert [(call.function.name, call.function.arguments) for call in message["tool_calls"]] == [("f", '{"a":  1}')]
    assert [call.raw_text for call in message["unparsed_tool_calls"]] == ['<tool_call>\n{"name": }\n</tool_call>']
    assert ours.parse_response(ids)[1] is ParseTermination.MALFORMED
    assert ours.parse_response([*ours.get_stop_sequences(), *ids])[1] is ParseTermination.MALFORMED
