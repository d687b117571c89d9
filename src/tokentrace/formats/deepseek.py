"""DeepSeek V3.2 and V4: formats that ship as a Python encoder instead of a template.

Both write the text of their reference encoder (`encoding_dsv32.py`, `encoding_dsv4.py`),
character for character, and refuse what it refuses. Differences:

- Tools are an argument. As in SGLang, they go on a first system message, else before all.
- The references end a user's message with ``<｜Assistant｜>`` and a think token. Here that opener
  belongs to the assistant's turn, and is written with and without ``add_generation_prompt``.
- Content in parts becomes their texts, with an empty line between them where V4 writes one.
- Unknown roles are refused.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..errors import TemplateError
from ..template.chat_template import PythonFormat
from ..template.jsonify import dumps
from ..template.strings import join_with
from ..template.trace import Trace
from ..template.traced import TracedList, plain, text_of, wrap

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, END_THINK = "<think>", "</think>"
DSML = "｜DSML｜"

Tools = TracedList | None
V32_ROLES = ("system", "developer", "user", "assistant", "tool")
V4_ROLES = (*V32_ROLES, "latest_reminder")
ASKING = ("user", "developer")
"""Turns after the last message of these roles keep their reasoning."""
TASKS = ("action", "query", "authority", "domain", "title", "read_url")
"""What a message's ``task`` can ask V4 for instead of an answer."""
RESPONSE_FORMAT = "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"


class ToolMarkup(NamedTuple):
    """How the formats differ in showing and calling tools; `block` is the tag around calls."""

    block: str
    before_schemas: str
    after_schemas: str
    tolerant: bool
    """Arguments that are not JSON become one parameter, and are not refused."""


def _example(block: str, name: str) -> str:
    return (
        f'<{DSML}{block}>\n<{DSML}invoke name="${name}">\n'
        f'<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>\n'
        f'...\n</{DSML}invoke>\n<{DSML}invoke name="${name}2">\n...\n</{DSML}invoke>\n</{DSML}{block}>\n'
    )


V32 = ToolMarkup(
    block="function_calls",
    before_schemas=(
        "## Tools\n"
        "You have access to a set of tools you can use to answer the user's question.\n"
        f'You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of '
        "your reply to the user:\n"
        f"{_example('function_calls', 'FUNCTION_NAME')}"
        "String and scalar parameters should be specified as is without any escaping or quotes, while lists "
        'and objects should use JSON format. The "string" attribute should be set to "true" for string type '
        'parameters and "false" for other types (numbers, booleans, arrays, objects).\n'
        "If the thinking_mode is enabled, then after function results you should strongly consider "
        "outputting a thinking block. Here is an example:\n"
        f"<{DSML}function_calls>\n...\n</{DSML}function_calls>\n"
        "<function_results>\n...\n</function_results>\n"
        f"{THINK}...thinking about results{END_THINK}\n"
        "Here are the functions available in JSONSchema format:\n"
        "<functions>\n"
    ),
    after_schemas="\n</functions>\n",
    tolerant=False,
)

V4 = ToolMarkup(
    block="tool_calls",
    before_schemas=(
        "## Tools\n\n"
        "You have access to a set of tools to help answer the user's question. You can invoke tools by "
        f'writing a "<{DSML}tool_calls>" block like the following:\n\n'
        f"{_example('tool_calls', 'TOOL_NAME')}\n"
        'String parameters should be specified as is and set `string="true"`. For all other types (numbers, '
        'booleans, arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
        f"If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning inside "
        f"{THINK}...{END_THINK} BEFORE any tool calls or final response.\n\n"
        f"Otherwise, output directly after {END_THINK} with tool calls or final response.\n\n"
        "### Available Tool Schemas\n\n"
    ),
    after_schemas=(
        "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
    ),
    tolerant=True,
)

MAX_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the "
    "root cause, rigorously stress-testing your logic against all potential paths, edge cases, and "
    "adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)


class MessageText(NamedTuple):
    """What a message writes, and the opener of the answer that may follow it."""

    message: Any
    pieces: Iterable[str]
    opener: str = ""


def deepseek_v32(
    messages: TracedList, tools: Tools, add_generation_prompt: bool, trace: Trace, **variables: Any
) -> Iterator[str]:
    """The pieces of a DeepSeek V3.2 prompt.

    Variables: ``thinking`` (or ``enable_thinking``; default False), or ``thinking_mode``
    ("chat" or "thinking"); ``drop_thinking`` (default True). Reasoning is written only after
    the last user message. With `drop_thinking` an earlier developer message, at which the
    reference fails, is refused. An assistant's message with ``prefix`` is left open.
    """
    thinking = _thinking("DeepSeek V3.2", messages, V32_ROLES, variables)
    roles = [plain(message.get("role")) for message in messages]
    last = _last_asking(roles)
    if thinking and variables.get("drop_thinking", True) and "developer" in roles[: max(last, 0)]:
        problem = "DeepSeek V3.2 cannot drop a developer message that comes before the last user message"
        advice = "pass drop_thinking=False, or make it a system message"
        raise TemplateError(f"{problem}; {advice}", message=roles.index("developer"))
    yield BOS
    yield from _turn_pieces(V32, messages, tools, _v32_turns(messages, tools, thinking, last), trace)


def _v32_turns(messages: TracedList, tools: Tools, thinking: bool, last: int) -> Iterator[MessageText]:
    caller = -1  # the message that a run of tool results answers
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        pieces: Iterable[str]
        opener = ""
        if role == "tool":
            answered = messages[caller] if caller >= 0 else {}
            nth, is_call = index - caller, answered.get("role") == "assistant"
            calls = len(answered.get("tool_calls") or ()) if is_call else 0
            if calls < nth:
                advice = "DeepSeek V3.2 needs results right after the assistant's calls, and at most one per call"
                raise TemplateError(f"this tool message answers no tool call; {advice}", message=index)
            before = "\n\n<function_results>\n<result>" if nth == 1 else "\n<result>"
            after = "</result>\n</function_results>" if nth == calls else "</result>"
            pieces = (before, _text(content, index), after)
            opener = "\n\n" + _think(thinking and index > last) if nth == calls else ""
        elif role == "assistant":
            pieces = _v32_assistant(message, index, thinking and index > last)
        elif role == "system":
            pieces = _system(V32, message, index, tools)
        else:
            pieces = [USER]
            if role == "developer":
                pieces += _attachments(V32, message, index)
                pieces.append("\n\n# The user's message is: ")
            pieces.append(_text(content, index))
            opener = ASSISTANT + _think(thinking and index == last)
        caller = caller if role == "tool" else index
        yield MessageText(message, pieces, opener)


def _v32_assistant(message: Any, index: int, thinks: bool) -> Iterator[str]:
    calls = message.get("tool_calls")
    if thinks and not (message.get("reasoning_content") or calls):
        problem = (
            "in thinking mode, DeepSeek V3.2 needs reasoning or tool calls after the last user message"
        )
        raise TemplateError(
            f"{problem}; add reasoning_content, or render with thinking=False", message=index
        )
    if message.get("prefix") and not calls:
        return iter((_text(message.get("content") or "", index),))
    return _assistant(V32, message, index, thinks=thinks, ends=True)


@dataclass(slots=True)
class Group:
    """A run of user and tool messages, which V4 writes as one message, or any other message."""

    role: str
    members: list[tuple[int, Any]]
    task: Any = None


def deepseek_v4(
    messages: TracedList, tools: Tools, add_generation_prompt: bool, trace: Trace, **variables: Any
) -> Iterator[str]:
    """The pieces of a DeepSeek V4 prompt.

    Variables: V3.2's. In thinking mode without tools, ``drop_thinking`` leaves out reasoning
    and developer messages before the last user or tool message. ``reasoning_effort`` is None,
    "high" (the same) or "max". A message may have ``task`` (one of `TASKS`), an assistant's
    also ``wo_eos`` (leave the turn open). Tool results are part of a user's turn, in the order
    of their calls.
    """
    thinking = _thinking("DeepSeek V4", messages, V4_ROLES, variables)
    effort = variables.get("reasoning_effort")
    if plain(effort) not in (None, "high", "max"):
        raise TemplateError(
            f'DeepSeek V4 supports reasoning_effort "high" and "max", not "{plain(effort)}"'
        )
    groups = _grouped(messages)
    _order_results(groups)
    carried = any(group.role != "user" and group.members[0][1].get("tools") for group in groups)
    drop = bool(variables.get("drop_thinking", True)) and not (tools or carried)
    if thinking and drop:
        last = _last_asking([group.role for group in groups])
        groups = [group for at, group in enumerate(groups) if group.role != "developer" or at >= last]
    yield BOS
    if thinking and effort == "max":
        yield MAX_EFFORT
    yield from _turn_pieces(V4, messages, tools, _v4_turns(groups, tools, thinking, drop), trace)


def _v4_turns(groups: list[Group], tools: Tools, thinking: bool, drop: bool) -> Iterator[MessageText]:
    last = _last_asking([group.role for group in groups])
    for at, group in enumerate(groups):
        follower = groups[at + 1].role if at + 1 < len(groups) else None
        opener = ""
        if follower in (None, "assistant", "latest_reminder"):
            opener = _v4_opener(group, thinking, thinking and (not drop or at >= last))
        for nth, (index, message) in enumerate(group.members):
            pieces: Iterable[str]
            if group.role == "user":
                content, is_result = message.get("content", ""), message.get("role") == "tool"
                if not is_result and not isinstance(content, str | list):
                    raise TemplateError("the content of a user message must be text", message=index)
                lead, text = "\n\n" if nth else USER, _text(content, index, blocks=True)
                pieces = (lead, "<tool_result>", text, "</tool_result>") if is_result else (lead, text)
            elif group.role == "assistant":
                # the answer to a task comes right after the task's own token, without reasoning
                thinks = thinking and (not drop or at > last) and (at == 0 or groups[at - 1].task is None)
                pieces = _assistant(V4, message, index, thinks=thinks, ends=not message.get("wo_eos"))
            elif group.role == "system":
                pieces = _system(V4, message, index, tools)
            elif group.role == "developer":
                pieces = (USER, _text(message.get("content"), index), *_attachments(V4, message, index))
            else:
                pieces = (REMINDER, _text(message.get("content"), index))
            yield MessageText(message, pieces, opener if nth + 1 == len(group.members) else "")


def _v4_opener(group: Group, thinking: bool, thinks: bool) -> str:
    if group.task is None:
        return ASSISTANT + _think(thinks) if group.role in ASKING else ""
    if group.task not in TASKS:
        problem = f'DeepSeek V4 has no task "{group.task}"; it has {", ".join(TASKS)}'
        raise TemplateError(problem, message=group.members[0][0])
    token = f"<｜{group.task}｜>"
    return ASSISTANT + _think(thinking) + token if group.task == "action" else token


def _grouped(messages: TracedList) -> list[Group]:
    groups: list[Group] = []
    for index, message in enumerate(messages):
        role = plain(message.get("role"))
        joins = bool(groups) and groups[-1].role == "user"
        if joins and (role == "tool" or (role == "user" and groups[-1].task is None)):
            groups[-1].members.append((index, message))
        elif role == "tool":
            groups.append(Group("user", [(index, message)]))
        else:
            groups.append(Group(role, [(index, message)], plain(message.get("task"))))
    return groups


def _order_results(groups: list[Group]) -> None:
    order: dict[str, int] = {}
    for group in groups:
        if group.role == "assistant" and group.members[0][1].get("tool_calls"):
            calls = enumerate(group.members[0][1]["tool_calls"])
            ids = (
                (nth, plain(call.get("id") or call.get("function", {}).get("id"))) for nth, call in calls
            )
            order = {call_id: nth for nth, call_id in ids if call_id}
        elif group.role == "user" and order:
            results = [member for member in group.members if member[1]["role"] == "tool"]
            results.sort(key=lambda member: order.get(plain(member[1].get("tool_call_id")), 0))
            ordered = iter(results)
            group.members = [next(ordered) if m[1]["role"] == "tool" else m for m in group.members]


def _turn_pieces(
    markup: ToolMarkup, messages: TracedList, tools: Tools, turns: Iterator[MessageText], trace: Trace
) -> Iterator[str]:
    """The tools, if no system message has them; then the turns with their openers."""
    if tools and not (messages and messages[0].get("role") == "system"):
        yield from _tools(markup, tools, None)
    opener = ""
    for turn in turns:
        answers = turn.message.get("role") == "assistant"
        if not answers:
            yield opener
        trace.enter()
        trace.show(turn.message, None, trace.out)
        if answers:
            yield opener
        yield from turn.pieces
        trace.leave(trace.out)
        opener = turn.opener
    yield opener


def _system(markup: ToolMarkup, message: Any, index: int, tools: Tools) -> Iterator[str]:
    yield _text(message.get("content") or "", index)
    yield from _attachments(markup, message, index, None if index else tools)


def _attachments(markup: ToolMarkup, message: Any, index: int, tools: Tools = None) -> Iterator[str]:
    if message.get("role") == "developer" and not message.get("content"):
        raise TemplateError("a developer message needs content", message=index)
    if schemas := tools or message.get("tools"):
        yield from _tools(markup, schemas, index)
    if schema := message.get("response_format"):
        yield from (RESPONSE_FORMAT, dumps(schema))


def _tools(markup: ToolMarkup, tools: Sequence[Any], index: int | None) -> Iterator[str]:
    yield f"\n\n{markup.before_schemas}"
    for nth, tool in enumerate(tools):
        if not isinstance(tool, dict) or "function" not in tool:
            raise TemplateError(f'tool {nth} has no "function"; use the OpenAI format', message=index)
        yield "\n" if nth else ""
        yield dumps(tool["function"])
    yield markup.after_schemas


def _assistant(markup: ToolMarkup, message: Any, index: int, *, thinks: bool, ends: bool) -> Iterator[str]:
    if thinks:
        yield from (_text(message.get("reasoning_content") or "", index), END_THINK)
    yield _text(message.get("content") or "", index)
    if calls := message.get("tool_calls"):
        yield f"\n\n<{DSML}{markup.block}>\n"
        for nth, call in enumerate(calls):
            yield "\n" if nth else ""
            yield from _call(markup, call, index)
        yield f"\n</{DSML}{markup.block}>"
    if ends:
        yield EOS


def _call(markup: ToolMarkup, call: Any, index: int) -> Iterator[str]:
    function = call.get("function")
    if not isinstance(function, dict) or "name" not in function or "arguments" not in function:
        raise TemplateError('a tool call needs a "function" with "name" and "arguments"', message=index)
    arguments = _arguments(markup, function, index)
    yield from (f'<{DSML}invoke name="', text_of(function["name"]), '">' if arguments else '">\n')
    for name, value in arguments:
        is_string = isinstance(value, str)
        marker = f'" string="{"true" if is_string else "false"}">'
        yield from (f'\n<{DSML}parameter name="', text_of(name), marker)
        yield from (value if is_string else dumps(value), f"</{DSML}parameter>")
    yield f"\n</{DSML}invoke>"


def _arguments(markup: ToolMarkup, function: Any, index: int) -> Sequence[tuple[Any, Any]]:
    """The arguments of a call, with the origin of their text if they were parsed."""
    arguments = function["arguments"]
    if isinstance(arguments, str):
        try:
            arguments = wrap(json.loads(plain(arguments)), function.origin.at("arguments"))
        except ValueError as error:
            if markup.tolerant:
                return [("arguments", arguments)]
            raise TemplateError(f"a tool call's arguments are not JSON: {error}", message=index) from None
    if not isinstance(arguments, dict):
        raise TemplateError("a tool call's arguments must be an object", message=index)
    return list(arguments.items())


def _text(content: Any, index: int, *, blocks: bool = False) -> str:
    """Content as text, with `blocks` as V4 writes its parts."""
    if not isinstance(content, list):
        return text_of(content)
    texts: list[str] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") == "text":
            texts.append(part.get("text", ""))
        elif isinstance(part, dict) and blocks:
            texts.append(join_with("", ("[Unsupported ", text_of(part.get("type")), "]")))
        else:
            what = "text" if isinstance(part, dict) else "an object"
            raise TemplateError(
                f"DeepSeek takes text only; a part of the content is not {what}", message=index
            )
    return join_with("\n\n" if blocks else "", texts)


def _thinking(name: str, messages: TracedList, roles: Sequence[str], variables: dict[str, Any]) -> bool:
    """True in thinking mode. Raises TemplateError for an unknown mode or role."""
    for index, message in enumerate(messages):
        role = plain(message.get("role"))
        if role not in roles:
            raise TemplateError(f'{name} has no role "{role}"; it has {", ".join(roles)}', message=index)
    mode = plain(variables.get("thinking_mode"))
    if mode is None:
        return bool(variables.get("thinking") or variables.get("enable_thinking"))
    if mode not in ("chat", "thinking"):
        raise TemplateError(f'thinking_mode must be "chat" or "thinking", not "{mode}"')
    return bool(mode == "thinking")


def _think(thinks: bool) -> str:
    return THINK if thinks else END_THINK


def _last_asking(roles: Sequence[Any]) -> int:
    return max((at for at, role in enumerate(roles) if role in ASKING), default=-1)


_MODES = ("enable_thinking", "thinking_mode", "drop_thinking")
DEEPSEEK_V32 = PythonFormat(
    "deepseek_v3.2", deepseek_v32, constants=V32_ROLES, variables=("thinking",), also=_MODES
)
DEEPSEEK_V4 = PythonFormat(
    "deepseek_v4",
    deepseek_v4,
    constants=V4_ROLES,
    variables=("thinking",),
    also=(*_MODES, "reasoning_effort"),
)
