"""Small templates, each with something that derivation has to find out, and the grammar that is expected."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tests.conversations import assistant
from tests.study.around_calls import AROUND_CALLS
from tests.study.pieces import (
    ADDRESSED,
    ARGUMENTS,
    AS_TEXT,
    BOTH,
    BRACES,
    CALLED,
    CALLS,
    EACH,
    HIDDEN,
    LOOK,
    NAMED_TAG,
    OBJECT,
    PYTHON,
    SAID,
    STOP,
    TAGGED,
    THINK,
    THOUGHT,
    TO,
    TREE,
    TYPE,
    VALUE,
    Case,
    called,
    json_call,
    pairs,
    template,
    turn,
)
from tokentrace.formats.grammar import CallGrammar, Frame, Style, TurnGrammar, Value
from tokentrace.study.derive import BARE_CALLS, NO_CALLS, SEVERAL_MESSAGES

CASES: Final = {
    # content
    "content in tags": Case(
        template("<answer>\n{{ m.content }}\n</answer>"), turn(content=Frame("<answer>", "\n", "\n", "</answer>"))
    ),
    "content in tags after reasoning": Case(
        template(
            "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "<answer>{{ m.content }}</answer>"
        ),
        turn(reasoning=THINK, content=Frame("<answer>", close="</answer>")),
        (SAID, THOUGHT)
    ),
    "a turn closed in letters": Case(
        "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' else 'Human: ' }}{{ m.content }}{{ '\\nOver.\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}",
        TurnGrammar("Bot: ", "Bot: ", content=Frame(trail="\n", close="Over.", after="\n"), notes=(NO_CALLS,))
    ),
    "no calls": Case(template("{{ m.content }}"), turn()),
    "a template that needs tools": Case(
        template(called("<call>" + OBJECT + "</call>")) + "{{ raise_exception('no tools') if not tools }}",
        turn(TAGGED),
        CALLS
    ),
    # reasoning
    "reasoning that only the prompt opens": Case(
        template("{{ m.content }}", prompt="<think>\n"),
        turn(None, HIDDEN, NO_CALLS, prompt="<|a|><think>\n", reasoning=Frame("<think>", "\n", "", "</think>", ""))
    ),
    "reasoning that the prompt opens and the turn closes": Case(
        template(
            "{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}", prompt="<think>"
        ),
        turn(prompt="<|a|><think>", reasoning=THINK)
    ),
    "reasoning behind a switch": Case(
        template(
            "{% if thinking and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
            "{{ m.content }}"
        ),
        turn(reasoning=THINK),
        (SAID, THOUGHT),
        (("thinking", True),)
    ),
    "reasoning behind a switch that is on": Case(
        template(
            "{% if not hide | default(true) and m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]"
            "{% endif %}{{ m.content }}"
        ),
        turn(reasoning=Frame("[THINK]", "", "", "[/THINK]", "")),
        (SAID, THOUGHT),
        (("hide", False),)
    ),
    "reasoning beside calls only": Case(
        template(
            "{% if m.tool_calls and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{{ '\\n' }}"
            "{% endif %}"
            + called("<call>" + OBJECT + "</call>")
        ),
        turn(TAGGED, reasoning=Frame("<think>", "", "", "</think>", "\n"), after_empty="\n"),
        (*CALLS, BOTH)
    ),
    "reasoning between words": Case(
        template(
            "{% if m.reasoning_content %}Thinking: {{ m.reasoning_content }}{{ '\\nDone.\\n' }}{% endif %}"
            "{{ m.content }}"
        ),
        turn(reasoning=Frame("Thinking:", " ", "\n", "Done.", "\n"), after_empty="\n"),
        (SAID, THOUGHT)
    ),
    "reasoning closed by a word": Case(
        template("{% if m.reasoning_content %}<think>{{ m.reasoning_content }} # {% endif %}{{ m.content }}"),
        turn(reasoning=Frame("<think>", "", " ", "#", " "), after_empty=" "),
        (SAID, THOUGHT)
    ),
    "reasoning that nothing opens": Case(
        template("{% if m.reasoning_content %}{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"),
        turn(
            None,
            "nothing opens the reasoning, so that it is not to be told from content",
            NO_CALLS
        )
    ),
    "reasoning that nothing closes": Case(
        template("{% if m.reasoning_content %}<think>{{ m.reasoning_content }}{{ '\\n' }}{% endif %}{{ m.content }}"),
        turn(None, "nothing that could be looked for closes the reasoning", NO_CALLS)
    ),
    "an empty place for reasoning in every turn": Case(
        template("<|x|>inner\n{{ m.reasoning_content }}<|q|>{{ m.content }}", prompt="<|x|>inner\n<|q|>"),
        turn(prompt="<|a|><|x|>inner\n<|q|>", reasoning=Frame("<|x|>inner", "\n", "", "<|q|>", "")),
        (SAID, THOUGHT)
    ),
    "a prompt in the turn before it": Case(
        "{% for m in messages %}{% if m.role == 'assistant' %}<|a|>{% if m.reasoning_content %}"
        "{{ m.reasoning_content }} So: {% endif %}{{ m.content }}<|end|>{% else %}<|u|>{{ m.content }}<|end|>"
        "{% if loop.last and add_generation_prompt %}<|a|>I think: {% endif %}{% endif %}{% endfor %}",
        turn(prompt="<|a|>I think: ", reasoning=Frame("I think:", " ", " ", "So:", " "), after_empty=" ")
    ),
    "an answer that is written where the prompt opens reasoning": Case(
        "{% set last = messages[-1] %}{% for m in messages %}{% if m.role == 'user' %}<|u|>{{ m.content }}<|end|>"
        "{% elif not loop.last %}<|a|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if last.role == 'assistant' %}"
        "{{ '<|a|><think>' + last.content + '<|end|>' }}{% elif add_generation_prompt %}<|a|><think>{% endif %}",
        turn(None, HIDDEN, NO_CALLS, prompt="<|a|><think>", reasoning=THINK),
        ()
    ),
    "several messages in a turn": Case(
        template(
            "{% if m.reasoning_content %} self<|sep|>{{ m.reasoning_content }}<|done|><|a|>{% endif %}"
            " user<|sep|>{{ m.content }}"
        ),
        turn(None, SEVERAL_MESSAGES),
        ()
    ),
    "messages that say who they go to": Case(
        ADDRESSED.replace("BODY", ARGUMENTS),
        TurnGrammar("<|a|>", "<|a|>", channels=TO),
        (*CALLS, THOUGHT, BOTH)
    ),
    "messages to tools, in tags": Case(
        ADDRESSED.replace(
            "BODY", '<call of="{{ f.name }}">\n' + pairs('<p name="{{ k }}">' + VALUE + "</p>\n") + "</call>"
        ),
        TurnGrammar(
            "<|a|>",
            "<|a|>",
            channels=TO,
            calls=CallGrammar(
                Style.PAIRS,
                open='<call of="',
                head=(("", "name"),),
                begin='">\n',
                close="</call>",
                key_open='<p name="',
                value_open='">',
                value_close="</p>\n"
            )
        ),
        (*CALLS, THOUGHT, BOTH)
    ),
    # calls: JSON
    "an object": Case(template(called("<call>" + OBJECT + "</call>")), turn(TAGGED), CALLS),
    "an object in an object": Case(
        template(called('<call>{"type": "function", "function": ' + OBJECT + "}</call>")),
        turn(replace(TAGGED, keys=(("name", ("function", "name")), ("arguments", ("function", "arguments"))))),
        CALLS
    ),
    "the call as it was given": Case(
        template(called("<call>{{ c | tojson }}</call>")),
        turn(
            replace(
                TAGGED,
                keys=(("id", ("id",)), ("name", ("function", "name")), ("arguments", ("function", "arguments")))
            )
        ),
        CALLS
    ),
    "arguments before the name": Case(
        template(called('<call>{"parameters": ' + ARGUMENTS + ', "tool": {{ f.name | tojson }}}</call>')),
        turn(replace(TAGGED, keys=(("arguments", ("parameters",)), ("name", ("tool",))))),
        CALLS
    ),
    "the name as the only key": Case(
        template(called('<call>{"{{ f.name }}": ' + ARGUMENTS + "}</call>")),
        turn(json_call(open="<call>", close="</call>", keys=(), named_key=True)),
        CALLS
    ),
    "arguments as JSON in a string": Case(
        template(
            called('<call>{"name": {{ f.name | tojson }}, "arguments": {{ f.arguments | tojson | tojson }}}</call>')
        ),
        turn(TAGGED),
        CALLS
    ),
    "arguments given as JSON text only": Case(
        template(called(AS_TEXT + "<|call|>{{ f.name }}<|args|>{{ f.arguments }}<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS, open="<|call|>", head=(("", "name"),), begin="<|args|>", close="<|done|>"
            )
        ),
        CALLS
    ),
    "escaped JSON": Case(
        template(called("<call>" + OBJECT.replace("tojson }}}", "tojson(ensure_ascii=True) }}}") + "</call>")),
        turn(replace(TAGGED, ascii=True)),
        CALLS
    ),
    # calls: fields before arguments
    "an id before the name": Case(
        template(called("<|call|>{{ c.id }}<|sep|>{{ f.name }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open="<|call|>",
                head=(("", "id"), ("<|sep|>", "name")),
                begin="<|args|>",
                close="<|done|>"
            )
        ),
        CALLS
    ),
    "an id after the name": Case(
        template(called('<call name="{{ f.name }}" id="{{ c.id }}">' + ARGUMENTS + "</call>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open='<call name="',
                head=(("", "name"), ('" id="', "id")),
                begin='">',
                close="</call>"
            )
        ),
        CALLS
    ),
    "an id made of name and number": Case(
        template(called("<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(
            CallGrammar(
                Style.JSON_ARGUMENTS,
                open="<|call|>",
                head=(("", "id"),),
                begin="<|args|>",
                close="<|done|>",
                id_is_name=True
            )
        ),
        CALLS
    ),
    # calls: arguments one by one
    "compact tags": Case(
        template(called("<call>{{ f.name }}" + pairs("<k>{{ k }}</k><v>" + VALUE + "</v>") + "</call>")),
        turn(
            CallGrammar(
                Style.PAIRS,
                open="<call>",
                head=(("", "name"),),
                close="</call>",
                key_open="<k>",
                value_open="</k><v>",
                value_close="</v>"
            )
        ),
        CALLS
    ),
    "tags that say the type": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs("<p name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">" + VALUE + "</p>")
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='" string="false">',
                string_open='" string="true">',
                value_close="</p>"
            )
        ),
        CALLS
    ),
    "tags that name one of six types": Case(
        TYPE
        + template(
            called(
                '<call name="{{ f.name }}" at="{{ loop.index0 }}">'
                + pairs('<p name="{{ k }}" type="{{ type(v) }}">' + VALUE + "</p>")
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                open='<call name="',
                head=(("", "name"), ('" at="', "index")),
                begin='">',
                close="</call>",
                key_open='<p name="',
                value_open='" type="number">',
                string_open='" type="string">',
                typed_opens=(
                    ("boolean", '" type="boolean">'),
                    ("null", '" type="null">'),
                    ("array", '" type="array">'),
                    ("object", '" type="object">')
                ),
                value_close="</p>"
            )
        ),
        CALLS
    ),
    "tags made of control tokens": Case(
        template(
            "<|x|>think<|sep|>{{ m.reasoning_content }}<|q|>think<|sep|>"
            "<|x|>words<|sep|>{{ m.content }}<|q|>words<|sep|>{% if m.tool_calls %}<|x|>tools<|sep|>"
            + EACH
            + '<|x|>call of="{{ f.name }}" no="{{ loop.index }}"<|sep|>'
            + pairs(
                "<|x|>given key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'other' }}\"<|sep|>"
                + VALUE
                + "<|q|>given<|sep|>"
            )
            + "<|q|>call<|sep|>{% endfor %}<|q|>tools<|sep|>{% endif %}<|q|>turn<|sep|>",
            prompt="<|x|>think<|sep|>"
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                section_open="<|q|>words<|sep|><|x|>tools<|sep|>",
                section_close="<|q|>tools<|sep|><|q|>turn<|sep|>",
                open='<|x|>call of="',
                head=(("", "name"), ('" no="', "number")),
                begin='"<|sep|>',
                close="<|q|>call<|sep|>",
                key_open='<|x|>given key="',
                value_open='" type="other"<|sep|>',
                string_open='" type="string"<|sep|>',
                value_close="<|q|>given<|sep|>"
            ),
            prompt="<|a|><|x|>think<|sep|>",
            reasoning=Frame("<|x|>think<|sep|>", close="<|q|>think<|sep|>"),
            content=Frame("<|x|>words<|sep|>", close="<|q|>words<|sep|><|q|>turn<|sep|>"),
            notes=()
        ),
        (*CALLS, THOUGHT, BOTH)
    ),
    "strings in CDATA": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs(
                    "<p name=\"{{ k }}\">{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}"
                    + VALUE
                    + "{% endif %}</p>"
                )
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                strings=Value.CDATA
            )
        ),
        CALLS
    ),
    "strings as JSON": Case(
        template(
            called('<call name="{{ f.name }}">' + pairs('<p name="{{ k }}">{{ v | tojson }}</p>') + "</call>")
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                strings=Value.JSON
            )
        ),
        (SAID,)
    ),
    "True and False": Case(
        template(
            called(
                '<call name="{{ f.name }}">'
                + pairs('<p name="{{ k }}">{{ v if v is string or v is boolean else v | tojson }}</p>')
                + "</call>"
            )
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                **NAMED_TAG,
                key_open='<p name="',
                value_open='">',
                value_close="</p>",
                others=Value.PYTHON
            )
        ),
        CALLS
    ),
    "tags named after the keys": Case(
        TREE + template(called('<|x|><call name="{{ f.name }}">{{ tree(f.arguments) }}<|x|></call>')),
        turn(
            CallGrammar(
                Style.TREE,
                open='<|x|><call name="',
                head=(("", "name"),),
                begin='">',
                close="<|x|></call>",
                key_open="<|x|><",
                value_open=">",
                value_close="<|x|></",
                item="item"
            )
        ),
        CALLS
    ),
    "tags after brackets in letters": Case(
        TREE.replace("<|x|>", "]<]x[>[")
        + template(called('{{ "\\n" }}]<]x[>[<call name="{{ f.name }}">{{ tree(f.arguments) }}]<]x[>[</call>')),
        turn(
            CallGrammar(
                Style.TREE,
                before="\n",
                separator="\n",
                open=']<]x[>[<call name="',
                head=(("", "name"),),
                begin='">',
                end="]<]x[>[",
                close="</call>",
                key_open="]<]x[>[<",
                value_open=">",
                value_close="]<]x[>[</",
                item="item"
            )
        ),
        CALLS
    ),
    "Python calls": Case(
        template(called(PYTHON, "<|calls|>[", "]<|done|>")),
        turn(
            CallGrammar(Style.PYTHON, section_open="<|calls|>[", section_close="]<|done|>", separator=", ")
        ),
        CALLS
    ),
    "Python calls with nothing around them": Case(
        template(called(PYTHON, "[", "]")),
        turn(CallGrammar(Style.PYTHON, section_open="[", section_close="]", separator=", "), BARE_CALLS),
        (SAID, CALLED, assistant("", LOOK, STOP))
    ),
    "braces with quotes of their own": Case(
        BRACES + template(called("<|call|>call:{{ f.name }}{{ braces(f.arguments) }}<|done|>")),
        turn(
            CallGrammar(
                Style.BRACES, open="<|call|>call:", head=(("", "name"),), begin="{", close="<|done|>", quote="<|q|>"
            )
        ),
        CALLS
    ),
    **AROUND_CALLS
}  # fmt: skip
