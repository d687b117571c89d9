"""What the small templates of `cases` are put together of, and how a turn that one writes is read back."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

from tests.conversations import Message, assistant, call, user
from tokentrace import Renderer
from tokentrace.formats.grammar import CallGrammar, Channels, Frame, Style, TurnGrammar
from tokentrace.parsing.response import CallStatus, ParsedResponse
from tokentrace.study.derive import NO_CALLS
from tokentrace.study.probes import STAND_IN_TOOL

# -- families


HIDDEN: Final = "the template never shows reasoning; it prompts with <think> or looks for </think>"
NOT_BESIDE: Final = "the template shows no content before tool calls"
ONE_CALL: Final = "the template writes one call a turn"
THINK: Final = Frame("<think>", "", "", "</think>", "")
NAME_AND_ARGUMENTS: Final = (("name", ("name",)), ("arguments", ("arguments",)))
# -- what derivation has to find out, each on a template of its own


CONTROLS: Final = (
    *("<|a|>", "<|u|>", "<|end|>", "<|call|>", "<|sep|>", "<|args|>", "<|done|>", "<|calls|>", "<|q|>", "<|x|>"),
)
LOOK: Final = call("look_up", {"place": 'Paris <b> & "é"', "days": 3, "exact": True}, "call00001")
STOP: Final = call("stop", {"where": {"lat": 2.5, "tags": ["a", None]}, "why": "two\nlines"}, "call00002")
SAID: Final = assistant("Hello.")
THOUGHT: Final = assistant("Hello.", reasoning="Well.")
CALLED: Final = assistant("", LOOK)
BESIDE: Final = assistant("Hello.", LOOK)
TWICE: Final = assistant("Hello.", LOOK, STOP)
BOTH: Final = assistant("Hello.", LOOK, reasoning="Well.")
CALLS: Final = (SAID, CALLED, BESIDE, TWICE)
ARGUMENTS: Final = "{{ f.arguments | tojson }}"
OBJECT: Final = '{"name": {{ f.name | tojson }}, "arguments": ' + ARGUMENTS + "}"
VALUE: Final = "{{ v if v is string else v | tojson }}"
EACH: Final = "{% for c in m.tool_calls or [] %}{% set f = c.function %}"
COMMA: Final = "{{ '' if loop.last else ', ' }}"


def template(turn: str, prompt: str = "") -> str:
    """A template whose assistant writes `turn` between ``<|a|>`` and ``<|end|>``."""
    said = "{% if m.role == 'assistant' %}<|a|>" + turn + "<|end|>{% else %}<|u|>{{ m.content }}<|end|>{% endif %}"
    prompted = "{% if add_generation_prompt %}<|a|>" + prompt + "{% endif %}"
    return "{% for m in messages %}" + said + "{% endfor %}" + prompted


def called(one: str, before: str = "", after: str = "") -> str:
    """Content, then each call as `one`, all of them between `before` and `after`."""
    return "{{ m.content or '' }}{% if m.tool_calls %}" + before + EACH + one + "{% endfor %}" + after + "{% endif %}"


def pairs(one: str) -> str:
    return "{% for k, v in f.arguments.items() %}" + one + "{% endfor %}"


def turn(calls: CallGrammar | None = None, *notes: str, **changes: Any) -> TurnGrammar:
    """A grammar with the head and the prompt that `template` gives it."""
    if calls is None and not notes:
        notes = (NO_CALLS,)
    return TurnGrammar(**{"head": "<|a|>", "prompt": "<|a|>", "calls": calls, "notes": notes, **changes})


def json_call(**changes: Any) -> CallGrammar:
    return CallGrammar(**{"style": Style.JSON_CALL, "keys": NAME_AND_ARGUMENTS, **changes})


TAGGED: Final = json_call(open="<call>", close="</call>")
NAMED_TAG: Final[dict[str, Any]] = {"open": '<call name="', "head": (("", "name"),), "begin": '">', "close": "</call>"}
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
    """A template, what is to be found out about it, and messages that it writes so that they are read back."""

    source: str
    grammar: TurnGrammar
    says: tuple[Message, ...] = (SAID,)
    variables: tuple[tuple[str, Any], ...] = ()
    """Template variables with which the messages are rendered."""


def completion(renderer: Renderer, message: Message) -> tuple[list[int], list[int]]:
    """The prompt and the completion that say a message."""
    tools = [STAND_IN_TOOL] if renderer.study().needs_tools() else None
    rendered = renderer.render([user("Hi."), message], tools=tools)
    said = rendered.turns[-1]
    return rendered.token_ids[: said.start], rendered.token_ids[said.start : said.stop]


def summary(response: ParsedResponse) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    calls = [(parsed.name, parsed.arguments, parsed.status) for parsed in response.tool_calls]
    return response.reasoning_content or "", response.content, calls


def meant(message: Message) -> tuple[str, str, list[tuple[str | None, Any, CallStatus]]]:
    """What a parser has to say of a message."""
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
