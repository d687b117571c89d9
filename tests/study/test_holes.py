"""What a template does with held texts is known: with other texts that give the same answers it prints the same pieces.

The oracle is plain Jinja with transformers' settings.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.ext import LoopControlExtension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tokentrace.study.holes import Given, Made, Observed, Watched, observe

FOLLOWED = [
    "{{ a }}",
    "<{{ a | trim }}>{{ b.strip('x') }}",
    "{% if '</think>' in a %}{{ a.split('</think>')[-1].lstrip('\\n') }}{% else %}[{{ a }}]{% endif %}",
    "{% if a %}{{ a }}{% else %}empty{% endif %}{% if not b.strip() %}blank{% endif %}",
    "{% if a.startswith('<') and not (a.endswith('>')) %}{{ b }}{% endif %}{{ a }}",
    "{{ 'x' + a + 'y' ~ b ~ 1 }}{{ a ~ none }}",
    "{% macro m(t) %}({{ t | trim }}){% endmacro %}{% set s = m(a) %}{{ s }}{{ s | trim }}{{ m(s + b) }}",
    "{% set s %}{{ a }}!{% endset %}{{ s.strip() }}{{ s | length }}",
    "{% set ns = namespace(t='') %}{% for x in [a, b] %}{% set ns.t = ns.t + x %}{% endfor %}{{ ns.t }}",
    "{{ a | tojson }}{{ {'k': 1} | tojson }}",
    "{% if a == b %}same{% elif a == 'x' or b in ['x', 'y'] %}known{% endif %}{{ a }}",
    "{% if a is string and a is not mapping and a is sequence and a is defined and a is not none %}{{ a }}{% endif %}",
    "{{ [a, b] | join(', ') }}{{ [a, b] | map('trim') | join('') }}{{ ['p', 'q'] | join(a) }}",
    "{{ a[:2] }}{{ a[-1:] }}{{ a.upper() }}{{ a.replace('x', b) }}{{ a | default('n') }}{{ b | default('e', true) }}",
    "{% for part in a.split(' ') %}{{ loop.index }}{{ part }}{% endfor %}",
    "{% if a | length > 3 and a.count('x') == 1 and a.find('y') < 0 %}{{ a }}{% endif %}",
    "{% for x in [a, b] if x %}{% if loop.first %}{% continue %}{% endif %}{{ x }}{% endfor %}",
    "{% generation %}{{ a }}{% endgeneration %}{{ a.missing }}",
    "{% if (nothing | default(a)) | length > 3 %}long{% endif %}{{ nothing | default(b) }}",
    "{% if (nothing | default(a)) == b %}same{% endif %}{{ none | default(a, true) }}",
]
GIVEN_UP = [
    *("{% for letter in a %}{{ letter }}{% endfor %}", "{{ {'x': 1}[a] }}", "{{ {'x': 1}.get(a) }}", "{{ a | title }}"),
    *(
        "{{ '%s' | format(a) }}",
        "{{ '{}'.format(a) }}",
        "{{ '%s' % a }}",
        "{{ a * 2 }}",
        "{{ [a] }}",
        "{{ [a] | tojson }}",
    ),
    *("{{ a < b }}", "{{ [a, b] | sort | first }}", "{{ [a, b] | unique | list | length }}", "{{ a | reverse }}"),
    *("{{ a | int }}", "{{ 'x'.join([a]) }}", "{{ a | tojson(indent=2) }}", "{{ raise_exception(a) }}"),
    *(
        "{{ a.encode() }}",
        "{{ a.isdigit is defined }}",
        "{{ a | list }}",
        "{{ a in 'xyz' }}",
        "{{ a is lower }}",
        "{{ a | e }}",
        "{{ a | wordcount }}",
    ),
]
TEXTS = st.text(alphabet='xyX <>\n\\"é', max_size=6) | st.sampled_from(
    ["</think>", "x</think>\ny", " x ", "x y", "abcd"]
)


def plain(source: str, texts: list[str]) -> str | None:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    source = source.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    try:
        return environment.from_string(source).render(a=texts[0], b=texts[1])
    except Exception:
        return None


def held(source: str, texts: list[str]) -> Observed | None:
    def conversation(hold: Any) -> Any:
        variables.update(a=hold(0, texts[0]), b=hold(1, texts[1]))
        return []

    variables: dict[str, Any] = {}
    wrapped = "{% set a = given.a %}{% set b = given.b %}" + source
    return observe(wrapped, conversation, {"given": variables})


def holds(observed: Observed, texts: list[str]) -> bool:
    return all(recipe.of(texts) == answer for recipe, answer in observed.asked)


def filled(observed: Observed, texts: list[str]) -> str:
    return "".join(text if recipe is None else recipe.of(texts) for text, recipe in observed.pieces)


@pytest.mark.parametrize("source", FOLLOWED)
def test_texts_that_give_the_same_answers_are_printed_in_the_same_places(source: str) -> None:
    agreed = 0

    @settings(max_examples=60, deadline=None, database=None, derandomize=True)
    @given(st.tuples(TEXTS, TEXTS), st.tuples(TEXTS, TEXTS))
    def law(one: tuple[str, str], other: tuple[str, str]) -> None:
        nonlocal agreed
        observed = held(source, list(one))
        if observed is None:
            return
        assert "".join(text for text, _ in observed.pieces) == plain(source, list(one))
        for texts in (list(one), list(other)):
            try:
                same = holds(observed, texts)
            except (LookupError, ValueError):
                same = False
            if same:
                agreed += 1
                assert filled(observed, texts) == plain(source, texts)
            assert same or texts == list(other)

    law()
    assert agreed > 30


@pytest.mark.parametrize("source", GIVEN_UP)
def test_what_cannot_be_followed_gives_nothing(source: str) -> None:
    assert held(source, ["x y", "z"]) is None


def test_an_error_on_the_way_is_not_followed() -> None:
    assert held("{{ a[0] }}", ["x", ""]) is not None
    assert held("{{ a[0] }}", ["", ""]) is None


def test_questions_are_kept_with_their_answers() -> None:
    observed = held("{% if '<' in a %}1{% endif %}{{ a | trim }}", [" x", ""])
    assert observed is not None
    assert [(answer, recipe.of(["<", ""])) for recipe, answer in observed.asked] == [(False, True)]
    assert observed.pieces == ((("x", Made(str.strip, (Given(0), None))),))
    assert holds(observed, ["other ", ""])
    assert not holds(observed, ["<", ""])


def test_the_date_is_not_taken_for_a_constant() -> None:
    observed = held("{{ strftime_now('%Y') }}{{ a }}", ["x", ""])
    assert observed is not None
    assert [recipe for _, recipe in observed.pieces] == [Given(-1), Given(0)]


@pytest.mark.parametrize(
    ("source", "read"),
    [
        ("{{ messages[0].content }}", {"content"}),
        ("{% if messages[0].name is defined %}{{ messages[0]['name'] }}{% endif %}", {"name"}),
        ("{% if 'name' in messages[0] or messages[0].get('id') %}x{% endif %}", {"name", "id"}),
        ("{% for m in messages if m.role == 'x' %}{{ m.name }}{% endfor %}", {"role"}),
        ("{{ messages | map(attribute='name') | list | length }}", {"name"}),
    ],
)
def test_fields_that_are_looked_up_are_known_also_where_there_are_none(source: str, read: set[str]) -> None:
    seen: set[tuple[int, str]] = set()
    message = Watched({"role": "tool", "content": "x"}, 7, seen)
    assert observe(source, lambda _: [message], {}) is not None
    assert seen == {(7, name) for name in read}


@pytest.mark.parametrize(
    "source",
    [
        "{% for key in messages[0] %}x{% endfor %}",
        "{{ messages[0] }}",
        "{{ messages[0] | tojson }}",
        "{{ messages[0] | length }}",
        "{{ messages[0].items() | list | length }}",
        "{% if messages[0] == {} %}x{% endif %}",
    ],
)
def test_a_message_as_a_whole_is_not_followed(source: str) -> None:
    assert observe(source, lambda _: [Watched({"role": "tool", "content": "x"}, 0, set())], {}) is None
