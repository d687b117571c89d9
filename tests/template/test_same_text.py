"""Every expression prints in the tracing environment what it prints in that of transformers.

Both compile the same snippet and render it over the same conversation; where one refuses, so must the other.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from jinja2.defaults import DEFAULT_FILTERS
from transformers.utils.chat_template_utils import _compile_jinja_template, _plain_template_data

from tests.support import rotating
from tokentrace import TemplateError
from tokentrace.template import UNKNOWN, ChatTemplate, wrap_tools, wrap_variables

ARGUMENTS = {
    "text": "a <b> & 'c' \"d\" é \\ \n",
    "int": 42,
    "big": 2**70,
    "negative": -7,
    "float": 1.5,
    "exponent": 1e-07,
    "whole": 3.0,
    "yes": True,
    "no": False,
    "nothing": None,
    "list": [3, "b", None, True, 1.5, [1], {"k": "v"}],
    "empty": {},
    "none_at_all": [],
    "nested": {"b": {"z": 1, "a": [True, None]}, "a": "x"},
    "Items": "shadows nothing",
    "items": "shadows a method",
}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.", "name": "boss"},
    {"role": "user", "content": "Hello <there> & Welcome, welcome!\n  It's naïve\tİ ﬁ.\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "get_it", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "content": [{"type": "text", "text": "part one, "}, {"type": "text", "text": "part two"}]},
    {"role": "user", "content": "https://example.org/?a=b&c=d and 1,234.50"},
]
TOOLS = [
    {"type": "function", "function": {"name": "get_it", "description": "Gets <it>", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {"x": {}}}}},
]
VARIABLES: dict[str, Any] = {"bos_token": "<s>", "flag": True, "words": ["x", "y"], "date_string": "1 Jan"}

SETUP = (
    "{%- set m = messages[1] -%}{%- set c = m.content -%}{%- set a = messages[2].tool_calls[0].function.arguments -%}"
    "{%- set tool = tools[0] -%}"
)

REFUSED = "refused"


def by_transformers(source: str, **more: Any) -> str:
    try:
        text: str = _compile_jinja_template(source).render(
            messages=_plain_template_data(MESSAGES),
            tools=_plain_template_data(TOOLS),
            documents=None,
            add_generation_prompt=False,
            **_plain_template_data(VARIABLES | more),
        )
    except Exception:
        return REFUSED
    return text


def by_trace(source: str, **more: Any) -> Any:
    try:
        return ChatTemplate(source).render(MESSAGES, wrap_tools(TOOLS), variables=wrap_variables(VARIABLES | more))
    except TemplateError:
        return None


def agree(snippet: str, **more: Any) -> None:
    source = SETUP + snippet
    random.seed(0)
    expected = by_transformers(source, **more)
    random.seed(0)
    got = by_trace(source, **more)
    if " at 0x" not in expected:  # the address of some object
        assert (REFUSED if got is None else got.text) == expected


def agree_on_all(snippet: str) -> None:
    """The snippet, with some of VALUES for its ``v``, others for another snippet; in a full run with each."""
    for which in rotating(range(len(VALUES)), snippet, 8):
        agree(f"{{% set v = [{', '.join(VALUES)}][which] %}}{snippet}", which=which)


VALUES = [
    *("c", "m", "m.role", "messages[0]", "messages[2].content", "messages[3].content", "tool", "tools"),
    *("words", "flag"),
    *(f"a.{name}" for name in ARGUMENTS if name != "items"),
    *("a['items']", "a", "'constant <x>'", "12", "1.25", "none", "true", "[1, c]", "(c, 2)", "{'k': c}", "missing"),
]

FILTERS: dict[str, list[str]] = {
    "abs": [""],
    "attr": ["('role')", "('text')", "('upper')"],
    "batch": ["(2)|list", "(3, 'fill')|list", "(2)|map('join', '+')|join('/')"],
    "capitalize": [""],
    "center": ["", "(40)", "(41)", "(3)"],
    "count": [""],
    "d": ["('z')", "('z', true)"],
    "default": ["", "('z')", "(c, true)"],
    "dictsort": ["", "(true)", "(by='value')", "(reverse=true)", "|map('first')|join(',')"],
    "e": [""],
    "escape": ["", "|string"],
    "filesizeformat": ["", "(true)"],
    "first": [""],
    "float": ["", "(7.5)"],
    "forceescape": [""],
    "format": ["", "(c)", "(1, 2)", "(a=1)"],
    "groupby": ["('role')", "('role')|map('first')|join(',')", "('role', default='none')|list"],
    "indent": ["", "(2, true)", "(2, true, true)", "('> ')", "(width=3, blank=true)"],
    "int": ["", "(5)", "(default=6, base=16)"],
    "items": ["", "|list", "|map('last')|list"],
    "join": ["", "(', ')", "(c)", "('-', attribute='role')", "('-', attribute='content')"],
    "last": [""],
    "length": [""],
    "list": ["", "|length", "|join('|')"],
    "lower": [""],
    "map": [
        *("('upper')|list", "(attribute='role')|join(',')", "(attribute='x', default='d')|list", "('length')|list"),
        *("('string')|join", "('default', 'q')|list", "('tojson')|join(';')", "('replace', 'e', 'E')|list"),
    ],
    "max": ["", "(attribute='role')"],
    "min": ["", "(attribute='role')"],
    "pprint": [""],
    "random": ["|length >= 0"],
    "reject": ["|list", "('none')|list", "('string')|list"],
    "rejectattr": ["('content')|list|length", "('role', 'eq', 'user')|map(attribute='role')|join(',')"],
    "replace": ["('e', 'E')", "('e', c)", "('', '-')", "('e', 'EE', 1)", "(c, 'x')", "(1, 2)"],
    "reverse": ["", "|list", "|join"],
    "round": ["", "(1)", "(0, 'floor')", "(1, 'ceil')"],
    "safe": ["", "|string", "|length"],
    "select": ["|list", "('string')|list", "('mapping')|list"],
    "selectattr": ["('content')|list|length", "('role', 'in', ['user', 'tool'])|map(attribute='role')|join(',')"],
    "slice": ["(2)|list", "(3, 'f')|list"],
    "sort": ["", "(true)", "(attribute='role')|map(attribute='role')|join(',')", "(case_sensitive=true)"],
    "string": ["", "|length"],
    "striptags": [""],
    "sum": ["", "(start=1)", "(attribute='int')"],
    "title": [""],
    "tojson": [
        *("", "(indent=2)", "(indent='\t')", "(indent=0)", "(separators=(',', ':'))", "(sort_keys=true)"),
        *("(ensure_ascii=true)", "(indent=4, separators=(', ', ' : '), sort_keys=true)", "(false, 2)", "(indent=none)"),
        *("|length", "|upper", "|safe", "(separators=[';', '='])"),
    ],
    "trim": ["", "('H!.')", "(chars=none)"],
    "truncate": ["", "(9)", "(9, true)", "(9, true, '…', 0)", "(9, false, c, 0)"],
    "unique": ["|list", "(attribute='role')|map(attribute='role')|join(',')", "(true)|list"],
    "upper": [""],
    "urlencode": [""],
    "urlize": ["", "(10)", "(target='_blank')"],
    "wordcount": [""],
    "wordwrap": ["", "(10)", "(5, false)", "(10, wrapstring=' / ')"],
    "xmlattr": ["", "(false)"],
}


def test_every_filter_is_tried() -> None:
    assert set(FILTERS) == set(DEFAULT_FILTERS)


@pytest.mark.parametrize("name", sorted(FILTERS))
def test_filters(name: str) -> None:
    for rest in FILTERS[name]:
        agree_on_all(f"{{{{ v|{name}{rest} }}}}")


OPERATORS = [
    *("~ c", "~ 1", "+ c", "+ 1", "+ 'x'", "+ [1]", "- 1", "* 2", "/ 2", "// 2", "% 5", "** 2", "% c", "% (c, 1)"),
    *("== c", "!= none", "== true", "== 42", "< 3", ">= 1.5", "in c", "in messages", "in a", "not in words"),
    *("or c", "and c"),
    *("[0]", "[-1]", "[1:3]", "[::-1]", "[:2]", "['role']", ".role", ".missing", "['missing']", ".upper()", ".items()"),
    *("if c else 1", "if flag", ".get('role')", ".get('zip', c)", ".keys()|list", ".values()|list", ".copy()|length"),
    *(".keys()", ".values()", ".items()|list", "|string ~ flag", ".split()", ".split(',')[0]", ".strip()"),
    ".format(c)",
    *(".append(1)", ".pop()", ".update({})", ".clear()", ".setdefault('x', 1)", ".foo()"),
    *(".count('e')", ".index('e')", ".startswith('H')", ".join(words)", ".join(['a', c])", ".real", ".bit_length()"),
]


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators(operator: str) -> None:
    expression = f"v{operator}" if operator[0] in ".[" else f"v {operator}"
    agree_on_all(f"{{{{ {expression} }}}}")
    agree_on_all(f"{{% set x = {expression} %}}{{{{ x }}}}")


ALONE = [
    "{{ v }}|{% if v %}yes{% else %}no{% endif %}|{{ not v }}|{{ [v] }}",
    "{% for x in v %}{{ x }},{{ loop.index }};{% else %}empty{% endfor %}",
    "{{ '%s' % v }}",
    "{{ '%r|%5s' % (v, v) }}",
    "{{ '{}'.format(v) }}{{ '{!r:>9}|{x}'.format(v, x=v) }}",
    "{{ '%d' % v }}",
    "{{ '%c' % v }}",
    "{{ -v }}",
    "{{ {'k': v} }}{{ dict(k=v) }}{{ (v, 1) }}",
    "{{ {v: 1} }}",
]


@pytest.mark.parametrize("snippet", ALONE)
def test_values_print_alone_and_in_formats(snippet: str) -> None:
    agree_on_all(snippet)


MARKUP = (
    *("'x<'|safe + c", "c|e + '<i>'", "c|safe|e", "c|e|forceescape", "c + '<'|safe", "'a'|safe ~ c"),
    "(c|safe).upper()",
    *("('%s<'|safe) % c", "(c|safe)[2:] + '<'", "'<'.join([c|safe, '>'])", "[c|safe, '>']|join('<')"),
    *("(c|safe)|trim + '<'", "(c|safe).replace('a', '<') + '<'", "(c|safe).split('a')|first + '<'", "c|forceescape"),
)


@pytest.mark.parametrize("expression", MARKUP)
def test_markup_escapes_what_it_is_joined_with(expression: str) -> None:
    agree(f"{{% set c = c ~ '<&a>' %}}{{{{ {expression} }}}}")


LOSSY = [
    *("c|urlencode", "c|wordwrap(5)", "a|pprint", "[c, 1]", "c|striptags", "c|urlize"),
    *("{'k': c}", "(c, 1)", "{'x': c}|xmlattr|trim", "'%60s' % c", "'{!r}'.format(c)"),
    *("m.items()", "a.keys()", "messages|map('upper')", "namespace(x=c)"),
]


@pytest.mark.parametrize("expression", LOSSY)
def test_text_that_cannot_be_followed_is_of_unknown_origin(expression: str) -> None:
    rendering = by_trace(f"{SETUP}<{{{{ {expression} }}}}>")
    assert rendering.origins == [None, UNKNOWN, None]


TUPLES = [
    *("{{ pair }}", "{{ pair|string }}", "{{ [pair] }}", "{{ {'k': pair} }}", "{{ pair ~ '' }}", "{{ deep }}"),
    *("{{ pair|tojson }}", "{{ pair|join(',') }}", "{{ pair[0] }}{{ pair[1:] }}", "{{ pair + (1,) }}"),
    "{{ pair * 2 }}",
    *("{{ pair is sequence }}{{ pair is iterable }}{{ pair == ('a', c) }}{{ 'a' in pair }}", "{{ pair|upper }}"),
    *("{% for x in pair %}{{ x }}{% endfor %}", "{{ pair|length }}{{ pair.count('a') }}{{ pair.append }}", "{{ one }}"),
    *("{{ '%s-%s' % pair }}", "{{ '%s' % (pair,) }}", "{{ {pair: 1} }}"),
    "{{ pair|list }}{{ pair|first }}{{ pair|last }}",
]


@pytest.mark.parametrize("snippet", TUPLES)
def test_tuples_print_as_tuples(snippet: str) -> None:
    agree(snippet, pair=("a", 'b"'), one=("x",), deep=[{"k": ("a", ("b", None, True, 1.5))}])


def test_a_printed_tuple_belongs_to_its_field() -> None:
    rendering = ChatTemplate("<{{ messages[0].pair }}>{{ messages[0].pair|tojson }}").render(
        [{"role": "user", "content": "x", "pair": ("a", "b")}]
    )
    assert rendering.text == """<('a', 'b')>["a", "b"]"""
    assert rendering.spans()[1] == ("('a', 'b')", -1, ("messages", 0, "pair"))
    assert ('"b"', -1, ("messages", 0, "pair", 1)) in rendering.spans()


def test_autoescaping_is_refused() -> None:
    with pytest.raises(TemplateError, match="autoescape"):
        ChatTemplate("{% autoescape true %}{{ messages[0].content }}{% endautoescape %}")
