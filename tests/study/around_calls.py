"""More of `cases`: what stands around calls, and calls that are not understood."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.conversations import assistant
from tests.study.pieces import (
    ARGUMENTS,
    BESIDE,
    CALLED,
    CALLS,
    COMMA,
    EACH,
    LOOK,
    NOT_BESIDE,
    OBJECT,
    ONE_CALL,
    SAID,
    STOP,
    TAGGED,
    Case,
    called,
    json_call,
    template,
    turn,
)
from tokentrace.formats.grammar import CallGrammar, Frame, Style, TurnGrammar
from tokentrace.study.derive import TWO_TURNS

AROUND_CALLS: Final = {
    "a section": Case(
        template(called("<call>" + OBJECT + "</call>", "{{ '\\n' }}<calls>{{ '\\n' }}", "{{ '\\n' }}</calls>")),
        turn(replace(TAGGED, before="\n", section_open="<calls>\n", section_close="\n</calls>")),
        CALLS
    ),
    "a section that is a list": Case(
        template(called(OBJECT + COMMA, "<|calls|>[", "]")),
        turn(json_call(section_open="<|calls|>[", section_close="]", separator=", ")),
        CALLS
    ),
    "a separator of letters": Case(
        template(called("<call>" + OBJECT + "</call>{{ '' if loop.last else '; ' }}")),
        turn(replace(TAGGED, separator="; ")),
        CALLS
    ),
    "white space everywhere": Case(
        template(
            called(
                "{{ '\\n' }}<call>{{ '\\n' }}" + OBJECT + "{{ '\\n' }}</call>{{ '' if loop.last else '\\n' }}",
                after="{{ '\\n' }}"
            )
        ),
        turn(json_call(before="\n", open="<call>\n", close="\n</call>", separator="\n\n", after="\n")),
        CALLS
    ),
    "a prompt that opens whatever comes first": Case(
        template(
            "{% if m.content %}## all\n{{ m.content }}{% endif %}"
            + EACH
            + "## {{ f.name }}\n"
            + ARGUMENTS
            + "{% endfor %}",
            prompt="## "
        ),
        turn(
            CallGrammar(Style.JSON_ARGUMENTS, open="## ", head=(("", "name"),), begin="\n"),
            prompt="<|a|>## ",
            content=Frame("## all", "\n"),
            notes=()
        ),
        CALLS
    ),
    "no prompt, and a word before an answer": Case(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
        + called("<call>" + OBJECT + "</call>")
        + "{% else %}Bot: {{ m.content }}{% endif %}{% else %}<|u|>{{ m.content }}{% endif %}<|end|>{% endfor %}",
        TurnGrammar(content=Frame("Bot:", " "), calls=TAGGED),
        CALLS
    ),
    "no closing delimiter": Case(
        template(called("<|call|>{{ f.name }}<|args|>" + ARGUMENTS)),
        turn(CallGrammar(Style.JSON_ARGUMENTS, open="<|call|>", head=(("", "name"),), begin="<|args|>")),
        CALLS
    ),
    "no delimiter at all": Case(
        template("{% if m.tool_calls %}" + EACH + OBJECT + "{% endfor %}{% else %}{{ m.content }}{% endif %}"),
        turn(json_call(), NOT_BESIDE),
        (SAID, CALLED)
    ),
    "one call a turn": Case(
        template(
            "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one at a time') }}{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, ONE_CALL),
        (SAID, CALLED, BESIDE)
    ),
    "calls or content": Case(
        template(
            "{% if m.tool_calls and m.content %}{{ raise_exception('either or') }}{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, NOT_BESIDE),
        (SAID, CALLED, assistant("", LOOK, STOP))
    ),
    "content after calls": Case(
        template("{% if m.tool_calls %}" + EACH + "<call>" + OBJECT + "</call>{% endfor %}{% endif %}{{ m.content }}"),
        turn(TAGGED, NOT_BESIDE),
        CALLS
    ),
    "content that is opened beside calls only": Case(
        template(
            "{% if m.tool_calls %}<|sep|>{{ m.content }}<|calls|>" + EACH + OBJECT + "{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}"
        ),
        turn(json_call(section_open="<|calls|>"), content=Frame("<|sep|>")),
        CALLS
    ),
    "calls after content in a turn of their own": Case(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content %}<|a|>{{ m.content }}<|end|>{% endif %}"
        "{% if m.tool_calls %}<|a|>" + EACH + "<call>" + OBJECT + "</call>{% endfor %}<|end|>{% endif %}"
        "{% else %}<|u|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
        turn(TAGGED, TWO_TURNS),
        (SAID, CALLED, assistant("", LOOK, STOP))
    ),
    "one call is not closed as two are": Case(
        template(
            called(
                "<call>" + OBJECT + "</call>", "<calls>", "{% if m.tool_calls | length > 1 %}</calls>{% endif %}"
            )
        ),
        turn(
            replace(TAGGED, section_open="<calls>", section_close="</calls>"),
            "the template disagrees with itself: one call ends with '</call>', the last of two with '</call></calls>'"
        ),
        CALLS
    ),
    "calls that cannot be taken apart": Case(
        template(called("<call>{{ f.name }}</call>")),
        turn(None, "calls were not understood: no arguments are shown; choose a tool_parser")
    )
}  # fmt: skip
