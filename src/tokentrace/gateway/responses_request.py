"""Requests of OpenAI's Responses API, read. Pure.

Also read: ``top_k``, ``seed``, ``stop`` and ``chat_template_kwargs``, as in chat completions. `token_fields` says how
one asks for ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.responses import from_responses
from ..errors import shown
from .chat_request import UNSERVED, schema_structure, template_variables
from .hints import thinking_hints
from .requests import NOT_OFFERED, Body, Request, RequestError, refusing
from .responses_tools import read_tools
from .token_fields import HEADER, TokenFields, asked_fields

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
    tools, namespaces = read_tools(said, wishes)
    choice = _tool_choice(said, tools, wishes)
    included = _included(said)
    top_logprobs = said.whole("top_logprobs", 0, 20)
    reasoning, hints = _reasoning(said, wishes, ignored)
    text, structure = _text(said, wishes, ignored)
    ways = _ways(said, headers)
    parallel = said.flag("parallel_tool_calls", True)
    if not parallel and tools:
        wishes.append("parallel_tool_calls")
    truncation = _one_of("truncation", said.get("truncation", str, "a string", "disabled"), ("auto", "disabled"))
    if truncation == "auto":
        wishes.append("truncation")
    most_calls = said.whole("max_tool_calls", 1)
    if most_calls is not None:
        wishes.append("max_tool_calls")
    limit, temperature, top_p = said.whole("max_output_tokens", 1), said.temperature(2), said.top_p()
    logprobs = top_logprobs or 0 if top_logprobs or _LOGPROBS in included else None
    echo = {
        "previous_response_id": None if previous is None else PREFIX + previous,
        "max_output_tokens": limit,
        "temperature": temperature,
        "top_p": top_p,
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
        model=said.get("model", str, "a string", ""),
        max_tokens=limit,
        temperature=temperature,
        top_p=top_p,
        top_k=said.top_k(),
        seed=said.whole("seed", 0, 2**63 - 1),
        stop=said.texts("stop", 16),
        stream=said.flag("stream"),
        logprobs=logprobs,
        token_ids=bool(ways),
        calls_allowed=choice != "none",
        structure=structure,
        variables=template_variables(said),
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
    for name, harmless in UNSERVED.items():
        said.refuse(name, harmless, NOT_OFFERED)


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


def _tool_choice(said: Body, tools: list[dict[str, Any]], wishes: list[str]) -> Any:
    """What is to be called, as the answer repeats it. Only that nothing is to be called can be kept to."""
    choice = said.get("tool_choice", (str, dict), "a string or an object", "auto")
    if isinstance(choice, str):
        _one_of("tool_choice", choice, ("none", "auto", "required"))
        if choice == "required":
            wishes.append("tool_choice")
        return choice
    names = {tool["function"]["name"] for tool in tools}
    wishes.append("tool_choice")
    match choice.get("type"):
        case "function":
            return {"type": "function", "name": _offered("tool_choice.name", choice.get("name"), names)}
        case "allowed_tools":
            mode = _one_of("tool_choice.mode", choice.get("mode", "auto"), ("auto", "required"))
            allowed = choice.get("tools")
            if not isinstance(allowed, list) or not all(isinstance(one, Mapping) for one in allowed):
                raise RequestError("must be a list of tools", field="tool_choice.tools")
            found = [_offered("tool_choice.tools", one.get("name"), names) for one in allowed]
            return {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": n} for n in found]}
    raise RequestError(
        f"{shown(choice.get('type'))} is not served; use none, auto, required or a function", field="tool_choice.type"
    )


def _offered(field: str, name: Any, names: set[str]) -> str:
    if not isinstance(name, str) or name not in names:
        raise RequestError(f"no function {shown(name)} is among the tools", field=field)
    return name


def _included(said: Body) -> tuple[str, ...]:
    included = said.texts("include", len(_INCLUDED))
    for name in included:
        _one_of("include", name, _INCLUDED)
    return included


def _reasoning(said: Body, wishes: list[str], ignored: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings as the answer repeats them, and what they hint to a template. Reasoning is never summarised."""
    given = said.get("reasoning", dict, "an object", {})
    hints = thinking_hints(None, given.get("effort"), field="reasoning.effort")
    for name in ("summary", "generate_summary"):
        if given.get(name) is not None:
            _one_of(f"reasoning.{name}", given[name], _SUMMARIES)
            wishes.append(f"reasoning.{name}")
    ignored += [f"reasoning.{_short(name)}" for name in given if name not in ("effort", "summary", "generate_summary")]
    return {"effort": given.get("effort"), "summary": given.get("summary")}, hints


def _text(said: Body, wishes: list[str], ignored: list[str]) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The settings as the answer repeats them, and the structure that the content has to have."""
    given = said.get("text", dict, "an object", {})
    echo: dict[str, Any] = {"format": {"type": "text"}}
    if given.get("verbosity") is not None:
        echo["verbosity"] = _one_of("text.verbosity", given["verbosity"], ("low", "medium", "high"))
        wishes.append("text.verbosity")
    ignored += [f"text.{_short(name)}" for name in given if name not in ("format", "verbosity")]
    form = given.get("format")
    if form is None:
        return echo, None
    if not isinstance(form, Mapping):
        raise RequestError(f"must be an object, not {shown(form)}", field="text.format")
    match form.get("type"):
        case "text":
            return echo, None
        case "json_object":
            return {**echo, "format": {"type": "json_object"}}, {"type": "json_object"}
        case "json_schema":
            schema, name = form.get("schema"), form.get("name")
            structure = schema_structure(schema, "text.format.schema")
            if not isinstance(name, str):
                raise RequestError("must be a string", field="text.format.name")
            echo["format"] = {"type": "json_schema", "name": name, "schema": schema, "strict": bool(form.get("strict"))}
            return echo, structure
    raise RequestError(
        f"must be text, json_object or json_schema, not {shown(form.get('type'))}", field="text.format.type"
    )


def _ways(said: Body, headers: Mapping[str, str]) -> tuple[TokenFields, ...]:
    ways = asked_fields(said, headers, TokenFields.NEMO_GYM)
    if TokenFields.VLLM in ways:
        raise RequestError("vllm's fields are those of chat completions; use tokentrace or nemo_gym", field=HEADER)
    return ways


def _metadata(said: Body) -> Mapping[str, str]:
    metadata: Mapping[str, str] = said.get("metadata", dict, "an object", {})
    if len(metadata) > 16 or not all(
        isinstance(value, str) and len(value) <= 512 and len(name) <= 64 for name, value in metadata.items()
    ):
        raise RequestError(
            "must be at most 16 strings, none longer than 512, under names of at most 64", field="metadata"
        )
    return metadata


def _one_of(field: str, value: Any, options: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in options:
        raise RequestError(f"must be one of {', '.join(options)}, not {shown(value)}", field=field)
    return value


def _short(name: Any) -> str:
    return str(name)[:80]
