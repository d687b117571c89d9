"""Requests of OpenAI's Chat Completions, read. Pure.

Also read: vLLM's ``top_k``, ``min_p``, ``repetition_penalty``, ``chat_template_kwargs``, ``continue_final_message`` and
``add_generation_prompt``, ``return_token_ids`` and ``return_tokens_as_token_ids``, and the ``thinking`` and
``enable_thinking`` of others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ..conversation.messages import check_messages
from ..conversation.place import Place
from ..conversation.shapes import from_openai, openai_tools
from ..conversation.values import check_depth, plain_json
from ..engines.protocol import OPTIONAL
from .hints import thinking_hints
from .requests import NOT_OFFERED, Body, Request, RequestError, refusing
from .token_fields import TokenFields, asked_fields

_HARMLESS: Final = (
    "metadata", "store", "user", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier",
    "prediction", "skip_special_tokens", "spaces_between_special_tokens", "include_reasoning", "separate_reasoning",
)  # fmt: skip
"""Fields that say nothing about the tokens that are sampled."""

UNSERVED: Final[Mapping[str, Sequence[Any]]] = {
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that would change what is sampled or shown, with the values that change nothing. In chat, min-p and penalties
are served, where the engine has them."""

_TEXT_ONLY: Final = "there is only text here"


def read_chat(body: Any, headers: Mapping[str, str]) -> Request:
    """A body of ``POST /v1/chat/completions``. RequestError names the field that cannot be served."""
    said = Body(body)
    messages = said.get("messages", list, "a list of messages", ())
    with refusing():
        messages = check_messages(from_openai(messages), any_role=lambda role: True)
    tools, old = _tools(said)
    allowed, wishes = _choice(said, tools)
    shaping = said.shaping()
    for name, harmless in UNSERVED.items():
        if name not in OPTIONAL:
            said.refuse(name, harmless, NOT_OFFERED)
    said.refuse("audio", (), _TEXT_ONLY)
    said.refuse("modalities", (["text"], []), _TEXT_ONLY)
    said.refuse("web_search_options", (), "nothing here searches the web")
    said.refuse("chat_template", (), "the model's own template is used, and is the same in every request")
    said.refuse("documents", ([],), "documents cannot be given; put their text into a message")
    said.skip(*_HARMLESS)
    logprobs, alternatives = said.flag("logprobs"), said.whole("top_logprobs", 0, 20)
    if alternatives and not logprobs:
        raise RequestError("needs logprobs to be true", field="top_logprobs")
    limits = [limit for limit in (said.whole("max_completion_tokens", 1), said.whole("max_tokens", 1)) if limit]
    options = said.get("stream_options", Mapping, "an object", {})
    fields = asked_fields(said, headers, TokenFields.VLLM)
    if said.get("verbosity", str, "a string") not in (None, "medium"):
        wishes.append("verbosity")
    return Request(
        messages=messages,
        tools=tools,
        model=said.get("model", str, "a string", ""),
        max_tokens=min(limits, default=None),
        temperature=said.temperature(2),
        top_p=said.top_p(),
        top_k=said.top_k(),
        seed=said.whole("seed", 0, 2**63 - 1),
        shaping=shaping,
        stop=said.texts("stop", 16),
        n=said.whole("n", 1, 128) or 1,
        stream=said.flag("stream"),
        usage_in_stream=options.get("include_usage") is True,
        logprobs=(alternatives or 0) if logprobs else None,
        token_ids=bool(fields),
        continued=_continued(said, messages),
        calls_allowed=allowed,
        structure=_structure(said),
        variables=template_variables(said),
        hints=_hints(said),
        echo={
            "token_fields": list(fields),
            "functions": old,
            "tokens_as_ids": said.flag("return_tokens_as_token_ids"),
        },
        wishes=tuple(wishes),
        ignored=said.unread,
    )


def _tools(said: Body) -> tuple[list[dict[str, Any]] | None, bool]:
    """The tools, and whether they were given as the ``functions`` of old."""
    tools = said.get("tools", list, "a list of tools", ())
    functions = said.get("functions", list, "a list of functions", ())
    if tools and functions:
        raise RequestError("stands beside tools; give one of them", field="functions")
    for at, tool in enumerate(tools):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind not in (None, "function"):
            problem = "only tools of the type function have a schema that a template can show"
            raise RequestError(problem, field=f"tools.{at}.type", code="unsupported_parameter")
    with refusing():
        return openai_tools([*tools, *functions] or None, wrap=True), bool(functions)


def _choice(said: Body, tools: Sequence[Mapping[str, Any]] | None) -> tuple[bool, list[str]]:
    """Whether calls are allowed, and what of the choice no engine can be made to keep to."""
    wishes = []
    if not said.flag("parallel_tool_calls", True):
        wishes.append("parallel_tool_calls")
    allowed = True
    for name in ("tool_choice", "function_call"):
        choice = said.get(name, (str, Mapping), "none, auto, required, or a tool")
        if choice == "none":
            allowed = False
        elif isinstance(choice, str) and choice not in ("auto", "required", "any"):
            raise RequestError("must be none, auto, required, or a tool", field=name)
        elif choice not in (None, "auto"):
            wishes.append(name)
        if isinstance(choice, Mapping):
            _check_choice(name, choice, tools)
    return allowed, wishes


def _check_choice(name: str, choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> None:
    """Refuse a tool that is not there; a set of allowed tools is taken as it is."""
    if choice.get("type") == "allowed_tools":
        return
    function = choice.get("function", choice)
    called = function.get("name") if isinstance(function, Mapping) else None
    names = [(tool.get("function") or tool).get("name") for tool in tools or ()]
    if not isinstance(called, str) or called not in names:
        raise RequestError("names no tool of this request", field=name)


def _continued(said: Body, messages: Sequence[Mapping[str, Any]]) -> bool:
    continued = said.flag("continue_final_message")
    prompted = said.get("add_generation_prompt", bool, "true or false")
    if continued and prompted:
        raise RequestError("cannot be true beside continue_final_message", field="add_generation_prompt")
    if prompted is False and not continued:
        raise RequestError("false needs continue_final_message: a turn has to begin", field="add_generation_prompt")
    if continued and messages[-1].get("role") != "assistant":
        raise RequestError("needs a last message of the assistant's", field="continue_final_message")
    return continued


def _structure(said: Body) -> Mapping[str, Any] | None:
    """What the content has to be; None for text."""
    formatted = said.get("response_format", Mapping, "an object", {})
    match formatted.get("type", "text"):
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            given = formatted.get("json_schema")
            schema = given.get("schema") if isinstance(given, Mapping) else None
            return schema_structure(schema, "response_format.json_schema.schema")
    raise RequestError(
        "must be text, json_object or json_schema", field="response_format.type", code="unsupported_parameter"
    )


def schema_structure(schema: Any, field: str) -> Mapping[str, Any]:
    """The structure that a JSON schema asks for."""
    if not isinstance(schema, Mapping):
        raise RequestError("must be a JSON schema (an object)", field=field)
    with refusing():
        check_depth(schema, Place(field=field))
    return {"type": "json_schema", "schema": schema}


def template_variables(said: Body) -> Mapping[str, Any]:
    """vLLM's field for template variables."""
    given = said.get("chat_template_kwargs", Mapping, "an object", {})
    with refusing():
        return plain_json(given, Place(field="chat_template_kwargs"))  # type: ignore[no-any-return]


def _hints(said: Body) -> dict[str, Any]:
    """Thinking, as OpenAI, Qwen's, DeepSeek's and Z.ai's servers are told of it."""
    on = said.get("enable_thinking", bool, "true or false")
    thinking = said.get("thinking", Mapping, "an object with a type")
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "auto", "adaptive"):
            raise RequestError("must be enabled or disabled", field="thinking.type")
        on = {"enabled": True, "disabled": False}.get(kind, on)
    return thinking_hints(on, said.get("reasoning_effort", str, "a string"))
