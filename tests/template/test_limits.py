"""A template that would never end, or fill the memory, is stopped with an error, in a process with little memory."""

import contextlib
import functools
import json
import subprocess
import sys
import textwrap

import pytest

from tests.support import rotating
from tokentrace import TemplateError
from tokentrace.errors import TemplateLimitError
from tokentrace.template import ChatTemplate, budget, wrap_tools

RUN = textwrap.dedent(
    """
    import gc, json, os, resource, sys
    resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
    from tokentrace import TemplateError
    from tokentrace.errors import TemplateLimitError
    from tokentrace.template import ChatTemplate
    from tokentrace.template import budget
    budget.MAX_STEPS, budget.MAX_SECONDS, budget.MAX_BYTES = 50_000, 1, 1 << 27
    messages = [{"role": "user", "content": "x" * 1_000, "n": 9}] * 3

    def outcome(source):
        try:
            return f"rendered {len(ChatTemplate(source).render(messages).text)}"
        except TemplateLimitError as error:
            return f"limit {error}"
        except TemplateError as error:
            return f"error {error}"

    for name, source in json.load(sys.stdin).items():
        child = os.fork()
        if not child:
            print(json.dumps([name, outcome(source)]), flush=True)
            os._exit(0)
        os.waitpid(child, 0)
    """
)
"""Runs templates one after another, each in a forked child, which has its imports loaded."""

GROW = "{% set ns = namespace(x=START) %}{% for i in range(200) %}{% set ns.x = STEP %}{% endfor %}{{ ns.x|length }}"
KEEP = "{% set ns = namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, VALUE] %}{% endfor %}"
DOUBLED = (
    "{% set ns = namespace(x=[[1], [1]]) %}{% for i in range(60) %}"
    "{% set ns.x = [[ns.x[0], ns.x[0]], [ns.x[1], ns.x[1]]] %}{% endfor %}{% set a, b = ns.x %}"
)
TUPLES = "{% set ns = namespace(x=(1,)) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
LONG = "{% set x = 'x' * 30000000 %}{% set y = 'x' * 30000000 %}"

LOOPS = [
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% set x = range(99999)|list %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "{% set x = range(99999)|list %}{% for a in x %}{% set y = x|select('none')|first %}{% endfor %}",
    "{% set ns = namespace(x=range(99999)) %}{% for i in range(100) %}{% set ns.x = ns.x|select %}{% endfor %}"
    "{{ ns.x|list|length }}",
    "{% set x = 'x' * 60000000 %}{{ range(99999)|map('string')|select('in', x)|list }}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{% call f() %}{{ caller() }}{% endcall %}{% endmacro %}{% call f() %}x{% endcall %}",
    "{% for x in [60] recursive %}{% if x %}{{ loop([x - 1, x - 1]) }}{% endif %}{% endfor %}",
    "{% for a in range(99999) %}{{ messages[0].content * 1000 }}{% endfor %}",
    "{% set x %}{% for a in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{{ messages[0].n }}x{% endfor %}{% endfor %}",
    LONG + "{% for i in range(9999) %}{% if x == y %}{% endif %}{% endfor %}",
]
TOO_LARGE = [
    *("{{ 'x' * 10**10 }}", "{{ 10**9 * messages[0].content }}", "{{ ([1] * 10**10)|length }}", "{{ 10**(10**10) }}"),
    *("{{ (messages * 10**10)|length }}", "{{ messages[0].n ** (10**9) }}", "{{ 'x'|center(10**9) }}"),
    *("{{ 'x'.center(10**10)|length }}", "{{ messages[0].content.ljust(10**10) }}", "{{ '1'.zfill(10**10)|length }}"),
    *("{{ '\t'.expandtabs(10**10)|length }}", "{{ ('x' * 100000)|replace('x', 'y' * 100000)|length }}"),
    *("{{ ('x' * 100000).translate({120: 'y' * 100000}) }}", "{{ ('x' * 100000)|join('y' * 100000)|length }}"),
    *("{{ 'x\ny'|indent(10**10) }}", "{{ [1]|tojson(indent=10**10) }}", "{{ 'x'|slice(10**9)|list|length }}"),
    *("{{ 'x'|batch(10**9, 'y')|list|length }}", "{{ 1.5|round(10**9, 'ceil') }}", "{{ range(10**9)|list|length }}"),
    *("{{ '%1000000000d' % 1 }}", "{{ '%.1000000000f' % 1 }}", "{{ '%*d' % (10**9, 1) }}"),
    *("{{ (('%999999d' * 60000) % ((1,) * 60000))|length }}", "{{ '{:1000000000}'.format(1) }}"),
    *("{{ '{:{}}'.format('x', '>' ~ 10**9)|length }}", "{{ ('{:999999}' * 60000).format(*([1] * 60000))|length }}"),
    "{% set x = 'x' * 6000000 %}{{ (('%s' * 1000) % ((x,) * 1000))|length }}",
    "{% set x = 'x' * 6000000 %}{{ (('%(a)s' * 1000) % {'a': x})|length }}",
    "{% set x = 'x' * 6000000 %}{{ ('{0}' * 1000).format(x)|length }}",
    "{{ ('%(' * 400000)|format(a=1) }}",
    *(
        "{{ ('x ' * 6000000).split()|length }}",
        "{{ ('x' * 6000000)|list|length }}",
        "{{ strftime_now('%Y' * 1000000) }}",
    ),
    *("{{ (5).to_bytes(10**9, 'big') }}", "{{ ('ü' * 100000).encode('punycode')|length }}"),
    *("{{ ('-' * 100000)|wordwrap(10)|length }}", "{{ ('<!--' * 100000)|striptags|length }}"),
    *("{{ ('a@' * 100000)|urlize|length }}", "{{ ([[['x' * 90]]] * 100000)|pprint|length }}"),
    *("{{ ([[0] * 100] * 10000)|sum(start=[])|length }}", "{{ ('x' * 1000000)|wordwrap(1, wrapstring='y' * 100000) }}"),
    *(LONG + "{{ x.strip('y' ~ y)|length }}", LONG + "{{ x.rfind('y' ~ y[:300000]) }}"),
    *(LONG + "{{ x.rsplit('y' ~ y[:300000])|length }}", LONG + "{{ ([x, y] * 1000)|sort|length }}"),
]
GROWING = {
    "99": ["ns.x * ns.x"],
    "'x'": [
        *("ns.x + ns.x", "ns.x ~ ns.x", "[ns.x, ns.x]|join", "ns.x.join([ns.x, ns.x])", "'{0}{0}'.format(ns.x)"),
        *("'%s%s' % (ns.x, ns.x)", "'%s%s'|format(ns.x, ns.x)", "(ns.x ~ 'x')|replace('x', ns.x)"),
    ],
    "[1]": ["ns.x + ns.x", "[ns.x, ns.x]|sum(start=[])"],
    "(1,)": ["ns.x + ns.x"],
    "messages": ["ns.x + ns.x"],
}
KEPT = [
    *("'x'.center(6000000)", "'x' * 6000000", "range(99999)|map('string')|map('center', 4000)|list", "[0] * 1900000"),
    *("([0] * 1900000)[1:]", "([0] * 1900000).copy()", "dict.fromkeys(range(99999)).copy()", "range(99999)|sort"),
    *("'%06000000d' % 1", "('x ' * 900000).split()", "('x' * 900000)|list", "(messages|string) * 2000"),
    "[" + ", ".join(["[]"] * 1000) + "]",
]
SHARED = [
    *("{{ a == b }}", "{{ a < b }}", "{{ a in [b] }}", "{{ a is eq(b) }}", "{{ [a]|select('eq', b)|list }}"),
    *("{{ [b].index(a) }}", "{% for x in [a, b] %}{{ loop.changed(x) }}{% endfor %}", "{{ [a, b]|sort }}", "{{ a }}"),
    *("{{ [{'k': a}, {'k': b}]|groupby('k') }}", "{{ a ~ '' }}", "{{ '%s' % (a,) }}", "{{ '%(k)s' % {'k': a} }}"),
    *("{{ '{}'.format(a) }}", "{{ a|upper }}", "{{ a|pprint }}", "{{ a|urlencode }}", "{{ ns }}", "{{ a is lower }}"),
    *("{{ {'k': a}.items() }}", "{{ raise_exception(a) }}", "{{ a|tojson }}"),
]
HASHED = [
    *("{{ {ns.x: 1} }}", "{{ ns.x in {} }}", "{{ [ns.x]|unique|list }}", "{{ {}.get(ns.x) }}", "{{ {}[ns.x] }}"),
    *("{{ messages[0].get(ns.x) }}", "{{ dict([(ns.x, 1)]) }}", "{{ dict.fromkeys([ns.x]) }}", "{{ ns.x is filter }}"),
    "{% for i in range(50000) %}{% set ns.x = (ns.x,) %}{% endfor %}{{ {ns.x: 1} }}",
]
ALL_ENDLESS = [
    *LOOPS,
    *TOO_LARGE,
    *(GROW.replace("START", start).replace("STEP", step) for start, steps in GROWING.items() for step in steps),
    GROW.replace("START", "[]").replace("STEP", "[ns.x, ns.x]").replace("|length", "|string|length"),
    *(KEEP.replace("VALUE", value) for value in KEPT),
    *(DOUBLED + use for use in SHARED),
    *(TUPLES + use for use in HASHED),
]
ENDLESS = rotating(ALL_ENDLESS, "", 3)


@functools.cache
def outcomes() -> dict[str, str]:
    completed = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps({source: source for source in ENDLESS}),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    results = dict(map(json.loads, completed.stdout.splitlines()))
    return {source: results.get(source, f"it died: {completed.stderr[-2_000:]}") for source in ENDLESS}


@pytest.mark.parametrize("source", ENDLESS, ids=[source[-60:] for source in ENDLESS])
def test_templates_that_would_not_end(source: str) -> None:
    outcome = outcomes()[source]
    assert outcome.startswith(("limit", "error")), outcome[:300]
    assert "out of memory" not in outcome


def test_deep_nesting() -> None:
    for source in (
        "{{ " + "(" * 10_000 + "1" + ")" * 10_000 + " }}",
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


@pytest.mark.parametrize("step", ["{% set y = x[1:] %}", "{% set y = x|upper %}", "{% if 'yy' in x %}{% endif %}"])
def test_few_but_slow_steps_are_stopped_by_the_clock(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a short deadline, so that the test need not wait."""
    monkeypatch.setattr(budget, "MAX_SECONDS", 0.2)
    monkeypatch.setattr(budget, "MAX_BYTES", 1 << 50)
    source = "{% set x = 'x' * 60000000 %}{% for i in range(99999) %}" + step + "{% endfor %}"
    with pytest.raises(TemplateLimitError, match=r"more than 0\.2 seconds"):
        ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_long_honest_conversations_render() -> None:
    """The operations that templates apply to each message stay far from the limits in a long conversation."""
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
