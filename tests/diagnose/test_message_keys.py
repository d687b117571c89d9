"""Which messages match: properties of the matcher, and each row of the table in docs/gateway.md."""

import json
import re
from collections.abc import Mapping
from typing import Any

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import nodes

from tests.support import templates_of_trl
from tokentrace.diagnose.message_keys import NOISE, chain, identical, meaning, root_key, same_fields, strict_meaning
from tokentrace.errors import InputError

Message = Mapping[str, Any]

ROOT = root_key(None, {}, "")


def key(*messages: Message, means: Any = meaning) -> bytes:
    return chain(ROOT, messages, means)[-1]


def assistant(content: Any = "Let me look.", arguments: Any = None, **more: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if arguments is not None:
        function = {"name": "get_weather", "arguments": arguments}
        message["tool_calls"] = [{"id": "call_1", "type": "function", "function": function}]
    return message | more


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


ARGUMENTS = '{"city":  "Zürich" , "days":3}'
CALL = assistant(arguments=ARGUMENTS)

THE_SAME: dict[str, tuple[Message, Message]] = {
    "reasoning left out": (assistant(reasoning_content="I should call."), assistant()),
    "reasoning emptied": (assistant(reasoning_content="I should call."), assistant(reasoning_content="")),
    "reasoning under another name": (assistant(reasoning_content="so"), assistant(reasoning="so")),
    "reasoning as a part": (assistant(), assistant([{"type": "thinking", "thinking": "so"}, text("Let me look.")])),
    "arguments spaced": (CALL, assistant(arguments='{"city": "Zürich", "days": 3}')),
    "arguments escaped": (CALL, assistant(arguments='{"city": "Z\\u00fcrich", "days": 3}')),
    "keys in another order": (CALL, assistant(arguments='{"days": 3, "city": "Zürich"}')),
    "arguments as a mapping": (CALL, assistant(arguments={"city": "Zürich", "days": 3})),
    "a line break in a string": (assistant(arguments='{"a": "x\ny"}'), assistant(arguments='{"a": "x\\ny"}')),
    "3 as 3.0": (CALL, assistant(arguments={"city": "Zürich", "days": 3.0})),
    "a key twice, of which the last counts": (assistant(arguments='{"a": 1, "a": 2}'), assistant(arguments='{"a": 2}')),
    "no arguments: empty text": (assistant(arguments={}), assistant(arguments="")),
    "no arguments: absent": (assistant(arguments={}), assistant(tool_calls=[{"function": {"name": "get_weather"}}])),
    "content as a part": (assistant("x"), assistant([text("x")])),
    "content as several parts": (assistant("xy"), assistant([text("x"), text("y")])),
    "a part that repeats the message": (assistant("x", ARGUMENTS, reasoning_content="so"),
        assistant([text("x", role="assistant", reasoning_content="so", tool_calls=CALL["tool_calls"])], ARGUMENTS)),
    "a part without a type": (assistant("x"), assistant([{"text": "x"}])),
    "a newline before content": (assistant("x"), assistant("\nx")),
    "white space around content": (assistant("  Let me look.\n"), assistant("Let me look.")),
    "content null": (assistant("", ARGUMENTS), assistant(None, ARGUMENTS)),
    "content absent": (assistant(""), {"role": "assistant"}),
    "no calls": (assistant(), assistant(tool_calls=None)),
    "ids and status dropped": (assistant(id="msg_1", status="completed"), assistant()),
    "the ids of calls": (CALL, assistant(tool_calls=[{"function": CALL["tool_calls"][0]["function"]}])),
    "a call without its wrapping": (CALL, assistant(tool_calls=[{"name": "get_weather", "arguments": ARGUMENTS}])),
    "a provider's fields": (assistant(), assistant(provider_specific_fields={"a": 1}, refusal=None, annotations=[])),
    "the name of an agent": (assistant(), assistant(name="planner")),
    "cache_control on a part": (user("x"), user([text("x", cache_control={"type": "ephemeral"})])),
    "cache_control on a message": (user("x"), user("x", cache_control={"type": "ephemeral"})),
    "a user's text as a part": (user("x "), user([text("x ")])),
    "an image whose cache_control moved": (user([text("x"), {"type": "image", "id": "a"}]),
        user([text("x"), {"id": "a", "type": "image", "cache_control": {"type": "ephemeral"}}])),
    "a result as a part": (result("sunny  \n"), result([text("sunny  \n")])),
    "a result without its id": (result("x", tool_call_id="call_1"), result("x")),
    "no content": (user(""), user(None)),
}  # fmt: skip

NOT_THE_SAME: dict[str, tuple[Message, Message]] = {
    "other words": (assistant("Let me look."), assistant("Let me see.")),
    "white space inside": (assistant("a  b"), assistant("a b")),
    "a composed letter": (assistant("Z\u00fcrich"), assistant("Zu\u0308rich")),
    "another role": (user("x"), assistant("x")),
    "developer for system": ({"role": "developer", "content": "x"}, {"role": "system", "content": "x"}),
    "another tool": (assistant(arguments="{}"), assistant(tool_calls=[{"function": {"name": "f", "arguments": "{}"}}])),
    "another argument": (CALL, assistant(arguments={"city": "Zürich", "days": 4})),
    "an argument more": (CALL, assistant(arguments={"city": "Zürich", "days": 3, "unit": "C"})),
    "a number as text": (CALL, assistant(arguments={"city": "Zürich", "days": "3"})),
    "true for 1": (assistant(arguments='{"a": true}'), assistant(arguments='{"a": 1}')),
    "null for empty": (assistant(arguments='{"a": null}'), assistant(arguments='{"a": ""}')),
    "null for absent": (assistant(arguments='{"a": null}'), assistant(arguments="{}")),
    "a large integer rounded": (
        assistant(arguments='{"a": 12345678901234567891}'), assistant(arguments='{"a": 12345678901234567000}')),
    "no JSON, spaced": (assistant(arguments="{city: x}"), assistant(arguments="{city:  x}")),
    "no calls": (CALL, assistant()),
    "calls in another order": (assistant(tool_calls=[{"function": {"name": name}} for name in "ab"]),
        assistant(tool_calls=[{"function": {"name": name}} for name in "ba"])),
    "another refusal": (assistant(None, refusal="No."), assistant(None, refusal="Never.")),
    "a call of the old style": (assistant(None, function_call={"name": "f"}), assistant(None)),
    "a picture of the assistant's": (assistant([text("x"), {"type": "image", "id": "a"}]), assistant("x")),
    "a part that has calls where the message has none": (
        assistant("x", ARGUMENTS), assistant([text("x", role="assistant", tool_calls=CALL["tool_calls"])])),
    "a user's part without a type": (user("x"), user([{"text": "x"}])),
    "white space around a user's words": (user("x"), user("x ")),
    "a user's parts joined": (user([text("x"), text("y")]), user("xy")),
    "another picture": (user([{"type": "image", "id": "a"}]), user([{"type": "image", "id": "b"}])),
    "a result's keys in another order": (result({"a": 1, "b": 2}), result({"b": 2, "a": 1})),
    "a result as JSON text": (result({"a": 1}), result('{"a": 1}')),
    "true for 1 in a result": (result({"a": 1}), result({"a": True})),
    "a result's number with a point": (result({"a": 1}), result({"a": 1.0})),
}  # fmt: skip


IN_DOUBT: dict[str, tuple[Message, Message]] = {
    "a user's part that repeats the message": (user("x"), user([text("x", role="user")])),
    "another name": (user("x", name="ann"), user("x", name="bob")),
    "a name for none": (user("x", name="ann"), user("x")),
    "a field that a template may read": (user("x", mood="glad"), user("x")),
    "a result that is an error": (result("x"), result("x", is_error=True)),
    "a result of another tool": (result("x", name="f"), result("x", name="g")),
    "a text part with more to say": (user([text("x", mood="glad")]), user("x")),
}  # fmt: skip
"""Equal only if the difference changes no token: a session asks its renderer."""


@pytest.mark.parametrize("case", [*THE_SAME, *IN_DOUBT])
def test_messages_equal_in_meaning_have_one_key(case: str) -> None:
    one, other = (THE_SAME | IN_DOUBT)[case]
    assert key(one) == key(other)
    assert key(user("a"), one, user("b")) == key(user("a"), other, user("b"))
    if case in IN_DOUBT:
        assert not same_fields(one, other)
        assert same_fields(one, dict(one))
        assert key(one, means=strict_meaning) != key(other, means=strict_meaning)


@pytest.mark.parametrize("case", NOT_THE_SAME)
def test_messages_of_another_meaning_have_another_key(case: str) -> None:
    one, other = NOT_THE_SAME[case]
    for means in (meaning, strict_meaning):
        assert key(one, means=means) != key(other, means=means)
        assert key(one, user("b"), means=means) != key(other, user("b"), means=means)


def test_strict_ignores_only_empty_fields_and_the_form_of_arguments() -> None:
    strict = strict_meaning
    same = {case for case, (one, other) in THE_SAME.items() if key(one, means=strict) == key(other, means=strict)}
    assert same == {
        *("arguments spaced", "arguments escaped", "arguments as a mapping", "a line break in a string"),
        *("a key twice, of which the last counts", "no arguments: empty text"),
        *("content null", "content absent", "no calls", "no content"),
    }


# -- the chain


def test_a_result_counts_by_the_call_that_it_answers() -> None:
    calls = assistant(tool_calls=[{"id": at, "function": {"name": "f"}} for at in ("one", "two")])
    orders: list[tuple[str | None, ...]] = [("one", "two"), ("two", "one"), ("one", "one"), (None, None)]
    keys = [key(user("a"), calls, *(result("x", tool_call_id=at) for at in ids)) for ids in orders]
    assert len(set(keys[:3])) == 3
    assert keys[3] == keys[0]


def test_each_key_stands_for_all_messages_before_it() -> None:
    messages = [user("a"), assistant("b"), user("c")]
    keys = chain(ROOT, messages)
    assert keys[0] == ROOT
    assert len(set(keys)) == 4
    assert [chain(ROOT, messages[:count])[-1] for count in range(4)] == keys
    assert key(user("x"), *messages[1:]) != keys[-1]
    assert key(*messages[1:]) != keys[-1]


def test_tools_variables_and_template_are_in_the_root() -> None:
    tool, swapped = ({"function": {"name": "f", "parameters": order}} for order in ({"a": 1, "b": 2}, {"b": 2, "a": 1}))
    tools = (None, [tool], [swapped], [tool, tool])
    more = ({"enable_thinking": True}, ""), ({"enable_thinking": 1}, ""), ({}, "x")
    assert len({*(root_key(one, {}, "") for one in tools), *(root_key(None, *pair) for pair in more)}) == 7
    assert root_key([], {}, "") == root_key(None, {}, "")
    assert root_key(None, {"a": 1, "b": 2}, "") == root_key(None, {"b": 2, "a": 1}, "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def same_value(one: Any, other: Any) -> bool:
    """Equality of JSON values, independent of the matcher's code: true is not 1, and 3.0 is 3."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_value(one[name], other[name]) for name in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_value, one, other))
    if isinstance(one, float) or isinstance(other, float):
        numbers = isinstance(one, (int, float)) and isinstance(other, (int, float))
        return numbers and one == other and (type(one) is type(other) or abs(one) < 2**53)
    return bool(one == other)


@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.dictionaries(st.text(max_size=4), JSON, max_size=4))
def test_arguments_count_by_value(one: dict[str, Any], other: dict[str, Any]) -> None:
    as_text = key(assistant(arguments=json.dumps(one, indent=1)))
    swapped = json.dumps(dict(reversed(one.items())), ensure_ascii=False)
    assert as_text == key(assistant(arguments=one)) == key(assistant(arguments=swapped))
    assert (key(assistant(arguments=one)) == key(assistant(arguments=other))) is same_value(one, other)


@given(JSON, JSON)
def test_identical_values_are_same_fields(one: Any, other: Any) -> None:
    assert identical(one, other) is (json.dumps(one) == json.dumps(other)) or 0.0 in (one, other)
    assert identical(one, json.loads(json.dumps(one)))


def test_messages_nested_too_deeply_are_named() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = {"a": deep}
    with pytest.raises(InputError, match=r"message 1: is nested too deeply"):
        key(user("a"), assistant(arguments=deep))
    with pytest.raises(InputError, match=r"message 0: is nested too deeply"):
        key(result(deep))
    with pytest.raises(InputError, match=r"tools: is nested too deeply"):
        root_key([deep], {}, "")


# -- templates and ignored fields


def test_no_template_prints_an_ignored_field() -> None:
    """Fields that the matcher ignores in messages of users and tools must reach no token."""
    names = {"message", "msg", "m"}
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"])
    for name, source in templates_of_trl().items():
        parsed = environment.parse(re.sub(r"\{%-?\s*(end)?generation\s*-?%\}", "", source))
        for node in parsed.find_all((nodes.Getattr, nodes.Getitem)):
            read = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
            if isinstance(node.node, nodes.Name) and node.node.name in names:
                assert read not in NOISE, f"{name} reads {read}"
