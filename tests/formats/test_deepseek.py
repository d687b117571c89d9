"""DeepSeek V3.2 and V4 write what their reference encoders write, and credit every character to its field."""

import copy
import importlib.util
import itertools
import json
from functools import cache
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import conversations
from tests.assets import family_dir
from tests.conversations import ALL, ASK, CONVERSATIONS, HI, PARIS, SIMPLE, SYS, Conversation
from tests.support import examples
from tokentrace.conversation.messages import REASONING_FIELDS
from tokentrace.errors import TemplateError
from tokentrace.formats.deepseek import DEEPSEEK_V4, DEEPSEEK_V32, TASKS
from tokentrace.template import PythonFormat, Rendering, wrap_tools, wrap_variables

ENCODERS = {
    "deepseek-v3.2": ("deepseek_v32_encoding.py", DEEPSEEK_V32),
    "deepseek-v4": ("encoding_dsv4.py", DEEPSEEK_V4),
}
FAMILIES = list(ENCODERS)
assistant, call, developer, result = (
    conversations.assistant,
    conversations.call,
    conversations.developer,
    conversations.result,
)
system, text, tool, user = conversations.system, conversations.text, conversations.tool, conversations.user


def reminder(content: str) -> dict[str, Any]:
    """A message of V4 with the date and place."""
    return {"role": "latest_reminder", "content": content}


# -- the references


@cache
def reference(family: str) -> ModuleType:
    """The family's own encoder, as a module."""
    path = family_dir(family) / ENCODERS[family][0]
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def joined(family: str, message: dict[str, Any]) -> Any:
    """Content in parts as the equivalent text; only V4's encoder takes parts, and only of tools."""
    content, role = message["content"], message["role"]
    blocks = family == "deepseek-v4" and role in ("user", "tool")
    if not isinstance(content, list) or (blocks and role == "tool"):
        return content
    if blocks:
        return "\n\n".join(
            part["text"] if part["type"] == "text" else f"[Unsupported {part['type']}]" for part in content
        )
    return "".join(part["text"] for part in content)


def as_reference(family: str, message: dict[str, Any]) -> dict[str, Any]:
    """A message as the encoder takes it: reasoning under each name, text content, V4's arguments as JSON."""
    message = copy.deepcopy(message)
    if "content" in message:
        message["content"] = joined(family, message)
    reasoning = [message.pop(name) for name in REASONING_FIELDS if name in message]
    for value in reasoning[:1]:
        message |= {"reasoning": value, "reasoning_content": value}
    for tool_call in message.get("tool_calls") or ():
        function = tool_call["function"]
        if family == "deepseek-v4" and not isinstance(function["arguments"], str):
            function["arguments"] = json.dumps(function["arguments"])
    return message


def expected(family: str, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str | Exception:
    """The text that the encoder writes, or the error that it raises."""
    try:
        inputs = [as_reference(family, message) for message in messages]
        if tools and (not inputs or inputs[0]["role"] != "system"):
            inputs.insert(0, {"role": "system", "content": ""})
        if tools:
            inputs[0]["tools"] = copy.deepcopy(tools)
        text: str = reference(family).encode_messages(inputs, **{"thinking_mode": "chat", **options})
    except Exception as error:
        return error
    return text


def render(family: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Rendering:
    form: PythonFormat = ENCODERS[family][1]
    prompt = options.pop("add_generation_prompt", True)
    wrapped = wrap_tools(tools) if tools is not None else None
    variables = wrap_variables(options)
    return form.render(messages, wrapped, add_generation_prompt=prompt, variables=variables)


def check(family: str, messages: list[dict[str, Any]], tools: Any = None, **options: Any) -> Rendering | None:
    """Our text is the reference's, with either flag; or both refuse, ours with its own error (then None)."""
    theirs = expected(family, messages, tools, **options)
    if isinstance(theirs, Exception):
        with pytest.raises(TemplateError) as refusal:
            render(family, messages, tools, **options)
        assert "the template failed" not in str(refusal.value)
        return None
    rendering = render(family, messages, tools, **options)
    assert rendering.text == theirs
    assert render(family, messages, tools, add_generation_prompt=False, **options) == rendering
    check_turns(rendering, messages)
    return rendering


def check_turns(rendering: Rendering, messages: list[dict[str, Any]]) -> None:
    """Text of a field lies in its message's turn; an opener lies in an answer's turn, or in none."""
    for piece, turn, origin in rendering.spans():
        assert origin is None or origin[0] in ("messages", "tools")
        if origin is not None and origin[0] == "messages":
            assert origin[1] == turn
        if origin is None and "<｜Assistant｜>" in piece:
            assert turn == -1 or messages[turn]["role"] == "assistant"
            assert turn == -1 or piece.startswith("<｜Assistant｜>")


def credited(rendering: Rendering, *origin: str | int) -> str:
    """The text that came from a field, or from anything inside it."""
    spans = rendering.spans()
    return "".join(piece for piece, _, source in spans if source and source[: len(origin)] == origin)


def turn_text(rendering: Rendering, index: int) -> str:
    return "".join(piece for piece, turn, _ in rendering.spans() if turn == index)


# -- parity

SEARCH = tool("search", "Find “pages”.", {"q": {"type": "string"}, "n": {"type": "integer"}}, ["q"])
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}

EXTRA: dict[str, Conversation] = {
    "system_response_format": Conversation([SYS | {"response_format": SCHEMA}, HI], SIMPLE),
    "system_without_content": Conversation([{"role": "system"}, HI], SIMPLE),
    "system_none": Conversation([system(None), HI]),
    "user_none": Conversation([user(None)]),
    "user_without_content": Conversation([{"role": "user"}]),
    "user_empty_parts": Conversation([user(text("", ""))]),
    "result_none": Conversation([ASK, assistant("", PARIS), result(None)], SIMPLE),
    "developer_everything": Conversation(
        [SYS, developer("Find it.") | {"tools": [SEARCH], "response_format": SCHEMA}], SIMPLE
    ),
    "result_with_parts": Conversation(
        [ASK, assistant("", PARIS), result([*text("sunny"), {"type": "image_url"}, *text("warm")])], SIMPLE
    ),
    "arguments_not_json": Conversation([ASK, assistant("", call("add", "{oops"))], SIMPLE),
    "arguments_empty_text": Conversation([ASK, assistant("", call("now", ""))], ALL),
    "arguments_json_list": Conversation([ASK, assistant("", call("add", "[1]"))], SIMPLE),
    "arguments_json_null": Conversation([ASK, assistant("", call("add", "null"))], SIMPLE),
    "reminder_none": Conversation([reminder(None), HI]),  # type: ignore[arg-type]
    "task_unknown": Conversation([HI | {"task": "sing"}]),
    "task_unknown_unused": Conversation([HI | {"task": "sing"}, user("b")]),
}
"""Cases that the random conversations below do not cover."""
MATRIX = CONVERSATIONS | EXTRA

MODES = itertools.product(("chat", "thinking"), (True, False))
OPTIONS = [{"thinking_mode": mode, "drop_thinking": drop} for mode, drop in MODES]


@pytest.mark.parametrize("name", MATRIX)
@pytest.mark.parametrize("family", FAMILIES)
def test_text_is_the_references(family: str, name: str) -> None:
    for options in OPTIONS:
        check(family, MATRIX[name].messages, MATRIX[name].tools, **options)


# -- refusals


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("messages", "variables", "at", "error"),
    [
        ([HI, {"role": "critic", "content": "No."}, HI], {}, 1, 'no role "critic"'),
        ([HI, {"role": "critic", "content": "No."}, HI], {"thinking": True}, 1, 'no role "critic"'),
        ([HI, {"content": "No."}], {}, 1, 'no role "None"'),
        ([HI, developer("")], {}, 1, "developer message needs content"),
        ([HI, assistant("", call("add", "[1]"))], {}, 1, "must be an object"),
        ([HI, assistant("", call("add", None))], {}, 1, "must be an object"),
        ([HI, assistant("", {"name": "add", "arguments": {}})], {}, 1, 'needs a "function"'),
        ([system([{"type": "image"}]), HI], {}, 0, "not text"),
        ([SYS | {"tools": [{"name": "add"}]}, HI], {}, 0, 'tool 0 has no "function"'),
        ([HI], {"thinking_mode": "deep"}, None, "thinking_mode"),
    ],
)
def test_refusals_name_the_message(
    family: str, messages: list[dict[str, Any]], variables: dict[str, Any], at: int | None, error: str
) -> None:
    with pytest.raises(TemplateError, match=error) as refusal:
        render(family, messages, **variables)
    assert refusal.value.message == at


# -- turns and origins


@pytest.mark.parametrize("mode", ["chat", "thinking"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_last_opener_is_the_generation_prompt(family: str, mode: str) -> None:
    rendering = render(family, [SYS, HI], thinking_mode=mode)
    think = "<think>" if mode == "thinking" else "</think>"
    assert rendering.text[rendering.tail :] == f"<｜Assistant｜>{think}"
    assert turn_text(rendering, 1) == "<｜User｜>" + HI["content"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tools_are_credited_to_their_schemas(family: str) -> None:
    alone, on_system = render(family, [HI], ALL), render(family, [SYS, HI], ALL)
    for rendering, turn in ((alone, -1), (on_system, 0)):
        for nth, declared in enumerate(ALL):
            function = json.dumps(declared["function"], ensure_ascii=False)
            assert credited(rendering, "tools", nth, "function") == function
        assert {span[1] for span in rendering.spans() if span[2] and span[2][0] == "tools"} == {turn}


# -- random conversations

CONTROL = ["<｜User｜>", "<｜Assistant｜>", "<think>", "</think>", "｜DSML｜", "</result>", "{}", "{0}", "%s"]
words = st.one_of(st.text(max_size=8), st.sampled_from(CONTROL), st.sampled_from(["Hello.", "\n", "  a "]))
contents = st.lists(words, max_size=3).map("".join)
values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), contents),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(words, inner, max_size=2)),
    max_leaves=4,
)
arguments = st.dictionaries(words, values, max_size=3)
extra_keys = st.fixed_dictionaries(
    {}, optional={"task": st.sampled_from([None, *TASKS]), "tools": st.just([SEARCH]), "wo_eos": st.booleans()}
)


@st.composite
def exchanges(draw: st.DrawFn) -> list[dict[str, Any]]:
    """An assistant's turn with calls, and results in some order, at times one too few or too many."""
    names = [f"id{n}" for n in range(draw(st.integers(1, 3)))]
    form = draw(st.sampled_from([arguments, arguments.map(json.dumps)]))
    calls = [call(draw(words), draw(form), name) for name in names]
    thought = draw(st.none() | contents)
    answered = draw(st.permutations(names))[: draw(st.sampled_from([3, 3, 3, 1]))]
    answered += draw(st.sampled_from([[], [], [], ["id9"]]))
    answers = [result(draw(contents), name) for name in answered]
    return [assistant(draw(st.none() | contents), *calls, reasoning=thought), *answers]


@st.composite
def dialogues(draw: st.DrawFn, family: str) -> list[dict[str, Any]]:
    roles = {"user": user, "system": system, "developer": developer}
    if family == "deepseek-v4":
        roles["latest_reminder"] = reminder
    messages: list[dict[str, Any]] = [SYS] if draw(st.booleans()) else []
    kinds = ["user", "user", "answer", "answer", "exchange", "exchange", "result", *roles]
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=7)):
        if kind == "exchange":
            messages += draw(exchanges())
        elif kind == "result":
            messages.append(result(draw(contents)))
        elif kind == "answer":
            messages.append(assistant(draw(contents), reasoning=draw(st.none() | contents)))
        else:
            messages.append(roles[kind](draw(contents)))
    if draw(st.booleans()):
        messages = [message | draw(extra_keys) for message in messages]
    return messages


@pytest.mark.parametrize("family", FAMILIES)
@given(data=st.data())
@settings(max_examples=examples(900), deadline=None)
def test_any_conversation_is_written_as_the_reference_does(family: str, data: st.DataObject) -> None:
    messages = data.draw(dialogues(family))
    if family == "deepseek-v3.2" and messages[0]["role"] == "tool":
        return  # the reference takes the calls of the last message for those before the first
    tools = data.draw(st.sampled_from([None, SIMPLE, ALL]))
    options = data.draw(st.sampled_from(OPTIONS))
    if family == "deepseek-v4":
        options = options | {"reasoning_effort": data.draw(st.sampled_from([None, "high", "max"]))}
    rendering = check(family, messages, tools, **options)
    if rendering is not None:
        check_origins(family, rendering, messages, tools, **options)
        other = [
            message | {key: "x" for key in ("content", *REASONING_FIELDS) if message.get(key)} for message in messages
        ]
        assert scaffold(render(family, other, tools, **options)) == scaffold(rendering)


def scaffold(rendering: Rendering) -> list[Any]:
    """Every span and its turn: fields by their origin, the rest by its text, which no field changes."""
    return [(piece if origin is None else origin, turn) for piece, turn, origin in rendering.spans()]


def test_a_prefix_is_left_open() -> None:
    texts = [render("deepseek-v3.2", [ASK, assistant("Hel") | more]).text for more in ({"prefix": True}, {})]
    assert texts[0] == texts[1].removesuffix("<｜end▁of▁sentence｜>") != texts[1]
    called = [ASK, assistant("Hel", PARIS) | {"prefix": True}]
    assert render("deepseek-v3.2", called).text.endswith("<｜end▁of▁sentence｜>")


def test_a_task_is_the_opener_of_its_answer() -> None:
    rendering = render("deepseek-v4", [user("a") | {"task": "title"}, assistant("b")], thinking=True)
    assert turn_text(rendering, 1) == "<｜title｜>b<｜end▁of▁sentence｜>"


def check_origins(
    family: str, rendering: Rendering, messages: list[dict[str, Any]], tools: Any, **options: Any
) -> None:
    """Content, reasoning and names are credited to their fields, whole; or the format leaves them out."""
    v4, thinking, drop = family == "deepseek-v4", options["thinking_mode"] == "thinking", True
    if v4:  # its encoder keeps all reasoning once there are tools
        carry = any("tools" in message for message in messages if message["role"] not in ("user", "tool"))
        drop = options["drop_thinking"] and not tools and not carry
    asking = ("user", "developer", "tool") if v4 else ("user", "developer")
    last = max((at for at, message in enumerate(messages) if message["role"] in asking), default=-1)
    for index, message in enumerate(messages):
        dropped = v4 and thinking and drop and message["role"] == "developer" and index < last
        content = credited(rendering, "messages", index, "content")
        assert content == ("" if dropped else message["content"] or "")
        thought = credited(rendering, "messages", index, "reasoning_content")
        if not any(message.get("task") for message in messages):  # the answer to a task has no reasoning
            thinks = thinking and (not drop or index > last)
            assert thought == (message.get("reasoning_content") or "" if thinks else "")
        for nth, tool_call in enumerate(message.get("tool_calls", ())):
            field, function = ("messages", index, "tool_calls", nth, "function"), tool_call["function"]
            assert credited(rendering, *field, "name") == function["name"]
            values = (
                json.loads(function["arguments"]) if isinstance(function["arguments"], str) else function["arguments"]
            )
            for key, value in values.items() if isinstance(values, dict) else ():
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                assert credited(rendering, *field, "arguments", key) == key + text
