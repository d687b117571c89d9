"""Requests of OpenAI's Responses API, read. Pure.

Also read: ``top_k``, ``seed``, ``stop`` and ``chat_template_kwargs``, as in chat completions. `token_fields` says how
one asks for ids.

Of tools, functions are served. Those in a namespace (Codex has the tools of MCP servers in such) are functions too: the
model knows them by a name with the namespace in front, the client is told the two apart. Tools that OpenAI runs itself
do not exist here: the model is not told of them, and the answer says so. All others are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..conversation.place import Place
from ..conversation.responses import from_responses, in_namespace
from ..conversation.values import check_depth
from ..errors import shown
from .requests import Body, Request, RequestError, offered, one_of, refusing, structure_of, thinking_hints
from .token_fields import TokenFields, asked_fields

PREFIX: Final = "resp_"
"""What the ids of responses begin with; the rest is `Head.id`, and `Request.previous`."""

_LOGPROBS: Final = "message.output_text.logprobs"
_ENCRYPTED: Final = "reasoning.encrypted_content"
_INCLUDED: Final = (
    _LOGPROBS,
    _ENCRYPTED,
    *("file_search_call.results", "web_search_call.results", "web_search_call.action.sources"),
    *("message.input_image.image_url", "computer_call_output.output.image_url", "code_interpreter_call.outputs"),
)
"""What may be asked for. Of tools that are not served there is nothing to include."""

_SUMMARIES: Final = ("auto", "concise", "detailed")

_HOSTED: Final = re.compile(
    r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|code_interpreter|file_search|tool_search"
)
"""Tools that OpenAI runs itself, and the one by which its models find further tools."""

Namespaces = dict[str, list[str]]
"""For the name that a model knows a function by: its namespace, and its name there."""


def bare_id(id: str) -> str | None:
    """The `Head.id` of a response's id; None where it cannot be one of ours."""
    bare = id.removeprefix(PREFIX)
    return bare if bare != id and bare.isascii() and bare.isalnum() else None


def read_responses(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /v1/responses``. RequestError names the field that cannot be served."""
    said = Body(body)
    _refuse(said)
    said.skip("service_tier", "prompt_cache_retention", "prompt_cache_options", "access_programs", "image")
    said.get("stream_options", dict, "an object")
    wishes: list[str] = []
    ignored: list[str] = []
    previous = _previous(said)
    instructions = said.get("instructions", str, "a string")
    references: dict[int, list[str]] = {}
    messages = _messages(said, instructions, references, open_calls=previous is not None)
    tools, namespaces = _tools(said, wishes)
    choice = _tool_choice(said, tools, wishes)
    included = _included(said)
    top_logprobs = said.whole("top_logprobs", 0, 20)
    reasoning, hints = _reasoning(said, wishes, ignored)
    text, structure = _text(said, wishes, ignored)
    ways = asked_fields(said, headers, TokenFields.NEMO_GYM, (TokenFields.TOKENTRACE, TokenFields.NEMO_GYM))
    parallel = said.flag("parallel_tool_calls", True)
    if not parallel and tools:
        wishes.append("parallel_tool_calls")
    truncation = one_of("truncation", said.get("truncation", str, "a string", "disabled"), ("auto", "disabled"))
    if truncation == "auto":
        wishes.append("truncation")
    most_calls = said.whole("max_tool_calls", 1)
    if most_calls is not None:
        wishes.append("max_tool_calls")
    limit, sampling = said.whole("max_output_tokens", 1), said.sampling()
    logprobs = top_logprobs or 0 if top_logprobs or _LOGPROBS in included else None
    echo = {
        "previous_response_id": None if previous is None else PREFIX + previous,
        "max_output_tokens": limit,
        "temperature": sampling["temperature"],
        "top_p": sampling["top_p"],
        "logprobs": logprobs,
        "tool_choice": choice,
        "parallel_tool_calls": parallel,
        "reasoning": reasoning,
        "text": text,
        "truncation": truncation,
        "max_tool_calls": most_calls,
        "metadata": _metadata(said),
        "encrypted": _ENCRYPTED in included,
        "token_fields": [way.value for way in ways],
        **({"namespaces": namespaces} if namespaces else {}),
        **{name: said.get(name, str, "a string") for name in ("user", "safety_identifier", "prompt_cache_key")},
    }
    return Request(
        messages=messages,
        tools=tools or None,
        **sampling,
        max_tokens=limit,
        stop=said.texts("stop", 16),
        logprobs=logprobs,
        calls_allowed=choice != "none",
        structure=structure,
        hints=hints,
        previous=previous,
        references={at: tuple(ids) for at, ids in references.items()},
        instructions=1 if instructions else 0,
        stored=said.flag("store", True),
        ignored=(*said.unread, *ignored),
        wishes=tuple(wishes),
        echo=echo,
    )


def _refuse(said: Body) -> None:
    said.refuse("background", (False,), "responses are not made in the background")
    said.refuse("conversation", (), "conversations are not kept by name; send the input, or previous_response_id")
    said.refuse("prompt", (), "prompts are not kept here; send instructions and input")
    said.refuse("context_management", ([],), "the gateway does not rewrite a conversation")
    said.refuse("moderation", (), "nothing is moderated")
    said.refuse_unserved()


def _previous(said: Body) -> str | None:
    id = said.get("previous_response_id", str, "a string")
    if id is None:
        return None
    found = bare_id(id)
    if found is None:
        problem = f"there is no response {shown(id)}; ids of responses begin with {PREFIX}"
        raise RequestError(problem, field="previous_response_id", code="previous_response_not_found")
    return found


def _messages(
    said: Body, instructions: str | None, references: dict[int, list[str]], *, open_calls: bool
) -> list[Mapping[str, Any]]:
    given = said.get("input", (str, list), "a string or a list of items")
    if given is None:
        raise RequestError("is missing; send a string or a list of items", field="input")
    with refusing("input"):
        return from_responses(given, instructions, open_calls=open_calls, references=references)


def _tools(said: Body, wishes: list[str]) -> tuple[list[dict[str, Any]], Namespaces]:
    """The functions in the shape of chat completions. Tools that the model is not told of are added to `wishes`."""
    given = said.get("tools", list, "a list of tools", [])
    tools: list[dict[str, Any]] = []
    namespaces: Namespaces = {}
    with refusing():
        for at, each in enumerate(given):
            place = Place(field=f"tools.{at}")
            tool = place.mapping(each)
            kind = place.string(tool, "type")
            if kind == "namespace":
                tools += _functions(place, tool, namespaces, wishes)
            elif _HOSTED.fullmatch(kind):
                wishes.append(f"tools.{at} ({kind})")
            else:
                tools.append(_function(place, tool))
        _check_names(tools, namespaces)
    return tools, namespaces


def _functions(
    place: Place, tool: Mapping[str, Any], namespaces: Namespaces, wishes: list[str]
) -> list[dict[str, Any]]:
    """The functions of a namespace. What describes the namespace is not shown to the model."""
    namespace = place.string(tool, "name")
    if tool.get("description"):
        wishes.append(f"{place.field}.description")
    given = tool.get("tools")
    if not isinstance(given, list):
        raise place.at("tools").wrong(given, "a list of functions")
    made = []
    for at, each in enumerate(given):
        inner = place.at("tools").at(at)
        function = _function(inner, inner.mapping(each))
        name = function["function"]["name"]
        full = in_namespace(namespace, name)
        namespaces[full] = [namespace, name]
        made.append({**function, "function": {**function["function"], "name": full}})
    return made


def _check_names(tools: list[dict[str, Any]], namespaces: Namespaces) -> None:
    counts = Counter(tool["function"]["name"] for tool in tools)
    for name in namespaces:
        if counts[name] > 1:
            raise Place(field="tools").error(f"{shown(name)} is the name of two functions")


def _function(place: Place, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function in the shape of chat completions. Whether it is ``strict`` is not shown to the model."""
    if (kind := place.string(tool, "type")) != "function":
        raise place.at("type").error(f"tools of type {shown(kind)} are not served; only functions are")
    if tool.get("function") is not None:
        place = place.at("function")
        tool = place.mapping(tool["function"])
    for name in ("defer_loading", "async"):
        if tool.get(name):
            raise place.at(name).error("is not served; leave it out")
    made: dict[str, Any] = {"name": place.string(tool, "name")}
    if tool.get("description") is not None:
        made["description"] = place.string(tool, "description")
    if tool.get("parameters") is not None:
        if not isinstance(tool["parameters"], Mapping):
            raise place.at("parameters").wrong(tool["parameters"], "a JSON schema")
        check_depth(tool["parameters"], place.at("parameters"))
        made["parameters"] = tool["parameters"]
    return {"type": "function", "function": made}


def _tool_choice(said: Body, tools: list[dict[str, Any]], wishes: list[str]) -> Any:
    """What is to be called, as the answer repeats it. Only that nothing is to be called can be kept to."""
    choice = said.get("tool_choice", (str, dict), "a string or an object", "auto")
    if isinstance(choice, str):
        one_of("tool_choice", choice, ("none", "auto", "required"))
        if choice == "required":
            wishes.append("tool_choice")
        return choice
    wishes.append("tool_choice")
    match choice.get("type"):
        case "function":
            return {"type": "function", "name": offered("tool_choice.name", choice.get("name"), tools)}
        case "allowed_tools":
            mode = one_of("tool_choice.mode", choice.get("mode", "auto"), ("auto", "required"))
            allowed = choice.get("tools")
            if not isinstance(allowed, list) or not all(isinstance(one, Mapping) for one in allowed):
                raise RequestError("must be a list of tools", field="tool_choice.tools")
            found = [offered("tool_choice.tools", one.get("name"), tools) for one in allowed]
            return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in found]}
    raise RequestError(
        f"{shown(choice.get('type'))} is not served; use none, auto, required or a function", field="tool_choice.type"
    )


def _included(said: Body) -> tuple[str, ...]:
    included = said.texts("include", len(_INCLUDED))
    for name in included:
        one_of("include", name, _INCLUDED)
    return included


def _reasoning(said: Body, wishes: list[str], ignored: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings as the answer repeats them, and what they hint to a template. Reasoning is never summarised."""
    given = said.inside("reasoning")
    effort = given.get("effort", str, "a string")
    hints = thinking_hints(None, effort, field="reasoning.effort")
    summaries = {name: given.get(name, str, "a string") for name in ("summary", "generate_summary")}
    for name, wanted in summaries.items():
        if wanted is not None:
            one_of(f"reasoning.{name}", wanted, _SUMMARIES)
            wishes.append(f"reasoning.{name}")
    ignored += given.unread
    return {"effort": effort, "summary": summaries["summary"]}, hints


def _text(said: Body, wishes: list[str], ignored: list[str]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The settings as the answer repeats them, and the structure that the content has to have."""
    given = said.inside("text")
    echo: dict[str, Any] = {"format": {"type": "text"}}
    verbosity, form = given.get("verbosity", str, "a string"), given.get("format", Mapping, "an object")
    if verbosity is not None:
        echo["verbosity"] = one_of("text.verbosity", verbosity, ("low", "medium", "high"))
        wishes.append("text.verbosity")
    ignored += given.unread
    if form is None:
        return echo, None
    kind, schema, name = form.get("type"), form.get("schema"), form.get("name")
    structure = structure_of(kind, schema, "text.format")
    if structure is not None:
        echo["format"] = {"type": kind}
    if kind == "json_schema":
        if not isinstance(name, str):
            raise RequestError("must be a string", field="text.format.name")
        echo["format"] |= {"name": name, "schema": schema, "strict": bool(form.get("strict"))}
    return echo, structure


def _metadata(said: Body) -> Mapping[str, str]:
    metadata: Mapping[str, str] = said.get("metadata", dict, "an object", {})
    if len(metadata) > 16 or not all(
        isinstance(value, str) and len(value) <= 512 and len(name) <= 64 for name, value in metadata.items()
    ):
        raise RequestError(
            "must be at most 16 strings, none longer than 512, under names of at most 64", field="metadata"
        )
    return metadata
