"""A template that would never end, or fill the memory, is stopped and says so.

Each runs in a process of its own with little memory, so that a limit that does not hold fails one test and not
the machine. The timeout is a guard, not a measurement: all of them end in seconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from tests.support import tokenizer_json_for
from tokentrace import TemplateError, create_renderer
from tokentrace.errors import TemplateLimitError
from tokentrace.template import ChatTemplate, budget, pairs, wrap_tools
from tokentrace.tokens import Tokenizer

RUN = textwrap.dedent(
    """
    import gc, json, os, resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (GB << 30, GB << 30))
    from tokentrace import TemplateError
    from tokentrace.errors import TemplateLimitError
    from tokentrace.template import ChatTemplate
    from tokentrace.template import budget
    budget.MAX_STEPS = 200_000
    messages = [{"role": "user", "content": "x" * 1_000, "n": 9}] * 3

    def outcome(source):
        try:
            return f"rendered {len(ChatTemplate(source).render(messages).text)}"
        except TemplateLimitError as error:
            return f"limit {error}"
        except TemplateError as error:
            return f"error {error}"

    for name, source in json.load(sys.stdin).items():
        gc.collect()
        child = os.fork() if APART else 0
        if not child:
            print(json.dumps([name, outcome(source)]), flush=True)
        if APART and not child:
            os._exit(0)
        if child:
            os.waitpid(child, 0)
    """
)
"""Templates one after another: in one process of so many GB, or each in a child of it, which loads nothing anew."""

GROW = "{% set ns = namespace(x=START) %}{% for i in range(200) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x|length }}"

ENDLESS = {
    "nested_loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "big_ranges": "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "empty_ranges": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macro_recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "macro_bombs": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "mutual_recursion": "{% macro f() %}{{ g() }}{% endmacro %}{% macro g() %}{{ f() }}{% endmacro %}{{ f() }}",
    "caller_recursion": "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}"
    "{% call f() %}x{% endcall %}",
    "loop_recursion": "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "loop_bombs": "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1, x - 1]) }}{% endif %}{% endfor %}",
    "printing": "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "printing_constants": "{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}",
    "printing_in_a_buffer": "{% set x %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "filling_a_buffer": "{% set x %}{% for a in range(99999) %}{{ messages[0].content * 9999 }}"
    "{% endfor %}{% endset %}",
    "product": "{{ 'x' * 10**10 }}",
    "product_of_content": "{{ messages[0].content * 10**9 }}{{ 10**9 * messages[0].content }}",
    "product_of_a_list": "{{ ([1] * 10**10)|length }}",
    "product_of_a_tuple": "{{ ((1,) * 10**10)|length }}",
    "product_of_a_traced_list": "{{ (messages * 10**10)|length }}",
    "power": "{{ 10**(10**10) }}",
    "power_of_content": "{{ messages[0].n ** (10**9) }}",
    "power_of_a_constant": "{% set x = 2 %}{{ x ** 9999999999 }}",
    "power_with_float": "{{ 10.0 ** (10**6) }}",
    "huge_number_printed": "{{ 10 ** 9000 }}",
    "squaring": GROW.replace("START", "99").replace("STEP", "ns.x * ns.x"),
    "adding_numbers": "{% set ns = namespace(x=9**9999) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling_strings": GROW.replace("START", "'x'").replace("STEP", "ns.x + ns.x"),
    "doubling_content": GROW.replace("START", "messages[0].content").replace("STEP", "ns.x + ns.x"),
    "doubling_by_concat": GROW.replace("START", "'x'").replace("STEP", "ns.x ~ ns.x"),
    "doubling_by_join": GROW.replace("START", "'x'").replace("STEP", "[ns.x, ns.x]|join"),
    "doubling_by_method": GROW.replace("START", "'x'").replace("STEP", "ns.x.join([ns.x, ns.x])"),
    "doubling_by_format": GROW.replace("START", "'x'").replace("STEP", "'{0}{0}'.format(ns.x)"),
    "doubling_by_percent": GROW.replace("START", "'x'").replace("STEP", "'%s%s' % (ns.x, ns.x)"),
    "doubling_by_filter": GROW.replace("START", "'x'").replace("STEP", "'%s%s'|format(ns.x, ns.x)"),
    "doubling_by_replace": GROW.replace("START", "'xx'").replace("STEP", "ns.x|replace('x', ns.x)"),
    "doubling_by_macro": "{% macro d(x) %}{{ x }}{{ x }}{% endmacro %}"
    + GROW.replace("START", "'x'").replace("STEP", "d(ns.x)"),
    "doubling_lists": GROW.replace("START", "[1]").replace("STEP", "ns.x + ns.x"),
    "doubling_tuples": GROW.replace("START", "(1,)").replace("STEP", "ns.x + ns.x"),
    "doubling_traced_lists": GROW.replace("START", "messages").replace("STEP", "ns.x + ns.x"),
    "doubling_lists_by_sum": GROW.replace("START", "[1]").replace("STEP", "[ns.x, ns.x]|sum(start=[])"),
    "doubling_bytes": GROW.replace("START", "'x'.encode()").replace("STEP", "ns.x + ns.x"),
    "bytes_product": "{{ ('x'.encode() * 10**11)|length }}",
    "bytes_center": "{{ 'x'.encode().center(10**11)|length }}",
    "bytes_join": "{{ ('x' * 60000).encode().join([''.encode()] * 1000000)|length }}",
    "nesting_lists": GROW.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("|length", "|string|length"),
    "nesting_dicts": GROW.replace("START", "{}")
    .replace("STEP", "{1: ns.x, 2: ns.x}")
    .replace("|length", "|tojson|length"),
    "deep_list": "{% set ns = namespace(x=[]) %}{% for i in range(99999) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ ns.x }}",
    "center": "{{ 'x'|center(10**9) }}",
    "center_method": "{{ 'x'.center(10**10)|length }}{{ messages[0].content.ljust(10**10) }}",
    "zfill": "{{ '1'.zfill(10**10)|length }}",
    "expandtabs": "{{ '\t'.expandtabs(10**10)|length }}",
    "replace": "{{ ('x' * 100000)|replace('x', 'y' * 100000)|length }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000})|length }}",
    "join": "{{ ('x' * 100000)|join('y' * 100000)|length }}",
    "indent": "{{ 'x\ny'|indent(10**10) }}",
    "indent_many": "{{ ('x\n' * 100000)|indent(100000)|length }}",
    "tojson_indent": "{{ [1]|tojson(indent=10**10) }}",
    "slice": "{{ 'x'|slice(10**9)|list|length }}",
    "batch": "{{ 'x'|batch(10**9, 'y')|list|length }}",
    "round": "{{ 1.5|round(10**9) }}",
    "wordwrap": "{{ ('x' * 1000000)|wordwrap(1, wrapstring='y' * 100000)|length }}",
    "range": "{{ range(10**9)|list|length }}",
    "range_backwards": "{{ range(10**9, 0, -1)|list|length }}",
    "percent_width": "{{ '%1000000000d' % 1 }}",
    "percent_precision": "{{ '%.1000000000f' % 1 }}",
    "percent_star": "{{ '%*d' % (10**9, 1) }}",
    "percent_star_in_a_mapping": "{{ '%(a)*d' % {'a': 1} }}",
    "percent_many_widths": "{{ (('%999999d' * 60000) % ((1,) * 60000))|length }}",
    "percent_many_values": "{% set x = 'x' * 6000000 %}{{ (('%s' * 1000) % ((x,) * 1000))|length }}",
    "percent_many_names": "{% set x = 'x' * 6000000 %}{{ (('%(a)s' * 1000) % {'a': x})|length }}",
    "percent_filter": "{{ ('%999999d' * 60000)|format(*([1] * 60000))|length }}",
    "format_width": "{{ '{:1000000000}'.format(1) }}",
    "format_nested_width": "{{ '{:{}}'.format(1, 10**9) }}",
    "format_nested_text_width": "{{ '{:{}}'.format('x', '>' ~ 10**9)|length }}",
    "format_named_width": "{{ '{:{w}}'.format('x', w=10**9)|length }}",
    "format_indexed_width": "{{ '{0:{1[0]}}'.format('x', [10**9])|length }}",
    "format_many_widths": "{{ ('{:999999}' * 60000).format(*([1] * 60000))|length }}",
    "format_many_values": "{% set x = 'x' * 6000000 %}{{ ('{0}' * 1000).format(x)|length }}",
    "format_map_values": "{% set x = 'x' * 6000000 %}{{ ('{a}' * 1000).format_map({'a': x})|length }}",
    "format_filter_width": "{{ '%1000000000s'|format('x')|length }}",
    "lipsum": "{{ lipsum(n=10**9) }}",
    "lipsum_words": "{{ lipsum(n=1, min=10**9, max=10**9 + 1) }}",
    "split": "{{ ('x ' * 6000000).split()|length }}",
    "characters": "{{ ('x' * 6000000)|list|length }}",
    "lists_in_a_list": "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, [0] * 6000000] %}"
    "{% endfor %}",
}


DOUBLED = (
    "{% set ns = namespace(x=[[1], [1]]) %}{% for i in range(60) %}"
    "{% set ns.x = [[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]] %}{% endfor %}{% set a, b = ns.x %}"
)
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
KEEP = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, VALUE] %}{% endfor %}"
LONG = "{% set x = 'x' * 30000000 %}{% set y = 'x' * 30000000 %}"

WITHIN_ONE_STEP = {
    **{
        f"doubled_{name}": DOUBLED + source
        for name, source in {
            "equal": "{{ a == b }}",
            "less": "{{ a < b }}",
            "within": "{{ a in [b] }}",
            "test": "{{ a is eq(b) }}",
            "select": "{{ [a]|select('eq', b)|list }}",
            "index": "{{ [b].index(a) }}",
            "count": "{{ [b].count(a) }}",
            "changed": "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}",
            "sort": "{{ [a, b]|sort }}",
            "max": "{{ [a, b]|max }}",
            "groupby": "{{ [{'k': a}, {'k': b}]|groupby('k') }}",
            "print": "{{ a }}",
            "concat": "{{ a ~ '' }}",
            "join": "{{ a|join }}",
            "percent": "{{ '%s' % (a,) }}",
            "percent_list": "{{ '%s' % a }}",
            "percent_name": "{{ '%(k)s' % {'k': a} }}",
            "format": "{{ '{}'.format(a) }}",
            "format_attribute": "{% for x in [a, 1] %}{{ '{0.previtem}'.format(loop) }}{% endfor %}",
            "upper": "{{ a|upper }}",
            "trim": "{{ a|trim }}",
            "pprint": "{{ a|pprint }}",
            "urlencode": "{{ a|urlencode }}",
            "escape": "{{ a|e }}",
            "namespace": "{{ ns }}",
            "view": "{{ {'k': a}.items() }}",
            "lower": "{{ a is lower }}",
            "raise": "{{ raise_exception(a) }}",
            "json": "{{ a|tojson }}",
        }.items()
    },
    **{
        f"hashed_{name}": TUPLES + source
        for name, source in {
            "display": "{{ {ns.x: 1} }}",
            "within": "{{ ns.x in {} }}",
            "unique": "{{ [ns.x]|unique|list }}",
            "get": "{{ {}.get(ns.x) }}{{ messages[0].get(ns.x) }}",
            "item": "{{ {}[ns.x] }}{{ messages[0][ns.x] }}",
            "dict": "{{ dict([(ns.x, 1)]) }}",
            "fromkeys": "{{ dict.fromkeys([ns.x]) }}",
            "filter": "{{ ns.x is filter }}",
            "deep": "{% for i in range(50000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
        }.items()
    },
    **{
        f"kept_{name}": KEEP.replace("VALUE", value)
        for name, value in {
            "centred": "'x'.center(6000000)",
            "wide": "'\U0001f600'.center(6000000, '\U0001f600')",
            "constants": "'x'|center(6000000)",
            "products": "'x' * 6000000",
            "mapped": "range(99999)|map('string')|map('center', 4000)|list",
            "lists": "[0] * 1900000",
            "slices": "([0] * 1900000)[1:]",
            "copies": "([0] * 1900000).copy()",
            "dicts": "dict.fromkeys(range(99999)).copy()",
            "sorted": "range(99999)|sort",
            "bytes": "('x' * 6000000).encode()",
            "bytes_products": "'x'.encode() * 6000000",
            "bytes_padded": "'x'.encode().ljust(6000000)",
            "formatted": "'%06000000d' % 1",
            "batches": "[1]|batch(1000000, 'x')|list",
            "slices_filled": "[1]|slice(100000, 'x')|list",
            "pieces": "('x ' * 900000).split()",
            "characters": "('x' * 900000)|list",
            "buffers": "(messages|string) * 2000",
        }.items()
    },
    "cut_over_runs": "{% set x = (messages[0].content[0] ~ 'a') * 500000 %}{% for i in range(9999) %}"
    "{% set y = x[i:] %}{% endfor %}",
    "wordwrap_long": "{{ ('x' * 1000000)|wordwrap(1)|length }}",
    "wordwrap_dashes": "{{ ('-' * 100000)|wordwrap(10)|length }}",
    "striptags": "{{ ('<!--' * 100000)|striptags|length }}",
    "urlize": "{{ ('a@' * 100000)|urlize|length }}",
    "pprint": "{{ ([[['x' * 90]]] * 100000)|pprint|length }}",
    "sum_of_lists": "{{ ([[0] * 100] * 10000)|sum(start=[])|length }}",
    "percent_parentheses": "{{ ('%(' * 400000)|format(a=1) }}",
    "percent_parentheses_operator": "{{ ('%(' * 400000) % {'a': 1} }}",
    "percent_nested_names": "{% set x = 'x' * 6000000 %}{{ ('%((a))s' * 100) % {'(a)': x} }}",
    "select_within_text": "{% set x = 'x' * 60000000 %}{{ range(99999)|map('string')|select('in', x)|list }}",
    "select_within_list": "{% set x = range(99999)|list %}{{ x|map('string')|select('in', x)|list|length }}",
    "filtered_rounds": "{% set x = range(99999)|list %}{% for a in x %}{% for b in x if false %}{% endfor %}"
    "{% endfor %}",
    "rounds_in_a_filter": "{% set x = range(99999)|list %}{% for a in x %}{% set y = x|select('none')|first %}"
    "{% endfor %}",
    "tower_of_generators": "{% set ns = namespace(x=range(99999)) %}{% for i in range(100) %}"
    "{% set ns.x = ns.x|select %}{% endfor %}{{ ns.x|list|length }}",
    "strip_characters": LONG + "{{ x.strip('y' ~ y)|length }}{{ x|trim('y' ~ y)|length }}",
    "search_backwards": LONG + "{{ x.rfind('y' ~ y[:300000]) }}",
    "split_backwards": LONG + "{{ x.rsplit('y' ~ y[:300000])|length }}",
    "sort_long_texts": LONG + "{{ ([x, y] * 1000)|sort|length }}",
    "unique_long_texts": LONG + "{{ ([x, y] * 1000)|unique|list|length }}",
    "compare_long_texts": LONG + "{% for i in range(9999) %}{% if x == y %}{% endif %}{% endfor %}",
    "codec": "{{ ('ü' * 100000).encode('punycode')|length }}",
    "to_bytes": "{{ (5).to_bytes(10**9, 'big')|length }}",
    "hexadecimal_number": "{{ (('f' * 30000000)|int(0, 16) // 3) is number }}",
    "number_from_bytes": "{{ ((5).from_bytes(('f' * 30000000).encode(), 'big') // 3) is number }}",
    "bytes_replaced": "{{ ('x' * 100000).encode().replace('x'.encode(), ('y' * 100000).encode())|length }}",
    "date": "{{ strftime_now('%Y' * 1000000)|length }}",
    "indented_json": "{{ [1]|tojson(indent=10**9) }}",
    "lists_added": "{% set x = [0] * 100000 %}{% for i in range(9999) %}{% set y = x + x %}{% endfor %}",
    "spans": "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].n }}x{% endfor %}{% endfor %}",
}


@functools.cache
def outcomes(apart: bool) -> dict[str, str]:
    """What became of each: all in one process of 2 GB, or those that would not end, each in one of its own of 4 GB."""
    templates = ENDLESS if apart else WITHIN_ONE_STEP
    done = subprocess.run(
        [sys.executable, "-c", RUN.replace("GB", "4" if apart else "2").replace("APART", str(apart))],
        input=json.dumps(templates),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    said = dict(map(json.loads, done.stdout.splitlines()))
    return {name: said.get(name, f"it died, or never came to it: {done.stderr[-2_000:]}") for name in templates}


@pytest.mark.parametrize("name", WITHIN_ONE_STEP)
def test_a_single_step_costs_what_it_touches(name: str) -> None:
    """Stopped by a count of ours, before the memory was full."""
    said = outcomes(apart=False)[name]
    if name == "percent_parentheses_operator":
        assert said.startswith(("limit", "error"))
    else:
        assert said.startswith("limit"), said
    assert "out of memory" not in said
    assert "seconds" not in said


@pytest.mark.parametrize("name", ENDLESS)
def test_templates_that_would_not_end(name: str) -> None:
    said = outcomes(apart=True)[name]
    assert said.startswith(("limit", "error")), said[:300]


def test_deep_nesting() -> None:
    for source in (
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
        "{{ " + "[" * 10_000 + "]" * 10_000 + " }}",
        "{% if true %}" * 5_000 + "{% endif %}" * 5_000,
        "{% for x in [1] %}" * 30 + "{% endfor %}" * 30,
        "{{ " + "-" * 20_000 + "1 }}",
        "{{ 1" + " + 1" * 50_000 + " }}",
        "{{ x" + ".x" * 20_000 + " }}",
    ):
        with contextlib.suppress(TemplateError):  # some of it does work
            ChatTemplate(source).render([{"role": "user", "content": "x"}])
    with pytest.raises(TemplateLimitError, match="nested too deeply"):
        ChatTemplate("{{ " + "[" * 10_000 + "]" * 10_000 + " }}")


def test_a_limit_names_the_message_and_the_line() -> None:
    source = "{% for m in messages %}\n{% if m.role == 'tool' %}\n{{ 'x' * 10**10 }}{% endif %}{% endfor %}"
    with pytest.raises(TemplateLimitError, match=r"^message 1: .*template line 3") as caught:
        ChatTemplate(source).render([{"role": "user", "content": "x"}, {"role": "tool", "content": "y"}])
    assert (caught.value.message, caught.value.line) == (1, 3)


DEAR_STEPS = [
    "{% set x = 'x' * 60000000 %}{% for i in range(99999) %}{% set y = x[1:] %}{% endfor %}",
    "{% set x = 'x' * 60000000 %}{% for i in range(99999) %}{% set y = x|upper %}{% endfor %}",
    "{% set x = 'x' * 60000000 %}{% for i in range(99999) %}{% if 'yy' in x %}{% endif %}{% endfor %}",
]


@pytest.mark.parametrize("source", DEAR_STEPS)
def test_few_but_dear_steps_are_stopped_by_the_clock(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline is moved close instead of waited for."""
    monkeypatch.setattr("tokentrace.template.budget.MAX_SECONDS", 0.2)
    with pytest.raises(TemplateLimitError, match=r"more than 0\.2 seconds"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_long_honest_conversations_render() -> None:
    """Templates do to each message what this one does, and pay for it once: nothing near a limit."""
    source = (
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{{ tools|tojson(indent=2) }}"
        "{% for m in messages if m.content %}<{{ m.role }}>"
        "{% if '</think>' in m.content %}{{ m.content.split('</think>')[-1].strip() }}{% else %}{{ m.content|trim }}"
        "{% endif %}{{ m.content is iterable }}{{ m.content|tojson }}{{ '%s' % m.content }}</{{ m.role }}>{% endfor %}"
    )
    turns = [{"role": role, "content": f" {role} " * 40} for _ in range(2_000) for role in ("user", "assistant")]
    result = [{"role": "tool", "content": "a line of a log\n" * 600_000}]
    tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"properties": {f"p{i}": {} for i in range(9)}}},
    }
    rendering = ChatTemplate(source).render([*turns, *result], wrap_tools([tool] * 200))
    assert len(rendering.text) > 25_000_000


def test_a_buffer_may_not_grow_without_bounds() -> None:
    source = "{% set x = 'x' * 30000000 %}{% set y %}{% for i in range(9) %}{{ x }}{% endfor %}{% endset %}"
    with pytest.raises(TemplateLimitError, match="characters"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "source",
    [
        "{% set a = 'ab ' * 20000000 %}{{ a|wordcount }}",
        "{% set n = namespace(l=()) %}{% for i in range(40000) %}{% set n.l = [n.l, ["
        + ", ".join(["[]"] * 1000)
        + "]] %}{% endfor %}",
        "{% set n = namespace(l=()) %}{% for i in range(99999) %}{% for j in range(99) %}"
        "{% set n.l = [n.l, {'a': i, 'b': i, 'c': i, 'd': i}] %}{% endfor %}{% endfor %}",
    ],
    ids=["words", "lists spelled out", "dicts spelled out"],
)
def test_what_a_round_makes_is_paid_for(source: str) -> None:
    with pytest.raises(TemplateLimitError):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize(
    "step",
    [
        "{% for x in messages[0].list %}{% break %}{% endfor %}",
        "{% for x in messages[0].list %}{{ loop.nextitem }}{% break %}{% endfor %}",
        "{% for k, v in messages[0].dict.items() %}{% break %}{% endfor %}",
        "{% for k, v in own.items() %}{{ loop.index }}{% break %}{% endfor %}",
        "{% set x = messages[0].list[1:] %}",
    ],
)
def test_entering_a_loop_and_cutting_a_list_are_paid_for(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokentrace.template.budget.MAX_MADE", 20_000_000)
    message = {"role": "user", "content": "x", "list": [1] * 20_000, "dict": dict.fromkeys(map(str, range(20_000)))}
    source = "{% set own = dict(messages[0].dict) %}{% for i in range(500) %}" + step + "{% endfor %}"
    with pytest.raises(TemplateLimitError, match=r"made more than 20000000 bytes"):
        ChatTemplate(source).render([message])


def test_entering_a_loop_makes_nothing_that_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    each = pairs._Inside.__iter__
    monkeypatch.setattr(pairs._Inside, "__iter__", lambda self: (asked.append(one[-1]) or one for one in each(self)))
    source = "{% for x in messages[0].list %}{{ x }}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}"
    assert ChatTemplate(source).render([{"role": "user", "content": "x", "list": [7] * 1000}]).text == "777"
    assert asked == [0, 1, 2]


def test_lines_are_counted_before_they_are_made() -> None:
    with pytest.raises(TemplateLimitError, match="pieces"):
        ChatTemplate("{{ ('a\\n' * 20000000).splitlines()|length }}{{ messages[0].content }}").render(
            [{"role": "user", "content": "x"}]
        )


def test_a_probe_that_runs_into_a_limit_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A template that loops only on probes would be run by each of them until its limit."""
    monkeypatch.setattr(budget, "MAX_STEPS", 1_000)
    loops = "{% if messages[0].content != 'a' %}{% for i in range(9999) %}{{ i }}{% endfor %}{% endif %}"
    source = "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}" + loops
    renderer = create_renderer(Tokenizer(tokenizer_json_for(source), fast=False), "default", chat_template=source)
    runs: list[int] = []
    render = ChatTemplate.render

    def counted(self: ChatTemplate, messages: Any, *args: Any, **options: Any) -> Any:
        runs.append(len(messages))
        return render(self, messages, *args, **options)

    monkeypatch.setattr(ChatTemplate, "render", counted)
    with pytest.raises(TemplateLimitError):
        renderer.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
    with pytest.raises(TemplateLimitError):
        renderer.get_stop_token_ids()
    assert len(runs) <= 3
