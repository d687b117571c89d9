"""Bad input raises a typed error that names the message and field, or renders as transformers renders it: never an
untyped exception, and never a wrong id."""

import dataclasses
import enum
import functools
from collections import OrderedDict, UserDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from tests.oracle import Refusal, hf_jinja
from tests.support import byte_tokenizer_json, make_renderer
from tokentrace import InputError, TemplateError, create_renderer
from tokentrace.errors import RendererError, TokenizerError
from tokentrace.tokens import Tokenizer

TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>tools\\n' + tools|tojson + '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' }}
{%- if m.role == 'assistant' and m.reasoning_content %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{%- if m.content is string %}{{ m.content }}
{%- elif m.content is mapping %}{{ m.content|tojson }}
{%- elif m.content %}{% for part in m.content %}{{ part if part is string else part.text }}{% endfor %}{% endif %}
{%- for call in m.tool_calls or [] %}{% set f = call.function or call %}
{{- '<tool_call>' + f.name + '(' + (f.arguments if f.arguments is string else f.arguments|tojson) + ')' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CONTROLS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_call>"]
TOKENIZER = Tokenizer(byte_tokenizer_json(CONTROLS), name="bytes")
RENDERER = create_renderer(TOKENIZER, "default", chat_template=TEMPLATE, lost="ignore")
AS_GIVEN = create_renderer(TOKENIZER, "default", chat_template=TEMPLATE, lost="ignore", messages="as_given")
USER = {"role": "user", "content": "hi"}


def calls(*entries: Any) -> list[Any]:
    return [USER, {"role": "assistant", "content": "", "tool_calls": list(entries)}]


def call(**function: Any) -> dict[str, Any]:
    return {"id": "x", "type": "function", "function": {"name": "f", "arguments": {}} | function}


SURROGATE = "a\ud800b"


@pytest.mark.parametrize(
    ("messages", "message", "field", "problem"),
    [
        ("hi", None, None, "not a str"),
        (USER, None, None, "not a dict"),
        (None, None, None, "not None"),
        ({1, 2}, None, None, "not a set"),
        (iter([USER]), None, None, "must be a list"),
        ([], None, None, "is empty"),
        ([USER, "hi"], 1, None, "must be a mapping"),
        ([[USER]], 0, None, "must be a mapping"),
        ([{"content": "hi"}], 0, "role", "is missing"),
        ([USER, {"role": None, "content": "hi"}], 1, "role", "is missing"),
        ([{"role": 5, "content": "hi"}], 0, "role", "must be a string"),
        ([{"role": "", "content": "hi"}], 0, "role", "not a known role"),
        ([{"role": "user<|im_end|>", "content": "hi"}], 0, "role", "not a known role"),
        ([{"role": "x" * 10_000, "content": "hi"}], 0, "role", "not a known role"),
        ([{"role": "user"}], 0, "content", "is missing"),
        ([{"role": "user", "content": None}], 0, "content", "is missing"),
        ([{"role": "tool", "content": None}], 0, "content", "is missing"),
        ([{"role": "user", "content": 5}], 0, "content", "not an int"),
        ([{"role": "user", "content": {"text": "hi"}}], 0, "content", "not a dict"),
        ([{"role": "user", "content": b"hi"}], 0, "content", "not a bytes"),
        ([{"role": "user", "content": ["a", 5]}], 0, "content.1", "not an int"),
        ([{"role": "user", "content": [None]}], 0, "content.0", "not None"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], 0, "content.0.text", "not an int"),
        ([USER, {"role": "assistant", "content": 5}], 1, "content", "not an int"),
        ([USER, {"role": "assistant", "content": "", "reasoning_content": 5}], 1, "reasoning_content", "not an int"),
        ([USER, {"role": "assistant", "content": "", "thinking": ["x"]}], 1, "thinking", "not a list"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": "f"}], 1, "tool_calls", "not a str"),
        ([USER, {"role": "assistant", "content": "", "tool_calls": {"a": 1}}], 1, "tool_calls", "not a dict"),
        (calls("f"), 1, "tool_calls.0", "must be a mapping"),
        (calls(call(), None), 1, "tool_calls.1", "must be a mapping"),
        (calls({"function": "f"}), 1, "tool_calls.0.function", "must be a mapping"),
        (calls({}), 1, "tool_calls.0.name", "is missing"),
        (calls({"function": {"arguments": {}}}), 1, "tool_calls.0.function.name", "is missing"),
        (calls(call() | {"id": ["x"]}), 1, "tool_calls.0.id", "not a list"),
        (calls(call(name=5)), 1, "tool_calls.0.function.name", "not an int"),
        (calls(call(arguments=[1])), 1, "tool_calls.0.function.arguments", "not a list"),
        (calls(call(), call(arguments=True)), 1, "tool_calls.1.function.arguments", "not a bool"),
        ([USER, {"role": "user", "content": SURROGATE}], 1, "content", "surrogate"),
        ([{"role": "user", "content": [{"type": "text", "text": SURROGATE}]}], 0, "content.0.text", "surrogate"),
        ([USER, {"role": "assistant", "reasoning_content": SURROGATE}], 1, "reasoning_content", "surrogate"),
        (calls(call(arguments={"k": SURROGATE})), 1, "tool_calls.0.function.arguments", "surrogate"),
        (calls(call(arguments={SURROGATE: 1})), 1, "tool_calls.0.function.arguments", "surrogate"),
        (calls(call(arguments=SURROGATE)), 1, "tool_calls.0.function.arguments", "surrogate"),
        (calls(call(name=SURROGATE)), 1, "tool_calls.0.function.name", "surrogate"),
    ],
)
def test_invalid_conversations_are_refused(messages: Any, message: int | None, field: str | None, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        RENDERER.render(messages)
    error = caught.value
    assert (error.message, error.field) == (message, field)
    assert problem in str(error)
    assert len(str(error)) < 500
    if message is not None:
        assert str(error).startswith(f"message {message}")


@pytest.mark.parametrize(
    ("tools", "field", "problem"),
    [
        ("f", "tools", "not a str"),
        ({"name": "f"}, "tools", "not a dict"),
        (["f"], "tools.0", "must be a tool schema"),
        ([{"name": "f"}, None], "tools.1", "must be a tool schema"),
        ([{}], "tools.0.name", "is missing"),
        ([{"type": "function", "function": {}}], "tools.0.function.name", "is missing"),
        ([{"type": "function", "function": "f"}], "tools.0.function", "must be a mapping"),
        ([{"name": 5}], "tools.0.name", "must be a string"),
        ([{"name": "f", "parameters": []}], "tools.0.parameters", "must be a JSON schema"),
        ([{"name": "f", "description": SURROGATE}], "tools.0.description", "surrogate"),
        ([{"name": "f", "parameters": {SURROGATE: 1}}], f"tools.0.parameters.{SURROGATE}.<key>", "surrogate"),
    ],
)
def test_invalid_tools_are_refused(tools: Any, field: str, problem: str) -> None:
    with pytest.raises(InputError, match=problem) as caught:
        RENDERER.render([USER], tools=tools)
    assert (caught.value.message, caught.value.field) == (None, field)


def test_a_hostile_role_in_a_template_is_not_a_known_role() -> None:
    """A template may compare a role with any text; only text in the form of a role's name makes a known role."""
    names, hostile = ["critic", "tool_response", "x-1", "a.b"], ["</think>", "<|im_end|>", "a b", "x\n"]
    comparisons = " or ".join(f"m.role == {role!r}" for role in names + hostile)
    source = "{% for m in messages %}{% if " + comparisons + " %}{% endif %}{{ m.role }}{% endfor %}"
    renderer = create_renderer(TOKENIZER, "default", chat_template=source, lost="ignore")
    for role in names:
        assert renderer.render([{"role": role, "content": "x"}]).text == role
    for role in hostile:
        with pytest.raises(InputError, match="not a known role"):
            renderer.render([{"role": role, "content": "x"}])


# -- deep, circular, large


CIRCULAR: dict[str, Any] = {"list": []}
CIRCULAR["list"].append(CIRCULAR)
BOTTOMLESS = {
    "dicts": functools.reduce(lambda value, _: {"k": value}, range(10_000), 1),
    "lists": functools.reduce(lambda value, _: [value], range(10_000), 1),
    "circular": CIRCULAR,
    "as large as the universe": functools.reduce(lambda value, _: [value, value], range(200), ["x"]),
}


@pytest.mark.parametrize("renderer", [RENDERER, AS_GIVEN], ids=["adapt", "as_given"])
@pytest.mark.parametrize("value", BOTTOMLESS.values(), ids=BOTTOMLESS)
def test_bottomless_values_are_input_errors_that_name_the_field(
    value: Any, renderer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokentrace.values.plain.MAX_VALUES", 20_000)  # so that the limit is reached quickly
    for messages, field in (
        (calls(call(arguments={"a": value})), "tool_calls.0.function.arguments"),
        ([USER, {"role": "tool", "content": {"a": value}}], "content"),
        ([USER, {"role": "user", "content": [{"type": "text", "text": "x", "more": value}]}], "content.0"),
    ):
        with pytest.raises(InputError, match=r"contains itself|holds more than") as caught:
            renderer.render(messages)
        assert (caught.value.message, caught.value.field) == (1, field)
    with pytest.raises(InputError, match=r"contains itself|holds more than"):
        renderer.render([USER], tools=[{"name": "f", "parameters": {"a": value}}])
    assert renderer.render([{**USER, "more": value}]).lost == []
    with pytest.raises(InputError, match=r"kwargs\.more: "):
        create_renderer(TOKENIZER, "default", chat_template=TEMPLATE + "{{ more }}", more=value)


# -- values that are not quite JSON: as in transformers


class Colour(str, enum.Enum):  # noqa: UP042
    RED = "red"


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Point:
    x: int
    y: Any


class Model:
    """Has `model_dump`, as pydantic models do."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def model_dump(self, **options: Any) -> dict[str, Any]:
        return dict(self.values)


VALUES = {
    "nan": float("nan"), "infinity": [float("inf"), float("-inf")], "huge_int": 10**4_000, "big_int": 2**200,
    "tuple": [1, 2], "ordered": OrderedDict(b=1, a=2), "proxy": MappingProxyType({"k": "v"}),
    "user_dict": UserDict({"k": [1]}), "enum": Colour.RED, "int_enum": Level.HIGH,
    "dataclass": Point(1, [Point(2, None)]), "pydantic": Model(a=1, b={"c": [Model(d=None)]}),
    "numpy_int": np.int64(5), "numpy_float": np.float32(0.5), "numpy_bool": np.bool_(False),
    "numpy_text": np.str_("text"), "array": np.zeros(3), "set": {1}, "object": object(), "bytes": b"bytes",
    "complex": 1j, "function": len, "type": int, "nested": {"a": [{"b": {1, 2}}, b"x", Colour.RED]},
    "int_keys": {2: "a", None: "b", True: "c", 1.5: "d"}, "empty_key": {"": ""},
}  # fmt: skip


NOT_JSON = ("array", "set", "object", "bytes", "complex", "function", "type", "nested", "nan", "infinity", "int_keys")
"""Values that are not valid JSON: refused, unless messages are rendered as given."""


def by_transformers(messages: Any, tools: Any = None) -> str:
    result = hf_jinja(TEMPLATE, messages, tools)
    assert not isinstance(result, Refusal)
    return result[0]


@pytest.mark.parametrize("name", VALUES)
def test_values_that_are_not_quite_json(name: str) -> None:
    messages = calls(call(arguments={"value": VALUES[name], "after": "x"}))
    expected = by_transformers(messages)
    rendered = AS_GIVEN.render(messages)
    assert rendered.text == expected
    assert set(rendered.fields) >= {"tool_calls.0.function.name"}
    content = [{"role": "tool", "content": {"value": VALUES[name]}}]
    expected_content = by_transformers(content)
    assert AS_GIVEN.render(content).text == expected_content
    if name not in NOT_JSON:
        assert RENDERER.render(messages).text == expected
        assert RENDERER.render(content).text == expected_content
        return
    for conversation, field in ((messages, "tool_calls.0.function.arguments.value"), (content, "content.value")):
        with pytest.raises(InputError, match="which is not valid JSON") as caught:
            RENDERER.render(conversation)
        assert caught.value.message == len(conversation) - 1
        assert (caught.value.field or "").startswith(field)


def test_arguments_that_json_does_not_have_are_refused_for_every_template(any_family: str) -> None:
    """A template would print ``NaN``, which no parser of tool calls accepts, or fail on the key."""
    renderer = make_renderer(any_family)
    for arguments in ({1: "a"}, {None: 1}, {"x": float("nan")}, {"x": [{"y": float("-inf")}]}):
        with pytest.raises(InputError, match="which is not valid JSON") as caught:
            renderer.render(calls(call(arguments=arguments)))
        assert caught.value.message == 1
        assert (caught.value.field or "").startswith("tool_calls.0.function.arguments")


def test_tools_that_are_not_quite_json() -> None:
    for name in ("enum", "tuple", "numpy_int", "ordered", "huge_int", "int_keys", "nested", "object"):
        tools = [{"name": "f", "parameters": {"type": "object", "x": VALUES[name]}}]
        expected = by_transformers([USER], tools)
        assert AS_GIVEN.render([USER], tools=tools).text == expected, name
        if name not in NOT_JSON:
            assert RENDERER.render([USER], tools=tools).text == expected, name
            continue
        with pytest.raises(InputError, match="which is not valid JSON") as caught:
            RENDERER.render([USER], tools=tools)
        assert (caught.value.field or "").startswith("tools.0.parameters.x")


def test_messages_that_are_not_quite_mappings() -> None:
    expected = RENDERER.render([USER]).token_ids
    for messages in ([MappingProxyType(USER)], [UserDict(USER)], (USER,), [OrderedDict(USER)], [Model(**USER)]):
        assert RENDERER.render(messages).token_ids == expected
    assert RENDERER.render([{"role": np.str_("user"), "content": np.str_("hi")}]).token_ids == expected


# -- invalid settings of a renderer


def test_invalid_trusted_roles_and_templates_are_refused() -> None:
    for trusted in ("user", 5, None, [5], [["user"]], np.array(5)):
        with pytest.raises(RendererError, match="trusted"):
            create_renderer(TOKENIZER, "default", chat_template=TEMPLATE, trusted=trusted)
    for template in (5, [], {}, ["x"], object(), [np.int64(3)], {"default": None}):
        with pytest.raises((RendererError, TemplateError, TokenizerError)):
            create_renderer(TOKENIZER, "default", chat_template=template)
