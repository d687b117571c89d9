"""Tries all filters, tests, methods, operators and globals of the environment.

Each prints the same text as under transformers, and none launders a user's text into scaffold.

Nothing is listed by hand: names come from Jinja's tables and Python's types. The oracle does not use our trace: each
expression is rendered by transformers' own environment with two secrets of the same shape. Where the two texts differ,
they depend on the secret, so these characters must not be scaffold in our rendering.
"""

import difflib
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest
from jinja2 import nodes
from jinja2.compiler import operators
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from markupsafe import Markup

from tests.lazy import lazy
from tests.support import rotating
from tokentrace import TemplateError
from tokentrace.template import ChatTemplate, Rendering
from tokentrace.template.environment import TracingEnvironment

chat_template_utils = lazy("transformers.utils.chat_template_utils")

SECRETS = ("λόγος Ωμέγα\nψυχή", "слово Омега\nдуша")
"""Of the same length and shape, so that counts, orders and truth values are equal."""
NUMBERS = (955, 957)
LETTERS = frozenset(form for char in SECRETS[0] for form in (char, char.upper(), char.lower())) - frozenset(" \n")

VALUES = (
    *("c", "c[0]", "m", "messages", "m.parts", "m.tags", "m.pair", "m.number", "m.half", "m.yes", "m.nothing"),
    *("[c]", "[[c]]", "(c, 'a')", "{'k': c}", "{c: 'a'}", "{'k': {'z': [c]}}", "[m.number]", "{'k': m.number}"),
    *("c|safe", "[c|safe]", "c.encode()", "namespace(x=c)", "c ~ 'x'", "[c, 'a']|map('string')", "m.items()"),
    *("{'k': c}.values()", "joiner(c)", "cycler(c, 'a')", "shout(c)", "missing", "m.number + 0", "[c]|groupby(0)"),
    *("'abc'", "'%s %c %(k)s'", "'{} {0} {k}'", "'{:c}'", "'%c'", "'%((k))c'", "'{:{}}'", "97", "['a', 'b']"),
    *("{'k': 'v'}", "1.5"),
)
ARGUMENTS = (
    *("[]", "[c]", "[c[0]]", "[m.number]", "[[c]]", "[(c, c)]", "[{'k': c, '(k)': m.number}]", "[c, c[0]]"),
    *("['a', c]", "[c, 'a']", "[40, c[0]]", "[2]", "['k']", "[0, 'c']", "[m.number, 'c']", "[{97: c, 98: m.number}]"),
    *("['upper']", "['tojson']", "['string', c]", "['format', m.number]", "['k', c]", "['utf-8']", "[1, 2, c]"),
)
NAMED = (
    *("{}", "{'separators': [c, c]}", "{'indent': c}", "{'k': c}", "{'attribute': 'k', 'default': c}", "{'start': c}"),
    *("{'wrapstring': c}", "{'target': c}", "{'fill_with': c}", "{'chars': c}", "{'width': c}", "{'end': c}"),
    *("{'default': c}", "{'k': m.number}", "{'d': c}", "{'sep': c}", "{'start': m.number}", "{'byteorder': 'big'}"),
)
CONSUMERS = (
    "{{ r }}",
    "{{ r|string|upper }}{{ r ~ '' }}",
    "{{ r|list|join }}{{ r|list|string }}",
    "{% for x in r %}{{ x }}{{ x|string|trim }}{% endfor %}",
    "{{ '%c' % r }}",
    "{{ '{:{}}'.format(r, 'c') }}",
    "{{ [r]|tojson }}",
    "{{ r.decode() }}",
    "{{ r() }}{{ r.next() }}",
    "{{ r[0] }}{{ r|last }}",
    "{{ r.k }}{{ r.x }}{{ r|items|list }}",
    "{{ r + r }}{{ r * 2 }}{{ r - 1 }}",
    "{% set b %}{{ r }}{% endset %}{{ b|capitalize }}",
    "{{ 'a'.translate({97: r}) }}",
)
MACRO = "{% macro shout(x) %}<{{ x }}>{% endmacro %}"
KINDS: dict[str, type] = {
    kind.__name__: kind for kind in (str, Markup, list, dict, tuple, int, float, bytes, range, type({}.items()))
}


def public(kind: type) -> list[str]:
    return [name for name in dir(kind) if not name.startswith("_")]


def operations() -> Iterator[tuple[str, str]]:
    """Every operation as a name and an expression of ``v``, ``args`` and ``kw``."""
    environment = TracingEnvironment()
    for name in sorted({*DEFAULT_FILTERS, *environment.filters}):
        yield f"filter {name}", f"v|{name}(*args, **kw)"
    for name in sorted({*DEFAULT_TESTS, *environment.tests}):
        if name.isidentifier():
            yield f"test {name}", f"v is {name}(*args)"
        yield f"select {name}", f"[v]|select('{name}', *args)|list"
    for name in sorted({method for kind in KINDS.values() for method in public(kind)}):
        yield f"method {name}", f"v.{name}(*args, **kw)"
        yield f"attribute {name}", f"(v|attr('{name}'))"
    for kind in nodes.BinExpr.__subclasses__():
        if kind.operator not in (None, "and", "or"):
            yield f"operator {kind.operator}", f"v {kind.operator} args[0]"
            yield f"reversed {kind.operator}", f"args[0] {kind.operator} v"
    for kind in nodes.UnaryExpr.__subclasses__():
        yield f"unary {kind.operator}", f"{kind.operator} v"
    for sign in sorted(set(operators.values())):
        yield f"compare {sign}", f"v {sign} args[0]"
    yield from {"concat": "v ~ args[0]", "and": "v and args[0]", "or": "v or args[0]", "if": "v if args else 1"}.items()
    yield from {"item": "v[args[0]]", "slice": "v[1:]", "backwards": "v[::-1]", "steps": "v[::2]"}.items()
    yield from {"list": "[v, args]", "dict": "{'k': v}", "key": "{v: 1}", "call": "v(*args, **kw)"}.items()
    yield from {"macro": "shout(v)", "loop": "dict(a=v)"}.items()
    for name in sorted(environment.globals):
        yield f"global {name}", f"{name}(*args, **kw)"
        yield f"global {name} of", f"{name}(v, *args, **kw)"


OPERATIONS = dict(operations())


def messages(which: int) -> list[dict[str, Any]]:
    text, number = SECRETS[which], NUMBERS[which]
    return [
        {
            **{"role": "user", "content": text, "number": number, "half": number + 0.5, "yes": True, "nothing": None},
            **{"parts": [{"type": "text", "text": text}], "tags": {text: 1, "in": {"deep": [text]}}},
            "pair": (text, number),
        }
    ]


def chosen(name: str, among: tuple[str, ...]) -> str:
    """``{% if … %}{% elif … %}``: sets `name` to one of the expressions, by number."""
    rounds = (f"{{%- elif which_{name} == {at} -%}}{{%- set {name} = {each} -%}}" for at, each in enumerate(among))
    return f"{{%- if false -%}}{''.join(rounds)}{{%- endif -%}}"


def template() -> str:
    """One template with every operation; variables select the operation, its operands and how it is printed."""
    consumers = (f"{{%- elif which_consumer == {at} -%}}{each}" for at, each in enumerate(CONSUMERS))
    return (
        f"{MACRO}{{%- set m = messages[0] -%}}{{%- set c = m.content -%}}"
        f"{chosen('v', VALUES)}{chosen('args', ARGUMENTS)}{chosen('kw', NAMED)}"
        f"{chosen('r', tuple(OPERATIONS.values()))}"
        f"{{%- if false -%}}{''.join(consumers)}{{%- endif -%}}"
    )


TEMPLATE = template()
Case = dict[str, int]


def plain(case: Case, which: int) -> str | None:
    random.seed(0)
    data = chat_template_utils._plain_template_data(messages(which))
    try:
        return str(chat_template_utils._compile_jinja_template(TEMPLATE).render(messages=data, tools=None, **case))
    except Exception:
        return None


def ours(case: Case, which: int = 0) -> Rendering | None:
    random.seed(0)
    try:
        return ChatTemplate(TEMPLATE).render(messages(which), variables=case)
    except TemplateError:
        return None


def case_of(*numbers: int) -> Case:
    return dict(zip(("which_r", "which_v", "which_args", "which_kw", "which_consumer"), numbers, strict=True))


def describe(case: Case) -> str:
    """A readable description of a case."""
    tables = (list(OPERATIONS.values()), VALUES, ARGUMENTS, NAMED, CONSUMERS)
    return ", ".join(table[at] for table, at in zip(tables, case.values(), strict=True))


def from_the_secret(first: str, second: str) -> set[int]:
    """Positions in the first text that depend on the secret; in long texts only near the start, as a diff is slow."""
    if len(first) == len(second):
        return {at for at, (one, other) in enumerate(zip(first, second, strict=True)) if one != other}
    matcher = difflib.SequenceMatcher(None, first[:1000], second[:1000], autojunk=False)
    return {at for tag, start, end, _, _ in matcher.get_opcodes() if tag != "equal" for at in range(start, end)}


def laundered(rendering: Rendering, places: set[int]) -> str:
    """Scaffold characters that are letters of the secret or depend on it."""
    letters, at = [], 0
    for text, _, origin in rendering.spans():
        if origin is None:
            letters += [char for place, char in enumerate(text, at) if place in places or char in LETTERS]
        at += len(text)
    return "".join(letters)


def cases(name: str, consumers: int, each: int) -> Iterator[Case]:
    """Cases of an operation, the same ones in every run."""
    choose = random.Random(name)
    which = list(OPERATIONS).index(name)
    for consumer in range(consumers):
        for _ in range(each if consumer else 5 * each):
            named = choose.randrange(len(NAMED)) if "kw" in OPERATIONS[name] and choose.random() < 0.5 else 0
            value, args = choose.randrange(len(VALUES)), choose.randrange(len(ARGUMENTS))
            yield case_of(which, value, args, named, consumer)


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_operation_changes_the_text_or_launders_it(name: str) -> None:
    for case in rotating(cases(name, len(CONSUMERS), 2), name, 6):
        rendering = ours(case)
        if rendering is None:
            continue
        expected, other = plain(case, 0), plain(case, 1)
        places: set[int] = set()
        if expected is not None and other is not None and not re.search(r" at 0x|<bound method|range\(", expected):
            assert rendering.text == expected, describe(case)
            places = from_the_secret(expected, other)
        assert not laundered(rendering, places), (describe(case), rendering.spans())


def test_the_oracle_sees_laundering() -> None:
    which = list(OPERATIONS).index("filter upper")
    case = case_of(which, VALUES.index("[c]"), 0, 0, 0)
    expected, other = plain(case, 0), plain(case, 1)
    assert expected is not None
    assert other is not None
    washed = Rendering(expected, [len(expected)], [-1], [None], [], 0)
    assert laundered(washed, from_the_secret(expected, other))
