"""Compiling and running a chat template: its variables, its sandbox, and its errors."""

import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.lazy import lazy
from tests.support import byte_tokenizer_json
from tokentrace import TemplateError, create_renderer
from tokentrace.errors import TemplateLimitError
from tokentrace.template import ChatTemplate, wrap_tools, wrap_variables
from tokentrace.tokens import Tokenizer

chat_template_utils = lazy("transformers.utils.chat_template_utils")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"function": {"name": "f", "arguments": {"n": 1, "x": 1.5, "b": True, "l": [1], "d": {"k": 1}}}}
        ],
    },
    {"role": "user", "content": "Hi"},
]


def render(source: str, messages: list[dict[str, Any]] | None = None, **variables: Any) -> str:
    return ChatTemplate(source).render(messages or MESSAGES, None, variables=wrap_variables(variables)).text


# -- the sandbox

A = (
    "{%- set c = messages[2].content -%}{%- set m = messages[2] -%}"
    "{%- set a = messages[1].tool_calls[0].function.arguments -%}"
)


VALUES = [
    *("c", "m", "messages", "a", "a.n", "a.x", "a.b", "a.l", "a.d"),
    *("messages[1].content", "m.role", "variable", "(c|safe)"),
]


@pytest.mark.parametrize("value", VALUES)
def test_the_trace_is_invisible(value: str) -> None:
    for name in ("runs", "origin", "raw", "texts", "_key", "_located"):
        ways = (f"{value}.{name}", f"{value}['{name}']", f"{value}|attr('{name}')", f"{value}.{name} is defined")
        assert render(A + "".join(f"{{{{ {way} }}}}" for way in ways), variable="v") == "False"


@pytest.mark.parametrize(
    "expression",
    [
        *("c.__class__", "c.__class__.__mro__", "m.__init__", "messages.__class__", "a.n.__class__", "c['__class__']"),
        *("c.upper.__self__", "render.__globals__", "namespace.__init__", "range.__class__", "c|attr('__class__')"),
        *("'{0.__class__}'.format(c)", "'{0.__class__.__mro__}'.format(m)", "'{x.__init__}'.format(x=c)"),
        *("('{0.__class__}'|safe).format(c)", "(c|safe).__class__", "(c|safe).format.__globals__", "(c|e).__html__"),
        *("raise_exception.__globals__", "strftime_now.__globals__", "dict.__class__", "self.__init__"),
        *("cycler.__init__", "joiner.__init__.__globals__", "loop.__class__", "(c|attr)('__class__')"),
        *("'{0.__globals__}'.format(raise_exception)", "'{a.__class__}'.format_map({'a': c})", "c.format.__globals__"),
        *("[c]|map(attribute='__class__')|list", "[c]|map('attr', '__class__')|list", "[c]|groupby('__class__')"),
    ],
)
def test_dunders_are_out_of_reach(expression: str) -> None:
    try:
        text = render(f"{A}{{{{ {expression} }}}}")
    except TemplateError:
        return
    assert not re.search(r"class|function|type|method|0x", text), text


@pytest.mark.parametrize(
    "expression",
    [
        *("messages.append(1)", "messages.pop()", "messages.clear()", "messages.sort()", "messages.insert(0, 1)"),
        *("m.update({'x': 1})", "m.pop('role')", "m.clear()", "m.setdefault('x', 1)", "m.popitem()", "a.l.append(2)"),
        *("tools.append(1)", "[1].append(2)", "{}.update({})", "messages[0].__setitem__('x', 1)", "words.extend([1])"),
    ],
)
def test_nothing_can_be_changed(expression: str) -> None:
    before = repr(MESSAGES)
    tools = wrap_tools([{"name": "f"}])
    template = ChatTemplate(f"{A}{{{{ {expression} }}}}")
    with pytest.raises(TemplateError):
        template.render(MESSAGES, tools, variables=wrap_variables({"words": ["x"]}))
    assert repr(MESSAGES) == before


@pytest.mark.parametrize(
    "statement",
    [
        *("{% include 'x' %}", "{% import 'x' as y %}", "{% extends 'x' %}", "{% from 'x' import y %}"),
        *("{% block x required %}{% endblock %}", "{% block x %}{% endblock %}{% block x %}{% endblock %}"),
        *("{% for m in messages %}{% block x %}{% endblock %}{% endfor %}", "{% autoescape true %}{% endautoescape %}"),
    ],
)
def test_a_template_stands_alone(statement: str) -> None:
    with pytest.raises(TemplateError, match="line 1"):
        render(statement)


# -- failures


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("{{ ", 1),
        ("\n\n{% if %}", 3),
        ("a\n{% for x in y %}", 2),
        ("{{ x|nofilter }}", 1),
        ("\n{% nope %}", 2),
        ("{{ x is nope }}", 1),
    ],
)
def test_invalid_jinja_names_the_line(source: str, line: int) -> None:
    with pytest.raises(TemplateError, match="not valid Jinja") as caught:
        ChatTemplate(source)
    assert caught.value.line == line
    assert f"line {line}" in str(caught.value)
    for empty in ("", "  \n", None, 5):
        with pytest.raises(TemplateError, match="empty"):
            ChatTemplate(empty)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("{{ raise_exception('no users here') }}", "refused the conversation: no users here"),
        ("{{ nothing.at.all }}", "needs something that is missing"),
        ("{{ nothing() }}", "needs something that is missing"),
        ("{{ m.append(1) }}", "failed|is missing|not allowed"),
        ("{{ m.content + 1 }}", "failed on this conversation: TypeError"),
        ("{{ 1 // 0 }}", "failed on this conversation: ZeroDivisionError"),
        ("{{ messages.__class__.__mro__ }}", "not allowed|is missing"),
        ("{{ m.content|int + none }}", "TypeError"),
        ("{{ strftime_now(5) }}", "TypeError"),
        ("{{ 'x' * 10**10 }}", "tried to build a value"),
    ],
)
def test_failures_name_the_message_and_the_line(body: str, problem: str) -> None:
    source = f"{{% for m in messages %}}\n{{% if m.role == 'user' %}}\n{body}\n{{% endif %}}\n{{% endfor %}}"
    with pytest.raises(TemplateError, match=rf"^message 2: .*({problem})") as caught:
        render(source)
    assert (caught.value.message, caught.value.line) == (2, 3)
    assert "Traced" not in str(caught.value)
    with pytest.raises(TemplateError) as caught:
        render("{% for m in messages %}{{ m.role }}{% endfor %}{{ raise_exception('end') }}")
    assert caught.value.message is None


def test_deep_arguments_are_a_limit_and_no_recursion_error() -> None:
    deep: Any = 1
    for _ in range(100_000):
        deep = [deep]
    for expression in ("messages[0].x|tojson", "messages[0].x", "messages|tojson", "messages[0].x|string"):
        with pytest.raises(TemplateLimitError):
            render(f"{{{{ {expression} }}}}", [{"role": "user", "content": "", "x": {"a": deep}}])


# -- the same environment as in transformers


def same_as_transformers(source: str, messages: list[dict[str, Any]] = MESSAGES, **variables: Any) -> str:
    text = render(source, messages, **variables)
    expected, _ = chat_template_utils.render_jinja_template([messages], chat_template=source, **variables)
    assert text == expected[0]
    return text


def test_reasoning_is_offered_under_each_of_its_names() -> None:
    source = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.thinking }}|{{ m.reasoning }};{% endfor %}"
    whole = "{% for m in messages %}{{ m|tojson }}{% for key in m %}{{ key ~ m[key] }};{% endfor %}{% endfor %}"
    for name in ("reasoning_content", "thinking", "reasoning"):
        for message in (
            {name: "why"},
            {"role": "assistant", name: "why", "content": "x"},
            {"thinking": None, name: "a"},
        ):
            same_as_transformers(source, [message])
            same_as_transformers(whole, [message])
    both = [{"role": "assistant", "content": "x", "thinking": "a", "reasoning_content": "b"}]
    assert same_as_transformers(source, both) == "b|a|;"


def test_template_variables() -> None:
    assert re.fullmatch(r"\d{4}", same_as_transformers("{{ strftime_now('%Y') }}"))
    source = (
        "{{ enable_thinking is defined }}{{ enable_thinking }}{{ words|join(',') }}{{ level }}"
        "{{ nothing }}{{ (deep or {}).x }}"
    )
    assert same_as_transformers(
        source, enable_thinking=False, words=["a", "b"], level=3, nothing=None, deep={"x": {"y": 1}}
    )
    assert same_as_transformers(
        "{% if flag is sameas true and not off and n is none %}yes{% endif %}", flag=True, off=False, n=None
    )
    same_as_transformers(source)
    template = ChatTemplate("{{ strftime_now('%Y') }}{{ word }}{{ number }}")
    variables = wrap_variables({"word": "w", "number": 5})
    assert template.render(MESSAGES, None, variables=variables).origins == [None, ("kwargs", "word"), None]


def test_special_tokens_are_scaffold_and_control_tokens() -> None:
    tokenizer = Tokenizer(byte_tokenizer_json(["<s>", "</s>"]), variables={"bos_token": "<s>", "eos_token": "</s>"})
    renderer = create_renderer(
        tokenizer, "default", chat_template="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    )
    rendered = renderer.render([{"role": "user", "content": "<s>"}])
    assert rendered.token_ids == [256, *b"<s>", 257] == [256, 60, 115, 62, 257]
    assert rendered.fields == ["scaffold", "content", "content", "content", "scaffold"]


TAGGED = {
    "a field": "a{% generation %}b{{ messages[0].content }}{% endgeneration %}c",
    "twice, and empty": "{% generation %}a{% endgeneration %}b{% generation %}{% endgeneration %}c",
    "sets": "{% set x = 1 %}{% generation %}{% set x = x + 1 %}{{ x }}{% endgeneration %}{{ x }}",
    "loop": "{% for m in messages %}{% generation %}{{ loop.index }}{{ m.role }}{% endgeneration %}, {% endfor %}",
    "around a loop": "{% generation %}{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{{ m.role }}"
    "{% endfor %}{% endgeneration %}",
    "macro": "{% macro f() %}{% generation %}b{% endgeneration %}c{% endmacro %}"
    "a{{ f() }}e{% for m in messages %}{{ m.role }}{{ f() }}{% endfor %}",
    "text in a macro": "{% macro f() %}b{% generation %}cc{% endgeneration %}{% endmacro %}a{{ 'x' + f() }}{{ f() }}",
    "set block": "a{% set x %}{% generation %}b{% endgeneration %}{% endset %}cd{{ x }}",
    "namespace": "{% set n = namespace(x=1) %}{% generation %}{% set n.x = 2 %}{% endgeneration %}{{ n.x }}",
}


@pytest.mark.parametrize("name", TAGGED)
def test_generation_tags_cover_the_same_text_as_in_transformers(name: str) -> None:
    [text], [ranges] = chat_template_utils.render_jinja_template(
        [MESSAGES], chat_template=TAGGED[name], return_assistant_tokens_mask=True
    )
    rendering = ChatTemplate(TAGGED[name]).render(MESSAGES)
    assert (rendering.text, rendering.generation) == (text, list(map(tuple, ranges)))


@pytest.mark.parametrize("word", ["break", "continue"])
def test_a_generation_block_cannot_leave_the_loop_around_it(word: str) -> None:
    source = f"{{% for m in messages %}}\n{{% generation %}}{{% {word} %}}{{% endgeneration %}}{{% endfor %}}"
    with pytest.raises(SyntaxError):
        chat_template_utils.render_jinja_template([MESSAGES], chat_template=source)
    with pytest.raises(TemplateError, match=r"cannot break or continue the loop around it.*line 2"):
        ChatTemplate(source)


def test_one_template_serves_many_threads() -> None:
    template = ChatTemplate("{% for m in messages %}{{ loop.index }}{{ m.content }}{% endfor %}")

    def renders_its_own_messages(number: int) -> bool:
        messages = [{"role": "user", "content": f"<{number}-{k}>"} for k in range(20)]
        rendering = template.render(messages)
        return (
            all(text == f"<{number}-{origin[1]}>" for text, _, origin in rendering.spans() if origin is not None)
            and rendering.text.count("<") == 20
        )

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(renders_its_own_messages, range(200)))
