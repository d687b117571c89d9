"""The line and the condition that make renderings of synthetic templates differ."""

import pytest

from tests.diagnose.brute import audited, rendered, source_of
from tests.support import JINJA_FAMILIES, over_bytes
from tokentrace.diagnose.appends import TOOLS, Append, cases, turns
from tokentrace.diagnose.blame import SET, TEST, WRITE, Request, run_traced
from tokentrace.study.probes import USER

DIRECT = """{%- for message in messages %}
<|turn|>{{ message.role }}:
{%- if message.role == 'assistant' and message.reasoning_content and loop.last %}
[{{ message.reasoning_content }}]
{%- endif %}
{{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>assistant:{% endif %}"""

MACRO = """{%- macro shown(message, last) %}
{%- if last %}
[{{ message.reasoning_content }}]
{%- endif %}
{{- message.content }}
{%- endmacro %}
{%- for message in messages -%}
<|turn|>{{ message.role }}:{{ shown(message, loop.last and message.reasoning_content) }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>assistant:{% endif %}"""

BUILT = """{%- set ns = namespace(out='<|begin|>') %}
{%- for message in messages %}
{%- set ns.out = ns.out + '<|turn|>' + message.role + ':' %}
{%- if loop.index0 >= messages|length - 1 %}
{%- set ns.out = ns.out + '[' + (message.reasoning_content or '') + ']' %}
{%- endif %}
{%- set ns.out = ns.out + message.content + '<|end|>' %}
{%- endfor %}
{%- if add_generation_prompt %}
{%- set ns.out = ns.out + '<|turn|>assistant:' %}
{%- endif %}
{{- ns.out }}"""

ONE_LINE = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for message in messages %}<|turn|>{{ message.role }}:{% if loop.index0 > ns.last and "
    "message.reasoning_content %}[{{ message.reasoning_content }}]{% endif %}{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant:{% endif %}"
)

COUNTED = """{%- for message in messages -%}
<|turn|>{{ message.role }} {{ loop.revindex }}:{{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>assistant 0:{% endif %}"""

ESCAPED = (
    "{% for message in messages %}{{ '<|turn|>' }}{% if message.role == 'system' %}{{ 'These are instructions:\\n' }}"
    "{% endif %}{{ 'This is the message with the number\\n' + loop.revindex|string }}:{{ message.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>This is the message with the number\\n0:' }}{% endif %}"
)

LAST_TWO = """{%- for message in messages[-2:] -%}
<|turn|>{{ message.role }}:{{ message.content }}<|end|>
{%- endfor %}
{%- if add_generation_prompt %}<|turn|>assistant:{% endif %}"""


@pytest.mark.parametrize(
    ("source", "line", "condition"),
    [
        (DIRECT, 3, "loop.last"),
        (MACRO, 2, "last"),
        (BUILT, 4, "loop.index0 >= messages|length - 1"),
        (ONE_LINE, 1, "loop.index0 > ns.last"),
        (COUNTED, 2, ""),
        (ESCAPED, 1, ""),
        (LAST_TWO, 2, ""),
    ],
)
def test_a_condition_is_proven_or_the_line_that_writes_is_named(source: str, line: int, condition: str) -> None:
    cells = [one for one in audited(source).cells if one.append is Append.USER and one.turn.reasoning and one.breaks]
    (blame,) = (one.blame for one in cells[0].breaks if not one.at_turn)
    assert blame is not None
    assert blame.line == line
    part = "revindex" if source is ESCAPED else condition
    assert part in blame.source or source is ONE_LINE  # its text also stands elsewhere in the line
    assert blame.before is (True if condition else None)


@pytest.mark.parametrize("family", JINJA_FAMILIES)
def test_the_instrumented_copy_writes_what_transformers_writes(family: str) -> None:
    source = source_of(family)
    study = over_bytes(source).study()
    kinds = set()
    for turn in list(turns())[::5]:
        case = next(cases(turn, study))
        tools = TOOLS if case.tools else None
        run = run_traced(study, Request(case.messages, tools, True))
        assert (None if run is None else run.text) == rendered(source, case.messages, tools, True)
        kinds |= {event.part.kind for event in run.events} if run is not None else set()
    assert kinds == {TEST, SET, WRITE} or family == "gemma-3"  # which refuses tools


@pytest.mark.parametrize(
    "costly",
    [
        "{{ 'a' * 400000000 }}",
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(text='xx') %}{% for a in range(99) %}{% set ns.text = ns.text + ns.text %}{% endfor %}",
    ],
)
def test_a_forced_run_has_the_limits_of_a_render(costly: str) -> None:
    source = "{% if messages[9] is defined %}" + costly + "{% endif %}{{ messages[0].content }}"
    study = over_bytes(source).study()
    run = run_traced(study, Request([USER]))
    assert run is not None
    assert run.text == "question"
    assert run_traced(study, Request([USER]), forced={0: True}) is None
