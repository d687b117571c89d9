"""Small templates, each with something that derivation has to find out, and the expected grammars."""

import json
from dataclasses import dataclass, replace
from typing import Any, Final

from tests.conversations import Message, assistant, call, user
from tokentrace import Renderer
from tokentrace.formats.grammar import NO_CALLS, CallGrammar, Channels, Frame, Style, TurnGrammar, Value
from tokentrace.parsing.response import CallStatus, ParsedResponse
from tokentrace.study.derive import BARE_CALLS, SEVERAL_MESSAGES, TWO_TURNS
from tokentrace.study.probes import STAND_IN_TOOL

HIDDEN: Final = "the template never shows reasoning; it prompts with <think> or looks for </think>"
NOT_BESIDE: Final = "the template shows no content before tool calls"
THINK: Final = Frame("<think>", "", "", "</think>", "")
NAME_AND_ARGUMENTS: Final = (("name", ("name",)), ("arguments", ("arguments",)))
CONTROLS: Final = (
    *("<|a|>", "<|u|>", "<|end|>", "<|call|>", "<|sep|>", "<|args|>", "<|done|>", "<|calls|>", "<|q|>", "<|x|>"),
)
TYPES: Final = {"place": "string", "days": "integer", "exact": "boolean"}
LOOK: Final = call("look_up", {"place": 'Paris <b> & "é"', "days": 3, "exact": True}, "call00001")
STOP: Final = call("stop", {"where": {"lat": 2.5, "tags": ["a", None]}, "why": "two\nlines"}, "call00002")
HELLO: Final = assistant("Hello.")
THOUGHT: Final = assistant("Hello.", reasoning="Well.")
CALLED: Final = assistant("", LOOK)
BESIDE: Final = assistant("Hello.", LOOK)
TWICE: Final = assistant("Hello.", LOOK, STOP)
BOTH: Final = assistant("Hello.", LOOK, reasoning="Well.")
CALLS: Final = (HELLO, CALLED, BESIDE, TWICE)
ARGUMENTS: Final = "{{ f.arguments | tojson }}"
OBJECT: Final = '{"name": {{ f.name | tojson }}, "arguments": ' + ARGUMENTS + "}"
VALUE: Final = "{{ v if v is string else v | tojson }}"
EACH: Final = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
COMMA: Final = "{{ '' if loop.last else ', ' }}"
THINKS: Final = "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
TAG: Final = "<call>" + OBJECT + "</call>"


def template(turn: str, prompt: str = "") -> str:
    """A template whose assistant writes `turn` between ``<|a|>`` and ``<|end|>``."""
    reply = "{% if m.role == 'assistant' %}<|a|>" + turn + "<|end|>{% else %}<|u|>{{ m.content }}<|end|>{% endif %}"
    prompted = "{% if add_generation_prompt %}<|a|>" + prompt + "{% endif %}"
    return "{% for m in messages %}" + reply + "{% endfor %}" + prompted


def called(one: str, before: str = "", after: str = "") -> str:
    """Content, then each call as `one`, all of them between `before` and `after`."""
    return "{{ m.content or '' }}{% if m.tool_calls %}" + before + EACH + one + "{% endfor %}" + after + "{% endif %}"


def pairs(one: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + one + "{% endfor %}"


def in_tag(one: str) -> str:
    """Calls in a tag, each argument as `one`."""
    return called('<call name="{{ f.name }}">' + pairs(one) + "</call>")


def turn(calls: CallGrammar | None = None, *notes: str, **changes: Any) -> TurnGrammar:
    """A grammar with the head and the prompt that `template` gives it."""
    if calls is None and not notes:
        notes = (NO_CALLS,)
    return TurnGrammar(**{"head": "<|a|>", "prompt": "<|a|>", "calls": calls, "notes": notes, **changes})


def json_call(**changes: Any) -> CallGrammar:
    return CallGrammar(**{"style": Style.JSON_CALL, "keys": NAME_AND_ARGUMENTS, **changes})


TAGGED: Final = json_call(open="<call>", close="</call>")


def tagged_pairs(**changes: Any) -> CallGrammar:
    """Calls in a tag, and their arguments in ``<p>``."""
    around = {"open": '<call name="', "head": (("", "name"),), "begin": '">', "close": "</call>"}
    return CallGrammar(
        Style.PAIRS, **{**around, "key_open": '<p name="', "value_open": '">', "value_close": "</p>", **changes}
    )


def json_arguments(**changes: Any) -> CallGrammar:
    """A name and its arguments between control tokens."""
    around = {"open": "<|call|>", "head": (("", "name"),), "begin": "<|args|>", "close": "<|done|>"}
    return CallGrammar(Style.JSON_ARGUMENTS, **{**around, **changes})


TREE: Final = (
    "{% macro tree(v) %}{% if v is mapping %}{% for k, w in v.items() %}<|x|><{{ k }}>{{ tree(w) }}<|x|></{{ k }}>"
    "{% endfor %}{% elif v is string %}{{ v }}{% elif v is iterable %}{% for w in v %}<|x|><item>{{ tree(w) }}"
    "<|x|></item>{% endfor %}{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
)
TYPE: Final = (
    "{% macro type(v) %}{% if v is string %}string{% elif v is boolean %}boolean{% elif v is none %}null"
    "{% elif v is number %}number{% elif v is mapping %}object{% else %}array{% endif %}{% endmacro %}"
)
BRACES: Final = (
    "{% macro braces(v) %}{% if v is mapping %}{{ '{' }}{% for k, w in v.items() %}{{ k }}:{{ braces(w) }}"
    "{{ '' if loop.last else ',' }}{% endfor %}{{ '}' }}{% elif v is string %}<|q|>{{ v }}<|q|>{% elif v is iterable %}"
    "[{% for w in v %}{{ braces(w) }}{{ '' if loop.last else ',' }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}"
    "{% endmacro %}"
)
PYTHON: Final = (
    "{{ f.name }}({% for k, v in f.arguments.items() %}{{ k }}={{ v | tojson }}" + COMMA + "{% endfor %})" + COMMA
)
AS_TEXT: Final = "{% if f.arguments is not string %}{{ raise_exception('JSON text only') }}{% endif %}"
TO: Final = Channels("<|a|>", "", "<|sep|>", "<|done|>", "self", "user", "to=", "", "", "", "<|end|>")
ADDRESSED: Final = template(
    "{% if m.reasoning_content %} to=self<|sep|>{{ m.reasoning_content }}<|done|><|a|>{% endif %}"
    "{% if m.content %} to=user<|sep|>{{ m.content }}{{ '<|done|><|a|>' if m.tool_calls }}{% endif %}"
    + EACH
    + " to={{ f.name }}<|sep|>BODY{{ '' if loop.last else '<|done|><|a|>' }}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Case:
    """A template, the expected grammar, and sample messages that are read back as they were."""

    source: str
    grammar: TurnGrammar
    samples: tuple[Message, ...] | None = None
    """By default an answer, plus every kind of call if the template shows calls."""
    variables: tuple[tuple[str, Any], ...] = ()
    """Template variables with which the messages are rendered."""

    @property
    def messages(self) -> tuple[Message, ...]:
        return (CALLS if self.grammar.calls is not None else (HELLO,)) if self.samples is None else self.samples


CASES: Final = {
    # content
    "content in tags": Case(
        template("<answer>\n{{ m.content }}\n</answer>"), turn(content=Frame("<answer>", "\n", "\n", "</answer>"))
    ),
    "content in tags after reasoning": Case(
        template(THINKS + "<answer>{{ m.content }}</answer>"),
        turn(reasoning=THINK, content=Frame("<answer>", close="</answer>")), (HELLO, THOUGHT)
    ),
    "a turn closed in letters": Case(
        "{% for m in messages %}{{ 'Bot: ' if m.role == 'assistant' else 'Human: ' }}{{ m.content }}{{ '\\nOver.\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}Bot: {% endif %}",
        TurnGrammar("Bot: ", "Bot: ", content=Frame(trail="\n", close="Over.", after="\n"), notes=(NO_CALLS,))
    ),
    "no calls": Case(template("{{ m.content }}"), turn()),
    "a template that needs tools": Case(
        template(called(TAG)) + "{{ raise_exception('no tools') if not tools }}", turn(TAGGED)
    ),
    # reasoning
    "reasoning that only the prompt opens": Case(
        template("{{ m.content }}", prompt="<think>\n"),
        turn(None, HIDDEN, NO_CALLS, prompt="<|a|><think>\n", reasoning=Frame("<think>", "\n", "", "</think>", ""))
    ),
    "reasoning that the prompt opens and the turn closes": Case(
        template(THINKS.replace("<think>", "") + "{{ m.content }}", prompt="<think>"),
        turn(prompt="<|a|><think>", reasoning=THINK)
    ),
    "reasoning behind a switch": Case(
        template(THINKS.replace("if m", "if thinking and m") + "{{ m.content }}"),
        turn(reasoning=THINK), (HELLO, THOUGHT), (("thinking", True),)
    ),
    "reasoning behind a switch that is on": Case(
        template(
            "{% if not hide | default(true) and m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]"
            "{% endif %}{{ m.content }}"
        ),
        turn(reasoning=Frame("[THINK]", "", "", "[/THINK]", "")), (HELLO, THOUGHT), (("hide", False),)
    ),
    "reasoning beside calls only": Case(
        template(
            "{% if m.tool_calls and m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{{ '\\n' }}"
            "{% endif %}" + called(TAG)
        ),
        turn(TAGGED, reasoning=Frame("<think>", "", "", "</think>", "\n"), after_empty="\n"), (*CALLS, BOTH)
    ),
    "reasoning between words": Case(
        template(
            "{% if m.reasoning_content %}Thinking: {{ m.reasoning_content }}{{ '\\nDone.\\n' }}{% endif %}"
            "{{ m.content }}"
        ),
        turn(reasoning=Frame("Thinking:", " ", "\n", "Done.", "\n"), after_empty="\n"), (HELLO, THOUGHT)
    ),
    "reasoning closed by a word": Case(
        template("{% if m.reasoning_content %}<think>{{ m.reasoning_content }} # {% endif %}{{ m.content }}"),
        turn(reasoning=Frame("<think>", "", " ", "#", " "), after_empty=" "), (HELLO, THOUGHT)
    ),
    "reasoning that nothing opens": Case(
        template(THINKS.replace("<think>", "") + "{{ m.content }}"),
        turn(None, "nothing opens the reasoning, so it cannot be distinguished from content", NO_CALLS)
    ),
    "reasoning that nothing closes": Case(
        template(THINKS.replace("</think>", "{{ '\\n' }}") + "{{ m.content }}"),
        turn(None, "no delimiter closes the reasoning", NO_CALLS)
    ),
    "an empty place for reasoning in every turn": Case(
        template("<|x|>inner\n{{ m.reasoning_content }}<|q|>{{ m.content }}", prompt="<|x|>inner\n<|q|>"),
        turn(prompt="<|a|><|x|>inner\n<|q|>", reasoning=Frame("<|x|>inner", "\n", "", "<|q|>", "")), (HELLO, THOUGHT)
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
        turn(None, HIDDEN, NO_CALLS, prompt="<|a|><think>", reasoning=THINK), ()
    ),
    "several messages in a turn": Case(
        template(
            "{% if m.reasoning_content %} self<|sep|>{{ m.reasoning_content }}<|done|><|a|>{% endif %}"
            " user<|sep|>{{ m.content }}"
        ),
        turn(None, SEVERAL_MESSAGES, NO_CALLS, content=Frame("user<|sep|>")), ()
    ),
    "reasoning under another name, in a message that ends as the turn does": Case(
        template("{% if m.reasoning %}<|q|>{{ m.reasoning }}<|end|><|a|>{% endif %}<|x|>{{ m.content }}"),
        turn(None, SEVERAL_MESSAGES, NO_CALLS, content=Frame("<|x|>")), (HELLO,)
    ),
    "a plan before calls, in a field of its own": Case(
        template(
            "{% if m.tool_calls %}<|q|>{{ m.get('plan', '') }}<|sep|><|calls|>" + EACH + OBJECT + "{% endfor %}<|done|>"
            "{% else %}<|x|>{{ m.content }}<|args|>{% endif %}"
        ),
        turn(
            json_call(section_open="<|calls|>", section_close="<|done|>"), NOT_BESIDE,
            reasoning=Frame("<|q|>", close="<|sep|>"), content=Frame("<|x|>", close="<|args|>")
        ),
        (HELLO, CALLED)
    ),
    "messages that say who they go to": Case(
        ADDRESSED.replace("BODY", ARGUMENTS), TurnGrammar("<|a|>", "<|a|>", channels=TO), (*CALLS, THOUGHT, BOTH)
    ),
    "messages to tools, in tags": Case(
        ADDRESSED.replace(
            "BODY", '<call of="{{ f.name }}">\n' + pairs('<p name="{{ k }}">' + VALUE + "</p>\n") + "</call>"
        ),
        TurnGrammar(
            "<|a|>", "<|a|>", channels=TO,
            calls=tagged_pairs(open='<call of="', begin='">\n', value_close="</p>\n")
        ),
        (*CALLS, THOUGHT, BOTH)
    ),
    # calls: JSON
    "an object": Case(template(called(TAG)), turn(TAGGED)),
    "an object in an object": Case(
        template(called('<call>{"type": "function", "function": ' + OBJECT + "}</call>")),
        turn(replace(TAGGED, keys=(("name", ("function", "name")), ("arguments", ("function", "arguments")))))
    ),
    "the call as it was given": Case(
        template(called("<call>{{ c | tojson }}</call>")),
        turn(replace(
            TAGGED, keys=(("id", ("id",)), ("name", ("function", "name")), ("arguments", ("function", "arguments")))
        ))
    ),
    "arguments before the name": Case(
        template(called('<call>{"parameters": ' + ARGUMENTS + ', "tool": {{ f.name | tojson }}}</call>')),
        turn(replace(TAGGED, keys=(("arguments", ("parameters",)), ("name", ("tool",)))))
    ),
    "the name as the only key": Case(
        template(called('<call>{"{{ f.name }}": ' + ARGUMENTS + "}</call>")),
        turn(json_call(open="<call>", close="</call>", keys=(), named_key=True))
    ),
    "arguments as JSON in a string": Case(
        template(called(TAG.replace("f.arguments | tojson", "f.arguments | tojson | tojson"))), turn(TAGGED)
    ),
    "arguments given as JSON text only": Case(
        template(called(AS_TEXT + "<|call|>{{ f.name }}<|args|>{{ f.arguments }}<|done|>")), turn(json_arguments())
    ),
    "escaped JSON": Case(
        template(called(TAG.replace("tojson }}}", "tojson(ensure_ascii=True) }}}"))), turn(replace(TAGGED, ascii=True))
    ),
    # calls: fields before arguments
    "an id before the name": Case(
        template(called("<|call|>{{ c.id }}<|sep|>{{ f.name }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(json_arguments(head=(("", "id"), ("<|sep|>", "name"))))
    ),
    "an id after the name": Case(
        template(called('<call name="{{ f.name }}" id="{{ c.id }}">' + ARGUMENTS + "</call>")),
        turn(json_arguments(
            open='<call name="', head=(("", "name"), ('" id="', "id")), begin='">', close="</call>"
        ))
    ),
    "an id made of name and number": Case(
        template(called("<|call|>functions.{{ f.name }}:{{ loop.index0 }}<|args|>" + ARGUMENTS + "<|done|>")),
        turn(json_arguments(head=(("", "id"),), id_is_name=True))
    ),
    # calls: arguments one by one
    "tags that name one of six types": Case(
        TYPE + template(called(
            '<call name="{{ f.name }}" at="{{ loop.index0 }}">'
            + pairs('<p name="{{ k }}" type="{{ type(v) }}">' + VALUE + "</p>") + "</call>"
        )),
        turn(tagged_pairs(
            head=(("", "name"), ('" at="', "index")), value_open='" type="number">', string_open='" type="string">',
            typed_opens=tuple((name, f'" type="{name}">') for name in ("boolean", "null", "array", "object"))
        ))
    ),
    "tags made of control tokens": Case(
        template(
            "<|x|>think<|sep|>{{ m.reasoning_content }}<|q|>think<|sep|>"
            "<|x|>words<|sep|>{{ m.content }}<|q|>words<|sep|>{% if m.tool_calls %}<|x|>tools<|sep|>"
            + EACH + '<|x|>call of="{{ f.name }}" no="{{ loop.index }}"<|sep|>'
            + pairs(
                "<|x|>given key=\"{{ k }}\" type=\"{{ 'string' if v is string else 'other' }}\"<|sep|>"
                + VALUE + "<|q|>given<|sep|>"
            )
            + "<|q|>call<|sep|>{% endfor %}<|q|>tools<|sep|>{% endif %}<|q|>turn<|sep|>",
            prompt="<|x|>think<|sep|>"
        ),
        turn(
            CallGrammar(
                Style.PAIRS,
                section_open="<|q|>words<|sep|><|x|>tools<|sep|>", section_close="<|q|>tools<|sep|><|q|>turn<|sep|>",
                open='<|x|>call of="', head=(("", "name"), ('" no="', "number")), begin='"<|sep|>',
                close="<|q|>call<|sep|>", key_open='<|x|>given key="', value_open='" type="other"<|sep|>',
                string_open='" type="string"<|sep|>', value_close="<|q|>given<|sep|>"
            ),
            prompt="<|a|><|x|>think<|sep|>",
            reasoning=Frame("<|x|>think<|sep|>", close="<|q|>think<|sep|>"),
            content=Frame("<|x|>words<|sep|>", close="<|q|>words<|sep|><|q|>turn<|sep|>"), notes=()
        ),
        (*CALLS, THOUGHT, BOTH)
    ),
    "strings in CDATA": Case(
        template(in_tag(
            "<p name=\"{{ k }}\">{% if v is string and '<' in v %}<![CDATA[{{ v }}]]>{% else %}" + VALUE
            + "{% endif %}</p>"
        )),
        turn(tagged_pairs(strings=Value.CDATA))
    ),
    "strings as JSON": Case(
        template(in_tag('<p name="{{ k }}">{{ v | tojson }}</p>')), turn(tagged_pairs(strings=Value.JSON)), (HELLO,)
    ),
    "tags named after the keys": Case(
        TREE + template(called('<|x|><call name="{{ f.name }}">{{ tree(f.arguments) }}<|x|></call>')),
        turn(CallGrammar(
            Style.TREE, open='<|x|><call name="', head=(("", "name"),), begin='">', close="<|x|></call>",
            key_open="<|x|><", value_open=">", value_close="<|x|></", item="item"
        ))
    ),
    "tags after brackets in letters": Case(
        TREE.replace("<|x|>", "]<]x[>[")
        + template(called('{{ "\\n" }}]<]x[>[<call name="{{ f.name }}">{{ tree(f.arguments) }}]<]x[>[</call>')),
        turn(CallGrammar(
            Style.TREE, before="\n", separator="\n", open=']<]x[>[<call name="', head=(("", "name"),), begin='">',
            end="]<]x[>[", close="</call>", key_open="]<]x[>[<", value_open=">", value_close="]<]x[>[</", item="item"
        ))
    ),
    "Python calls": Case(
        template(called(PYTHON, "<|calls|>[", "]<|done|>")),
        turn(CallGrammar(Style.PYTHON, section_open="<|calls|>[", section_close="]<|done|>", separator=", "))
    ),
    "Python calls with nothing around them": Case(
        template(called(PYTHON, "[", "]")),
        turn(CallGrammar(Style.PYTHON, section_open="[", section_close="]", separator=", "), BARE_CALLS),
        (HELLO, CALLED, assistant("", LOOK, STOP))
    ),
    "braces with quotes of their own": Case(
        BRACES + template(called("<|call|>call:{{ f.name }}{{ braces(f.arguments) }}<|done|>")),
        turn(CallGrammar(
            Style.BRACES, open="<|call|>call:", head=(("", "name"),), begin="{", close="<|done|>", quote="<|q|>"
        ))
    ),
    # around calls
    "a separator of letters": Case(
        template(called(TAG + "{{ '' if loop.last else '; ' }}")), turn(replace(TAGGED, separator="; "))
    ),
    "white space everywhere": Case(
        template(called(
            "{{ '\\n' }}<call>{{ '\\n' }}" + OBJECT + "{{ '\\n' }}</call>{{ '' if loop.last else '\\n' }}",
            after="{{ '\\n' }}"
        )),
        turn(json_call(before="\n", open="<call>\n", close="\n</call>", separator="\n\n", after="\n"))
    ),
    "a prompt that opens whatever comes first": Case(
        template(
            "{% if m.content %}## all\n{{ m.content }}{% endif %}"
            + EACH + "## {{ f.name }}\n" + ARGUMENTS + "{% endfor %}",
            prompt="## "
        ),
        turn(
            json_arguments(open="## ", begin="\n", close=""),
            prompt="<|a|>## ", content=Frame("## all", "\n"), notes=()
        )
    ),
    "no prompt, and a word before an answer": Case(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}" + called(TAG)
        + "{% else %}Bot: {{ m.content }}{% endif %}{% else %}<|u|>{{ m.content }}{% endif %}<|end|>{% endfor %}",
        TurnGrammar(content=Frame("Bot:", " "), calls=TAGGED)
    ),
    "no closing delimiter": Case(
        template(called("<|call|>{{ f.name }}<|args|>" + ARGUMENTS)), turn(json_arguments(close=""))
    ),
    "calls or content": Case(
        template("{% if m.tool_calls and m.content %}{{ raise_exception('either or') }}{% endif %}" + called(TAG)),
        turn(TAGGED, NOT_BESIDE), (HELLO, CALLED, assistant("", LOOK, STOP))
    ),
    "content after calls": Case(
        template("{% if m.tool_calls %}" + EACH + TAG + "{% endfor %}{% endif %}{{ m.content }}"),
        turn(TAGGED, NOT_BESIDE)
    ),
    "content that is opened beside calls only": Case(
        template(
            "{% if m.tool_calls %}<|sep|>{{ m.content }}<|calls|>" + EACH + OBJECT + "{% endfor %}"
            "{% else %}{{ m.content }}{% endif %}"
        ),
        turn(json_call(section_open="<|calls|>"), content=Frame("<|sep|>"))
    ),
    "calls after content in a turn of their own": Case(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.content %}<|a|>{{ m.content }}<|end|>{% endif %}"
        "{% if m.tool_calls %}<|a|>" + EACH + TAG + "{% endfor %}<|end|>{% endif %}"
        "{% else %}<|u|>{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}",
        turn(TAGGED, TWO_TURNS), (HELLO, CALLED, assistant("", LOOK, STOP))
    ),
    "calls that cannot be taken apart": Case(
        template(called("<call>{{ f.name }}</call>")),
        turn(None, "calls were not understood: no arguments are shown; choose a tool_parser")
    )
}  # fmt: skip


def completion(renderer: Renderer, message: Message) -> tuple[list[int], list[int]]:
    """The prompt and the completion of a message."""
    tools = [STAND_IN_TOOL] if renderer.study().needs_tools() else None
    rendered = renderer.render([user("Hi."), message], tools=tools)
    reply = rendered.turns[-1]
    return rendered.token_ids[: reply.start], rendered.token_ids[reply.start : reply.stop]


def summary(response: ParsedResponse) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    calls = [(parsed.name, parsed.arguments, parsed.status) for parsed in response.tool_calls]
    return response.reasoning_content or "", response.content, calls


def expected_summary(message: Message) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    """The summary that the parsed message must have."""
    functions = [one["function"] for one in message.get("tool_calls", [])]
    calls: list[Any] = [(one["name"], one["arguments"], CallStatus.OK) for one in functions]
    return message.get("reasoning_content", ""), message["content"], calls


def as_text(message: Message) -> Message:
    """The same message with arguments as JSON text."""
    calls = [
        one | {"function": one["function"] | {"arguments": json.dumps(one["function"]["arguments"])}}
        for one in message.get("tool_calls", [])
    ]
    return message | {"tool_calls": calls} if calls else message
