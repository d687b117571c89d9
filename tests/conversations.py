"""The conversation matrix: small named conversations that together cover every shape a template has to handle.

Plain data. A template may refuse any of them; tests check that a renderer does exactly what the template does.
"""

import copy
import json
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Tool = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages, and the tools declared with them (None: no tools argument at all)."""

    messages: list[Message]
    tools: list[Tool] | None = None


def system(content: Any) -> Message:
    return {"role": "system", "content": content}


def developer(content: str) -> Message:
    return {"role": "developer", "content": content}


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def assistant(content: Any, *calls: dict[str, Any], reasoning: str | None = None) -> Message:
    """An assistant message, with reasoning and calls only if they are passed."""
    message: Message = {"role": "assistant", "content": content}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = list(calls)
    return message


def call(name: str, arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    """A tool call in the shape of the OpenAI API; nine alphanumerics is the only id that Mistral accepts."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, call_id: str = "call00001", name: str | None = None) -> Message:
    """A tool's result, with the tool's name only if it is passed."""
    message: Message = {"role": "tool", "tool_call_id": call_id, "content": content}
    return message if name is None else message | {"name": name}


def text(*parts: str) -> list[dict[str, str]]:
    """Content as a list of text parts."""
    return [{"type": "text", "text": part} for part in parts]


def tool(name: str, description: str, properties: dict[str, Any], required: list[str]) -> Tool:
    """A function declaration."""
    parameters = {"type": "object", "properties": properties, "required": required}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


GET_WEATHER = tool(
    "get_weather",
    "Current weather of a city.",
    {
        "city": {"type": "string", "description": "Name of the city"},
        "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    },
    ["city"],
)
ADD = tool("add", "Add two numbers.", {"a": {"type": "number"}, "b": {"type": "number"}}, ["a", "b"])
RUN_CODE = tool("run_code", "Run Python.", {"code": {"type": "string", "description": "Source"}}, ["code"])
NOW = tool("now", "The current time.", {}, [])
PING: Tool = {"type": "function", "function": {"name": "ping", "description": "Answers pong."}}
BOOK_TRIP = tool(
    "book_trip",
    'Réserver un voyage 旅行 🧳; "quotes", <tags> & \\backslashes\\ stay.\nSecond line.',
    {
        "traveller": {
            "type": "object",
            "description": "Who travels",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": ["integer", "null"], "minimum": 0},
                "vip": {"type": "boolean", "default": False},
            },
            "required": ["name"],
        },
        "class": {"type": "string", "enum": ["économie", "business", "头等"], "default": "économie"},
        "legs": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"from": {"type": "string"}, "to": {"type": "string"}},
                "required": ["from", "to"],
            },
        },
        "budget": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    ["traveller", "legs"],
)

TOOLS: dict[str, Tool] = {
    declared["function"]["name"]: declared for declared in (GET_WEATHER, ADD, RUN_CODE, NOW, PING, BOOK_TRIP)
}
"""Every declared tool, by name."""

SIMPLE = [GET_WEATHER, ADD]
ALL = list(TOOLS.values())

SYS = system("You are a careful assistant.")
HI = user("Hello, who are you?")
ASK = user("What is the weather in Paris?")
ANSWER = assistant("It is sunny in Paris.")
PARIS = call("get_weather", {"city": "Paris", "unit": "celsius"})
ROME = call("get_weather", {"city": "Rome"}, "call00002")
SUNNY = result('{"sky": "sunny", "temp": 21.5}')
RAINY = result("rain, 14 °C", "call00002")
CODE = (
    'import asyncio\n\n\nclass Crawler:\n    """Visits pages; it\'s polite."""\n\n'
    "    def __init__(self, limit: int = 8) -> None:\n        self.seen: set[str] = set()\n"
    "        self.limit = asyncio.Semaphore(limit)\n\n"
    "    async def visit(self, url: str) -> None:\n\t\t# tabs, then spaces   \n"
    "        if url in self.seen or len(url) > 2_048:\n            return\n"
    '        print(f"{url!r:>40}\\t<ok> && \\\\n")\n'
)


def _with_calls(*calls: dict[str, Any]) -> Conversation:
    """A question, a turn of calls, one result per call, and an answer."""
    answers = [result("done", str(entry["id"])) for entry in calls]
    return Conversation([user("Go."), assistant("", *calls), *answers, assistant("Finished.")], ALL)


def _argument(value: Any) -> Conversation:
    """One call whose only argument is the value, as an object."""
    return _with_calls(call("run_code", {"code": value}))


def _content(value: Any) -> Conversation:
    """The value as content of the user and the assistant, between plain turns."""
    return Conversation([SYS, user(value), assistant(value), user("Go on.")])


def _json_arguments(messages: list[Message]) -> list[Message]:
    """The messages with the arguments of every call as JSON text, the only form that some templates accept."""
    changed = copy.deepcopy(messages)
    for entry in (entry for message in changed for entry in message.get("tool_calls", [])):
        entry["function"]["arguments"] = json.dumps(entry["function"]["arguments"])
    return changed


PLAIN = {
    "user": Conversation([HI]),
    "system_user": Conversation([SYS, HI]),
    "system_only": Conversation([SYS]),
    "developer_user": Conversation([developer("Answer in French."), HI]),
    "system_developer_user": Conversation([SYS, developer("Answer in French."), HI]),
    "user_assistant": Conversation([HI, assistant("I am a model.")]),
    "system_user_assistant": Conversation([SYS, HI, assistant("I am a model.")]),
    "multi_turn": Conversation([HI, assistant("A model."), user("Which one?"), assistant("A small one.")]),
    "multi_turn_open": Conversation([SYS, HI, assistant("A model."), user("Which one?")]),
    "system_in_the_middle": Conversation([HI, assistant("Yes?"), system("Be brief."), user("Why?")]),
    "system_at_the_end": Conversation([HI, assistant("Yes?"), user("Why?"), system("Be brief.")]),
    "two_systems": Conversation([SYS, system("Be brief."), HI]),
    "consecutive_users": Conversation([user("One."), user("Two."), assistant("Three.")]),
    "consecutive_assistants": Conversation([HI, assistant("One."), assistant("Two."), user("Three?")]),
    "assistant_first": Conversation([assistant("Welcome."), HI]),
    "empty_system": Conversation([system(""), HI]),
    "long_code": Conversation([user("Review:\n```python\n" + CODE + "```"), assistant(CODE), user("Thanks")]),
}

CONTENTS = {
    "content_leading_newlines": _content("\n\nAfter two newlines"),
    "content_trailing_newlines": _content("Before two newlines\n\n"),
    "content_inner_newlines": _content("One\n\nTwo\n\n\nThree\r\nFour"),
    "content_spaces_around": _content("  spaces around\t "),
    "content_whitespace_only": _content(" \n\t "),
    "content_empty": _content(""),
    "content_cjk": _content("你好，世界。こんにちは！안녕하세요 １２３"),
    "content_emoji": _content("👩\u200d👩\u200d👧\u200d👦 🇫🇷🇯🇵 👍🏽 ❤\ufe0f\u200d🔥 ☕"),
    "content_combining_nfd": _content("cafe\u0301 n\u0303o a\u0323\u0302 \u1112\u1161\u11ab"),
    "content_combining_nfc": _content("caf\u00e9 \u00f1o \u1ead \ud55c"),
    "content_right_to_left": _content("مرحبا بالعالم \u200fשלום\u200e"),
    "content_html": _content("<b>bold</b> & \"quoted\" 'single' &amp; <script>alert(1)</script>"),
    "content_json": _content('{"name": "add", "arguments": {"a": 1}}'),
    "content_jinja": _content("{{ messages }} {% if x %} {# note #}"),
    "content_digits": _content("1234567890 3.14159 1,000,000 0x1F 1e-9"),
    "content_one_text_part": _content(text("Only part.")),
    "content_text_parts": _content(text("First part. ", "Second part.\n", "Third.")),
    "content_system_parts": Conversation([system(text("Be ", "brief.")), HI]),
    "content_image_part": Conversation([user([{"type": "image"}, *text("What is this?")])]),
    "content_none_alone": Conversation([HI, assistant(None), user("Are you there?")]),
}

THOUGHT = "The user greets me.\n\nI should answer politely."
REASONING = {
    "reasoning_last": Conversation([HI, assistant("Hello!", reasoning=THOUGHT)]),
    "reasoning_in_history": Conversation([HI, assistant("Hello!", reasoning=THOUGHT), user("Bye")]),
    "reasoning_every_turn": Conversation(
        [HI, assistant("Hello!", reasoning=THOUGHT), user("2+2?"), assistant("4", reasoning="Easy: 2+2=4.")]
    ),
    "reasoning_empty": Conversation([HI, assistant("Hello!", reasoning=""), user("Bye")]),
    "reasoning_empty_last": Conversation([HI, assistant("Hello!", reasoning="")]),
    "reasoning_newlines_around": Conversation([HI, assistant("\n\nHello!", reasoning="\n\nHm.\n\n")]),
    "reasoning_without_content": Conversation([HI, assistant("", reasoning=THOUGHT)]),
    "reasoning_mixed": Conversation(
        [HI, assistant("A.", reasoning="Think A."), user("B?"), assistant("B."), user("C?")]
    ),
    "reasoning_under_reasoning": Conversation([HI, assistant("Hello!") | {"reasoning": THOUGHT}]),
    "reasoning_under_thinking": Conversation([HI, assistant("Hello!") | {"thinking": THOUGHT}]),
    "think_inline_last": Conversation([HI, assistant(f"<think>\n{THOUGHT}\n</think>\n\nHello!")]),
    "think_inline_in_history": Conversation([HI, assistant(f"<think>\n{THOUGHT}\n</think>\n\nHello!"), user("Bye")]),
    "think_inline_empty": Conversation([HI, assistant("<think>\n\n</think>\n\nHello!"), user("Bye")]),
    "think_inline_only_close": Conversation([HI, assistant("Hm.</think>Hello!"), user("Bye")]),
    "think_inline_and_field": Conversation(
        [HI, assistant("<think>\ninline\n</think>\n\nHello!", reasoning="field"), user("Bye")]
    ),
    "think_in_user": Conversation([user("What does <think>x</think> mean?"), assistant("A tag.")]),
    "reasoning_with_call": Conversation(
        [ASK, assistant("", PARIS, reasoning="I need the weather."), SUNNY, ANSWER], SIMPLE
    ),
    "reasoning_content_and_call": Conversation(
        [ASK, assistant("Let me look.", PARIS, reasoning="I need the weather."), SUNNY], SIMPLE
    ),
}

NESTED = {"when": {"year": 2026, "ok": True, "no": None}, "tags": ["a", "b"], "deep": [[1], {"k": []}]}
ARGUMENTS = {
    "arguments_string": _argument("print('hi')"),
    "arguments_multiline": _argument("def f(x):\n    return x\n\nprint(f(1))\n"),
    "arguments_spaces_around": _argument("    x = 1\n"),
    "arguments_quotes": _argument("say \"hi\" and 'bye' with \\ and \\n and \t tab"),
    "arguments_html": _argument("<a href='x'>1 < 2 && 3 > 2</a>"),
    "arguments_unicode": _argument("naïve 東京 🗼 e\u0301"),
    "arguments_empty_string": _argument(""),
    "arguments_boolean": _argument(True),
    "arguments_false": _argument(False),
    "arguments_null": _argument(None),
    "arguments_integer": _argument(42),
    "arguments_big_integer": _argument(2**70),
    "arguments_negative_float": _argument(-0.125),
    "arguments_float_exponent": _argument(1e-07),
    "arguments_list": _argument([1, "two", None, 3.0]),
    "arguments_nested": _argument(NESTED),
    "arguments_numeric_string": _argument("007"),
    "arguments_json_in_string": _argument('{"a": [1, 2]}'),
    "arguments_several": _with_calls(
        call("book_trip", {"class": "头等", "traveller": {"name": "Zoë", "vip": True}, "legs": [], "budget": None})
    ),
    "arguments_none_at_all": _with_calls(call("now", {})),
    "arguments_json_string": _with_calls(call("add", '{"a": 1, "b": 2.50}')),
    "arguments_json_string_spaced": _with_calls(call("add", '{ "b" : 2,\n "a":1 }')),
    "arguments_json_string_unicode": _with_calls(call("run_code", '{"code": "d\\u00e9j\\u00e0 \\n vu 東"}')),
    "arguments_json_string_empty": _with_calls(call("now", "{}")),
}

CALLS = {
    "tools_unused": Conversation([HI], SIMPLE),
    "tools_unused_system": Conversation([SYS, HI], SIMPLE),
    "tools_all": Conversation([SYS, HI], ALL),
    "tools_one_without_parameters": Conversation([HI], [PING]),
    "tools_empty_list": Conversation([HI], []),
    "call_last": Conversation([ASK, assistant("", PARIS)], SIMPLE),
    "call_last_with_content": Conversation([ASK, assistant("Let me look.", PARIS)], SIMPLE),
    "call_content_none": Conversation([ASK, assistant(None, PARIS), SUNNY], SIMPLE),
    "call_content_none_answered": Conversation([SYS, ASK, assistant(None, PARIS), SUNNY, ANSWER], SIMPLE),
    "call_answered": Conversation([SYS, ASK, assistant("", PARIS), SUNNY, ANSWER], SIMPLE),
    "call_without_declared_tools": Conversation([ASK, assistant("", PARIS), SUNNY, ANSWER]),
    "call_content_with_newlines": Conversation([ASK, assistant("\nLet me look.\n\n", PARIS), SUNNY], SIMPLE),
    "calls_parallel": Conversation([ASK, assistant("", PARIS, ROME), SUNNY, RAINY], SIMPLE),
    "calls_parallel_answered": Conversation(
        [SYS, ASK, assistant("Both.", PARIS, ROME), SUNNY, RAINY, ANSWER, user("Thanks")], SIMPLE
    ),
    "calls_parallel_mixed": _with_calls(PARIS, call("now", {}, "call00002"), call("add", '{"a": 1}', "call00003")),
    "call_json_arguments_last": Conversation(_json_arguments([ASK, assistant(None, PARIS)]), SIMPLE),
    "calls_parallel_json_arguments": Conversation(
        _json_arguments([SYS, ASK, assistant(None, PARIS, ROME), SUNNY, RAINY, ANSWER, user("Thanks")]), SIMPLE
    ),
    "calls_parallel_json_arguments_content": Conversation(
        _json_arguments([ASK, assistant("Both.", PARIS, ROME), SUNNY, RAINY]), SIMPLE
    ),
    "calls_in_sequence": Conversation(
        [ASK, assistant("", PARIS), SUNNY, assistant("", ROME), RAINY, assistant("Done.")], SIMPLE
    ),
    "kimi_ids": Conversation(
        [
            ASK,
            assistant(
                "",
                call("get_weather", {"city": "Paris"}, "functions.get_weather:0"),
                call("add", {"a": 1, "b": 2}, "functions.add:1"),
            ),
            result("sunny", "functions.get_weather:0"),
            result("3", "functions.add:1"),
            assistant("Sunny, and three."),
        ],
        SIMPLE,
    ),
    "result_named": Conversation([ASK, assistant("", PARIS), result("sunny", name="get_weather"), ANSWER], SIMPLE),
    "result_then_user": Conversation([ASK, assistant("", PARIS), SUNNY, user("And Rome?")], SIMPLE),
    "result_empty": Conversation([ASK, assistant("", PARIS), result("")], SIMPLE),
    "result_multiline": Conversation([ASK, assistant("", PARIS), result("\nline 1\n\nline 2\n")], SIMPLE),
    "result_unicode": Conversation([ASK, assistant("", PARIS), result('晴れ ☀️ <ok> & "21" é')], SIMPLE),
    "result_parts": Conversation([ASK, assistant("", PARIS), result(text("sunny", ", warm"))], SIMPLE),
    "result_object": Conversation([ASK, assistant("", PARIS), result({"sky": "sunny", "n": 1})], SIMPLE),
    "result_without_call": Conversation([ASK, result("sunny")], SIMPLE),
}

AGENT = [
    ASK,
    assistant("", PARIS, reasoning="I need the weather."),
    SUNNY,
    assistant("Sunny.", reasoning="The tool says sunny."),
    user("And in Rome?"),
    assistant("", ROME, reasoning="Rome now."),
    RAINY,
    assistant("Rain in Rome.", reasoning="The tool says rain."),
]
AGENTIC = {
    "agentic": Conversation([SYS, *AGENT], SIMPLE),
    "agentic_open": Conversation([*AGENT, user("Compare them.")], SIMPLE),
    "agentic_after_result": Conversation(AGENT[:7], SIMPLE),
    "agentic_content_beside_calls": Conversation(
        [turn | {"content": "Looking."} if "tool_calls" in turn else turn for turn in AGENT], SIMPLE
    ),
    "agentic_content_none": Conversation(
        [turn | {"content": None} if "tool_calls" in turn else turn for turn in AGENT], SIMPLE
    ),
    "agentic_json_arguments": Conversation(_json_arguments(AGENT), SIMPLE),
    "agentic_json_arguments_content_none": Conversation(
        [turn | {"content": None} if "tool_calls" in turn else turn for turn in _json_arguments(AGENT)], SIMPLE
    ),
    "agentic_no_reasoning": Conversation(
        [{key: value for key, value in turn.items() if key != "reasoning_content"} for turn in AGENT], SIMPLE
    ),
    "agentic_long_chain": Conversation(
        [
            SYS,
            user("Sum 1 to 3 step by step."),
            assistant("", call("add", {"a": 1, "b": 2}), reasoning="First 1+2."),
            result("3"),
            assistant("", call("add", {"a": 3, "b": 3}, "call00002"), reasoning="Then 3+3."),
            result("6", "call00002"),
            assistant("", call("now", {}, "call00003"), reasoning="And the time."),
            result("noon", "call00003"),
            assistant("Six, at noon.", reasoning="All known."),
        ],
        ALL,
    ),
}

CONVERSATIONS: dict[str, Conversation] = PLAIN | CONTENTS | REASONING | ARGUMENTS | CALLS | AGENTIC
"""The matrix, by name."""
