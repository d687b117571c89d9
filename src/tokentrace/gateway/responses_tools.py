"""The tools of a request of OpenAI's Responses API. Pure.

Functions are served. Those in a namespace (Codex has the tools of MCP servers in such) are functions too: the model
knows them by a name with the namespace in front, the client is told the two apart. Tools that OpenAI runs itself do not
exist here: the model is not told of them, and the answer says so. All others are refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from ..conversation.place import Place
from ..conversation.responses import in_namespace
from ..conversation.values import check_depth
from ..errors import shown
from .requests import Body, refusing

_HOSTED: Final = re.compile(
    r"web_search(_preview)?(_\d{4}_\d\d_\d\d)?|image_generation|code_interpreter|file_search|tool_search"
)
"""Tools that OpenAI runs itself, and the one by which its models find further tools."""

Namespaces = dict[str, list[str]]
"""For the name that a model knows a function by: its namespace, and its name there."""


def read_tools(said: Body, wishes: list[str]) -> tuple[list[dict[str, Any]], Namespaces]:
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
