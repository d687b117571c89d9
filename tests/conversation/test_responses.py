"""Input items of OpenAI's Responses API are converted to messages."""

import functools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from tokentrace import InputError
from tokentrace.conversation.messages import check_messages
from tokentrace.conversation.responses import from_responses, read_items, sealed, unsealed

USER = {"role": "user", "content": "weather?"}
ARGUMENTS = '{"city":  "Zürich" , "days":3}'
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}}
LOOK = "  Let me look.\n"
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny  \n"}


def reply(content: Any, *calls: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **({"tool_calls": list(calls)} if calls else {}), **more}


def thought(text: str | None = None, **more: Any) -> dict[str, Any]:
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"type": "reasoning", "id": "rs_a_0", "summary": [], "content": content, **more}


def message(text: str, **more: Any) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": "msg_a_1", "role": "assistant", "status": "completed", "content": content, **more}


def call(id: str = "c1", name: str | None = "weather", **more: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": name, "arguments": ARGUMENTS, **more}


def result(id: str = "c1", output: Any = "sunny  \n") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": output}


CALL = call(status="completed") | {"id": "fc_a_2"}
ECHOES: dict[str, list[dict[str, Any]]] = {
    "openai-agents": [USER, thought("I should."), message(LOOK), CALL, result()],
    "pydantic-ai: a message is a role and a string, calls have no id": [
        *(USER, thought("I should.", encrypted_content=None), reply(LOOK), call(), result())
    ],
    "langchain: no status": [
        {"type": "message", **USER},
        thought("I should."),
        {key: value for key, value in message(LOOK).items() if key != "status"},
        *(call() | {"id": "fc_a_2"}, result()),
    ],
    "inspect-ai: texts are parts, of the reasoning only what is opaque": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "weather?"}]},
        *(thought(encrypted_content=sealed("I should.")), message(LOOK), CALL),
        result(output=[{"type": "input_text", "text": "sunny  \n"}]),
    ],
}
"""One turn as different agents sent it back."""


@pytest.mark.parametrize("name", ECHOES)
def test_all_ways_in_which_agents_repeat_a_turn_give_the_same_messages(name: str) -> None:
    from openai.types.responses import ResponseInputParam

    if "no status" not in name:  # which the type requires
        TypeAdapter(ResponseInputParam).validate_python(ECHOES[name])
    messages = from_responses(ECHOES[name])
    assert messages == [USER, reply(LOOK, TOOL_CALL, reasoning_content="I should."), RESULT]
    assert check_messages(messages) == messages


IMAGE = {"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": "data:,"}]}


def parts(*texts: str, kind: str = "text") -> list[dict[str, str]]:
    return [{"type": kind, "text": text} for text in texts]


INPUTS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "a string": ("weather?", [USER]),
    "parts stay parts": (
        [{"role": "user", "content": parts("a", "b", kind="input_text")}],
        [{"role": "user", "content": parts("a", "b")}],
    ),
    "images stay as they are": ([IMAGE], [IMAGE]),
    "a turn of several messages and thoughts": (
        [USER, thought("a"), message("b "), thought("c"), message("d")],
        [USER, reply("b d", reasoning_content="ac")],
    ),
    "a summary where there is nothing else": (
        [USER, thought(summary=[{"type": "summary_text", "text": "In short."}]), message("x")],
        [USER, reply("x", reasoning_content="In short.")],
    ),
    "a call of the same response comes after the first one's result": (
        [
            *(USER, call() | {"id": "fc_a_0"}, result(), call("c2") | {"id": "fc_a_1"}, result("c2")),
            message("Sunny.", id="msg_b_0"),
        ],
        [
            *(USER, reply("", TOOL_CALL, {**TOOL_CALL, "id": "c2"}), RESULT),
            *({**RESULT, "tool_call_id": "c2"}, reply("Sunny.")),
        ],
    ),
    "two responses with nothing in between": (
        [USER, message("a", id="msg_a_0"), message("b", id="msg_b_0"), {**message("c"), "id": "msg_b_1"}],
        [USER, reply("a"), reply("bc")],
    ),
    "two responses that cannot be told apart": (
        [USER, message("a", id="msg_68af40"), message("b", id="msg_68af41")],
        [USER, reply(parts("a", "b"))],
    ),
    "messages of one turn without ids": (
        [USER, message("I should.", id=None), message(" Let me look.", id=None), call(), message("c"), message("d")],
        [USER, reply(parts("I should.", " Let me look.", "cd"), TOOL_CALL)],
    ),
}


@pytest.mark.parametrize("name", INPUTS)
def test_input(name: str) -> None:
    items, expected = INPUTS[name]
    assert from_responses(items) == expected
    assert check_messages(expected) == expected


def test_a_result_answers_a_call() -> None:
    with pytest.raises(InputError, match="c9") as refused:
        from_responses([USER, call(), result("c9")])
    assert (refused.value.message, refused.value.field) == (2, "call_id")
    assert from_responses([result("c9")], open_calls=True) == [{**RESULT, "tool_call_id": "c9"}]
    assert from_responses([{"type": "function_call_output", "output": "x"}]) == [{"role": "tool", "content": "x"}]


def test_references_are_part_of_the_turn_and_are_named() -> None:
    def refer(id: str) -> dict[str, Any]:
        return {"type": "item_reference", "id": id}

    items = [USER, refer("rs_a_0"), call("c1"), result("c1"), refer("fc_a_2"), result("c7"), {"id": "msg_b_0"}, USER]
    read = read_items(items, [{"role": "system", "content": "Be brief."}])
    roles = ["system", "user", "assistant", "tool", "tool", "assistant", "user"]
    assert [message["role"] for message in read.messages] == roles
    assert read.references == {2: ["rs_a_0", "fc_a_2"], 5: ["msg_b_0"]}
    assert [each["id"] for each in read.messages[2]["tool_calls"]] == ["c1"]
    with pytest.raises(InputError, match="'msg_1'"):
        read_items([USER, refer("msg_1")])


def nested(depth: int) -> Any:
    return functools.reduce(lambda inner, _: [inner], range(depth), [])


HOSTED = ("web_search_call", "mcp_call", "custom_tool_call", "compaction")
REFUSED: dict[str, tuple[Any, str, str | None]] = {
    **{kind: ([USER, {"type": kind}], kind, "type") for kind in HOSTED},
    "reference": ([USER, {"type": "item_reference", "id": "msg_1"}], "previous_response_id", None),
    "item": ([USER, {"type": "item_reference", "id": "msg_7Hx1_0"}], "send the item", "item_reference"),
    "unknown role": ([USER, {"role": "tool", "content": "x"}], "'tool'", "role"),
    "unknown part": ([USER, {"role": "user", "content": [{"type": "poem"}]}], "'poem'", "content.0.type"),
    "an assistant's image": (
        [USER, {"role": "assistant", "content": [{"type": "input_image"}]}],
        "input_image",
        "content.0",
    ),
    "call without name": ([USER, call(name=None)], "missing", "name"),
    "damaged": ([USER, thought(encrypted_content=sealed("abc")[:-1])], "received", "encrypted_content"),
    "content nested without end": (
        [USER, {"role": "user", "content": [{"type": "input_image", "x": nested(2000)}]}],
        "deep",
        "content.0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals_name_the_item_and_the_field(name: str) -> None:
    items, words, field = REFUSED[name]
    with pytest.raises(InputError, match=words) as refused:
        from_responses(items)
    assert refused.value.message == 1
    assert (refused.value.field or "").startswith(field or "")
    assert field is None or refused.value.field


@given(text=st.text(st.characters()))
def test_sealed_text_is_unsealed(text: str) -> None:
    assert sealed(text).isascii()
    assert unsealed(sealed(text)) == text
