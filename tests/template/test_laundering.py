"""No template launders user text into scaffold: letters that no snippet uses have their field's origin, or none."""

from typing import Any

import pytest

from tests.support import byte_tokenizer_json
from tokentrace import InputError, create_renderer
from tokentrace.template import KEY, UNKNOWN, ChatTemplate, Rendering, wrap_tools, wrap_variables
from tokentrace.tokens import Tokenizer

CONTENT = "λόγος Ωμέγα\nψυχή"
GREEK = frozenset(CONTENT + CONTENT.upper() + CONTENT.lower() + CONTENT.title()) - frozenset(" \n")
MESSAGES = [
    {"role": "user", "content": CONTENT, "number": 955},
    {
        **{"role": "user", "content": [{"type": "text", "text": CONTENT}]},
        **{"tags": {CONTENT: 1, "inner": {"deep": CONTENT}}, "last": {CONTENT: 1}},
    },
]
ORIGIN = ("messages", 0, "content")


TOOLS = wrap_tools([{"name": "f", "description": CONTENT, "parameters": {"properties": {CONTENT: {}}}}])


def render(source: str, **variables: Any) -> Rendering:
    setup = "{%- set m = messages[0] -%}{%- set c = m.content -%}"
    return ChatTemplate(setup + source).render(MESSAGES, TOOLS, variables=wrap_variables(variables))


EXACT = {
    "alone": "{{ c }}",
    "concat": "{{ '<' ~ c ~ '>' }}",
    "sum": "{{ '<' + c + '>' }}",
    "product": "{{ c * 2 }}{{ 2 * c }}",
    "join": "{{ ', '.join([c, 'x', c]) }}",
    "join_filter": "{{ [c, 'x']|join('-') }}",
    "join_on_content": "{{ ['a', 'b']|join(c) }}{{ c.join(['a', 'b']) }}",
    "join_of_constant": "{{ 'abc'|join(c) }}",
    "replace_in_constant": "{{ 'ab'.replace('a', c) }}",
    "replace_filter_in_constant": "{{ 'ab'|replace('a', c) }}",
    "replace_filter_block": "{% filter replace('a', messages[0].content) %}ab{% endfilter %}",
    "percent": "{{ '%s' % c }}{{ '<%s|%s>' % (c, 1) }}",
    "percent_filter": "{{ '<%s>'|format(c) }}",
    "str_format": "{{ '{}'.format(c) }}{{ '<{0}{x}>'.format(c, x=c) }}",
    "characters": "{{ c|list|join }}{% for x in c %}{{ x }}{% endfor %}",
    "reversed_twice": "{{ c[::-1][::-1] }}{{ c|reverse|reverse }}",
    "slices": "{{ c[1:] ~ c[0] ~ c[::2] ~ c[-3] }}",
    "case": "{{ c.upper() }}{{ c|lower }}{{ c.title() }}{{ c|capitalize }}{{ c.swapcase() }}{{ c.casefold() }}",
    "strip": "{{ c.strip() }}{{ c|trim }}{{ (' ' ~ c ~ ' ').strip() }}{{ c.rstrip('x') }}",
    "split": "{{ c.split()|join }}{{ c.split(' ')[1] }}{{ c.rsplit('\\n', 1)|last }}"
    "{{ c.splitlines()[0] }}{{ c.partition(' ')[2] }}",
    "string": "{{ c|string }}{{ c|safe }}{{ c|string|safe|string }}",
    "safe": "{{ (c|safe) + 'x' }}{{ 'x' + (c|safe) }}{{ (c|safe) ~ 'x' }}{{ (c|safe) * 2 }}{{ (c|safe)[1:] }}",
    "safe_joined": "{{ [c|safe]|join }}{{ [c|safe, 'x']|join(',') }}{{ ', '.join([c|safe]) }}{{ 'x'.join(c|safe) }}",
    "safe_replacing": "{{ 'x'.replace('x', c|safe) }}{{ 'x'|replace('x', c|safe) }}{{ (c|safe)|list|join }}",
    "safe_formatted": "{{ '%s' % (c|safe) }}{{ '{}'.format(c|safe) }}{{ '%s'|format(c|safe) }}{{ (c|safe)|tojson }}",
    "safe_in_buffers": "{% set x %}{{ c|safe }}{% endset %}{{ x }}{% macro f(x) %}{{ x }}{% endmacro %}{{ f(c|safe) }}",
    "default": "{{ nope|default(c) }}{{ nope or c }}{{ c and c }}{{ c if true }}",
    "set": "{% set x = c %}{{ x }}{% set x %}a{{ c }}b{% endset %}{{ x }}{{ x|upper }}",
    "filter_block": "{% filter upper %}{{ c }}{% endfilter %}",
    "namespace": "{% set ns = namespace(x='') %}{% for m in messages %}{% set ns.x = ns.x ~ c %}"
    "{% endfor %}{{ ns.x }}{{ ns['x'] }}",
    "macro": "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(c) }}{{ f(f(c)) }}{% set y = f(c) %}{{ y[1:-1] }}",
    "macro_varargs": "{% macro f() %}{{ varargs[0] }}{{ kwargs.k }}{% endmacro %}{{ f(c, k=c) }}",
    "caller": "{% macro f() %}[{{ caller(c) }}]{% endmacro %}{% call(x) f() %}{{ x }}{{ c }}{% endcall %}",
    "recursive_loop": "{% for x in [[c], c] recursive %}{{ x if x is string else loop(x) }}{% endfor %}",
    "generation": "{% generation %}{{ c }}{% endgeneration %}",
    "generation_in_a_buffer": "{% set x %}{% generation %}{{ c }}{% endgeneration %}{% endset %}{{ x }}",
    "generation_in_a_macro": "{% macro f(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}"
    "{{ f(c) }}{{ f(c)|upper }}",
    "generation_nested": "{% generation %}{% generation %}{{ c }}{% endgeneration %}{% endgeneration %}",
    "joiner": "{% set j = joiner(c) %}{{ j() }}{{ j() }}",
    "cycler": "{% set y = cycler('a', c) %}{{ y.next() }}{{ y.next() }}{{ y.current }}",
    "changed": "{% for x in [c] %}{{ loop.previtem or x }}{{ loop.nextitem }}{% endfor %}",
    "dict_value": "{{ {'a': c}.a }}{{ dict(a=c)['a'] }}{{ dict(m).content }}{{ m.get('content') }}{{ m['content'] }}",
    "dict_key": "{% for k in {c: 1} %}{{ k }}{% endfor %}{{ {c: 1}|list|first }}{{ {c: 1}.keys()|first }}",
    "built_dicts": "{{ {'a': c}|items|list|last|last }}{{ ({'a': c}|dictsort)[0][1] }}{{ {'a': {'b': c}}['a']['b'] }}",
    "aggregates": "{{ [c, 'a']|max }}{{ [c]|min }}{{ [c]|first }}{{ [c]|last }}{{ [c]|random }}"
    "{{ [c]|sort|first }}{{ [c]|unique|first }}",
    "groups": "{{ [c, 'x']|batch(1)|first|first }}{{ [c]|slice(1)|first|first }}"
    "{{ [{'k': c}]|groupby('k')|first|first }}",
    "map": "{{ [c]|map('upper')|first }}{{ [m]|map(attribute='content')|first }}"
    "{{ [c]|select('string')|first }}{{ [c]|reject('none')|join }}",
    "map_default": "{{ [m]|map(attribute='nope', default=messages[0].content)|first }}",
    "tojson": "{{ c|tojson }}{{ [c]|tojson }}{{ {'k': c, c: 1}|tojson(indent=2) }}{{ (c ~ '\"')|tojson }}",
    "tojson_sliced": "{{ (c|tojson)[1:-1] }}{{ ([c]|tojson)[2:-2].replace('\\\\n', '\\n') }}"
    "{{ (m|tojson).split('content')[1][4:9] }}",
    "removed_affixes": "{{ c.removeprefix('x') }}{{ ('a' ~ c).removeprefix('a') }}{{ (c ~ 'a').removesuffix('a') }}",
    "unpacking": "{% set x, y = [c, 1] %}{{ x }}{% for x, y in [(c, 1)] %}{{ x }}{% endfor %}",
    "methods_in_variables": "{% set f = c.upper %}{{ f() }}{% set g = ', '.join %}{{ g([c]) }}"
    "{% set r = 'a'.replace %}{{ r('a', c) }}",
    "formatter_in_a_variable": "{% set f = '{}'.format %}{{ f(c) }}",
    "attr": "{{ (c|attr('strip'))() }}",
    "with": "{% with x = c %}{{ x }}{% endwith %}",
    "conditional": "{{ (c if c else 'a') ~ '' }}{{ [c, 'a'][0] }}{{ (c, 1)[0] }}",
    "raise_and_back": "{{ [c]|sum(start=[]) if false else c }}",
}

LOSSY = {
    "replace_empty": "{{ 'ab'.replace('', c) }}",
    "padding": "{{ c.center(40) }}{{ c.ljust(40, '.') }}{{ c.rjust(40) }}{{ c.zfill(40) }}{{ c|center(60) }}",
    "fill": "{{ 'x'.center(9, c[0]) }}{{ 'x'.ljust(9, c[0]) }}{{ 'x'.rjust(9, c[0]) }}",
    "indent": "{{ c|indent(2) }}{{ 'a\\nb'|indent(c) }}{{ 'a\\nb'|indent(c, true) }}",
    "truncate": "{{ c|truncate(9, true, '', 0) }}{{ 'abcdefghij'|truncate(3, true, c[:2], 0) }}",
    "translate": "{{ 'a'.translate({97: c}) }}",
    "expandtabs": "{{ (c ~ '\\t').expandtabs() }}",
    "safe_in_variables": "{% set f = (c|safe).upper %}{{ f() }}{% set g = (c|safe).split %}{{ g()|join }}",
    "safe_looped": "{% for x in c|safe %}{{ x }}{% endfor %}{% for x in (c|safe).split() %}{{ x }}{% endfor %}",
    "safe_cased": "{{ (c|safe).upper() }}{{ (c|safe)|title }}{{ (c|safe)|trim }}{{ (c|safe).strip().lower() }}",
    "cycle": "{% for x in [1, 2] %}{{ loop.cycle('a', c) }}{% endfor %}",
    "code_point_percent": "{{ '%c' % m.number }}{{ '%c' % (m.number + 0) }}{{ '%c' % c[0] }}",
    "code_point_format": "{{ '{:c}'.format(m.number) }}{{ '{:c}'.format(m.number + 0) }}",
    "code_point_mapping": "{{ '%(x)c' % {'x': m.number + 0} }}{{ '{x:>5c}'.format(x=m.number + 0) }}",
    "code_point_filter": "{{ '%c'|format(m.number + 0) }}{{ '%5c'|format(m.number + 0) }}",
    "maketrans": "{{ 'a'.translate('a'.maketrans('a', c[0])) }}{{ 'a'.translate(''.maketrans({'a': c})) }}",
    "translate_number": "{{ 'a'.translate({97: m.number}) }}{{ 'a'.translate({97: m.number + 0}) }}",
    "format_map": "{{ '{x}'.format_map({'x': c}) }}{{ '{0[x]}'.format({'x': c}) }}{{ '{0.content}'.format(m) }}",
    "format_spec": "{{ '{:>50}'.format(c) }}{{ '{!s}'.format(c) }}{{ '{:{x}}'.format('a', x=c[0] ~ '>9') }}",
    "percent_spec": "{{ '%50s' % c }}{{ '%r' % c }}{{ '%(k)s' % {'k': c} }}",
    "percent_traced_template": "{{ c % () }}{{ (c ~ '%s') % 'a' }}",
    "format_traced_template": "{{ c.format() }}{{ (c ~ '{}').format('a') }}",
    "escape": "{{ c|e }}{{ c|escape|string }}{{ c|forceescape }}{{ c|escape|safe }}{{ (c|e) ~ '' }}{{ (c|e) + '' }}",
    "safe_methods": "{{ (c|safe).join(['a', 'b']) }}{{ ('x'|safe).replace('x', c) }}{{ ('%s'|safe) % c }}"
    "{{ ('{}'|safe).format(c) }}{{ ('x'|safe) + c }}{{ c + ('x'|safe) }}{{ ('x'|e) ~ c }}{{ (', '|safe).join([c]) }}",
    "escaped_methods": "{{ (c|e).split()[0] }}{{ (c|e)[1:] }}{{ (c|e).upper() }}{{ c|e|list|join }}",
    "markup_methods": "{{ (c|safe).unescape() }}{{ (c|safe).striptags() }}{{ ('x'|safe).center(9, c[0]) }}",
    "xmlattr": "{{ {'a': c}|xmlattr }}{{ {'a': c}|xmlattr|string|trim }}",
    "urlize": "{{ c|urlize }}{{ c|striptags }}{{ c|wordwrap(3) }}{{ c|pprint }}",
    "wordwrap": "{{ 'aaaa bbbb'|wordwrap(4, wrapstring=c) }}",
    "lists": "{{ [c] }}{{ [c]|string }}{{ (c,) }}{{ {'a': c} }}{{ {'a': c}|string }}{{ [c] ~ '' }}{{ [[c]] }}",
    "views": "{{ {'a': c}.values() }}{{ {'a': c}.items() }}{{ {c: 1}.keys() }}{{ m.items()|list|string }}",
    "objects": "{{ namespace(x=c) }}{{ dict(a=c) }}{{ [c]|map('upper')|list }}",
    "undefined": "{{ {'a': c}.nope }}{{ c.nope }}",
    "join_of_lists": "{{ [[c]]|join }}{{ [{'a': c}]|join(',') }}",
    "replace_with_a_list": "{{ 'a'|replace('a', [c]) }}",
    "print_of_a_method": "{{ [c.upper]|string }}",
    "percent_of_list": "{{ '%s' % [[c]] }}{{ '{}'.format([c]) }}",
    "strftime": "{{ strftime_now(c) }}",
    "json_options": "{{ [1, 2]|tojson(separators=(c|safe, ':')) }}{{ {'a': 2}|tojson(separators=(',', c|e)) }}"
    "{{ [1]|tojson(indent=c|safe) }}",
}


@pytest.mark.parametrize("name", [*EXACT, *LOSSY])
def test_text_is_credited_to_its_field_or_of_unknown_origin(name: str) -> None:
    rendering = render((EXACT | LOSSY)[name])
    assert GREEK & set(rendering.text) or name == "undefined"
    for text, _, origin in rendering.spans():
        if GREEK & set(text) or origin is not None:
            assert origin in {ORIGIN, ("messages", 0) if name in EXACT else UNKNOWN}, f"{text!r}, {origin}"


@pytest.mark.parametrize(
    ("source", "origins"),
    [
        (
            "{{ messages[1].tags|tojson }}",
            {("messages", 1, "tags", CONTENT, KEY), ("messages", 1, "tags", "inner", "deep")},
        ),
        ("{% for k, v in messages[1].tags.items() %}{{ k }}{{ v.deep }}{% endfor %}", None),
        ("{{ messages[1].tags }}", {("messages", 1, "tags")}),
        ("{{ messages[1].tags ~ '' }}", {("messages", 1, "tags")}),
        ("{{ messages[1].tags|list|join }}", {("messages", 1, "tags", CONTENT, KEY)}),
        ("{% for k in messages[1].tags|reverse %}{{ k }}{% endfor %}", {("messages", 1, "tags", CONTENT, KEY)}),
        ("{{ messages[1].last|last }}", {("messages", 1, "last", CONTENT, KEY)}),
        ("{{ messages[1].content }}", {("messages", 1, "content")}),
        ("{{ messages[1].content[0].text }}", {("messages", 1, "content", 0, "text")}),
        ("{{ messages[1] }}", {("messages", 1)}),
        ("{{ messages }}", {("messages",)}),
        ("{{ messages|string }}", {("messages",)}),
        ("{{ kwarg }}{{ kwarg|upper }}", {("kwargs", "kwarg")}),
        ("{{ documents[0].text }}", {("kwargs", "documents", 0, "text")}),
        ("{{ tools }}", {("tools",)}),
        ("{{ tools[0].description }}", {("tools", 0, "description")}),
        (
            "{% for k in tools[0].parameters.properties %}{{ k }}{% endfor %}",
            {("tools", 0, "parameters", "properties", CONTENT, KEY)},
        ),
        ("{{ tools|tojson }}", {("tools",)}),
    ],
)
def test_containers(source: str, origins: set[Any] | None) -> None:
    rendering = render(source, kwarg=CONTENT, documents=[{"text": CONTENT}])
    credited = {origin for text, _, origin in rendering.spans() if GREEK & set(text)}
    assert credited == origins if origins else None not in credited


@pytest.mark.parametrize(
    "source",
    [
        *("{{ messages }}", "{{ messages|tojson }}", "{{ messages[0] }}", "{{ tools }}"),
        *(
            f"{{% set c = messages[0].content %}}{LOSSY[name]}"
            for name in ("padding", "escape", "lists", "percent_spec")
        ),
    ],
)
def test_text_of_unknown_origin_forges_nothing(source: str) -> None:
    tokenizer = Tokenizer(byte_tokenizer_json([CONTENT, CONTENT[:2]]), fast=False)
    renderer = create_renderer(tokenizer, "default", chat_template=source)
    rendered = renderer.render(MESSAGES, tools=[{"name": "f", "description": CONTENT}])
    assert len(rendered.fields) == len(rendered.ids) > 0
    assert not rendered.control.any()
    with pytest.raises(InputError):
        create_renderer(tokenizer, "default", chat_template=source, control_tokens="reject", trusted=()).render(
            [{"role": "user", "content": CONTENT[:2]}], tools=[{"name": "f", "description": CONTENT[:2]}]
        )


@pytest.mark.parametrize("left", ["1.0 *", "true *", "true +", "2.0 -", "9.0 //", "9 /", "2.0 **", "7 %"])
def test_a_computed_number_is_of_unknown_origin(left: str) -> None:
    template = ChatTemplate("{{ " + left + " messages[0].number }}")
    assert [origin for _, _, origin in template.render([{"role": "user", "number": 3}]).spans()] == [UNKNOWN]
