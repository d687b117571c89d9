"""Whose text may hold which control tokens, and the errors for other text."""

import re
from collections.abc import Iterable
from typing import Any

from ..conversation.messages import ROLES, Messages, check_tools
from ..errors import ControlTokenError, InputError, RendererError, brief
from ..template.chat_template import Template
from ..template.origin import UNKNOWN, Origin
from ..template.trace import Rendering
from ..tokens.control import Trust
from .lost import texts_in
from .rendered import field_name

TRUSTED = frozenset({"system", "developer", "assistant", "kwargs"})
"""Whose text may hold control tokens by default: the operator's own, and an assistant's.

Roles, and ``"tools"`` (schemas), ``"kwargs"`` (template variables; ``"kwargs.NAME"``: one of
them), ``"documents"``. An assistant's text may hold only those that occur inside a turn
(`TemplateStudy.inner_tokens`).
"""

_SURROGATE = re.compile("[\ud800-\udfff]")


def check_trusted(
    trusted: Iterable[str], templates: Iterable[Template], kwargs: Iterable[str]
) -> frozenset[str]:
    """The names. Raises RendererError for one that is no role or source of text."""
    try:
        names: list[Any] = [None] if isinstance(trusted, str) else list(trusted)
    except (TypeError, ValueError):
        names = [None]
    if not all(isinstance(name, str) for name in names):
        raise RendererError(f"trusted must be a set of roles (strings), not {brief(trusted)}")
    usual = ROLES | {"tools", "kwargs", "documents"} | {f"kwargs.{name}" for name in kwargs}
    allowed = usual.union(
        word for template in templates for word in template.constants if word.isidentifier()
    )
    for name in sorted({*names} - allowed):
        known = ", ".join(sorted(usual))
        raise RendererError(f"trusted: {brief(name)} is neither a role nor a source of text; use {known}")
    return frozenset(names)


def trust_of(
    origin: Origin, messages: Messages, trusted: frozenset[str], constants: frozenset[str]
) -> Trust:
    """Which control tokens a span of this origin may hold, or be a part of."""
    if origin.message is not None:
        role = messages[origin.message]["role"]
        if origin.is_role and (role in ROLES or role in constants):
            return Trust.ANY  # a role that the template knows is scaffold: ``<|role|>`` can be a token
        return _of_role(role, trusted)
    if origin.source == "messages":  # the list of all messages, printed as it is
        return min(_of_role(message["role"], trusted) for message in messages)
    names: set[object] = {origin.source}  # "unknown" is never trusted
    if origin.source == "kwargs":
        names = {"documents"} if origin[1] == "documents" else {"kwargs", f"kwargs.{origin[1]}"}
    return Trust.ANY if names & trusted else Trust.NONE


def _of_role(role: str, trusted: frozenset[str]) -> Trust:
    if role not in trusted:
        return Trust.NONE
    return Trust.INNER if role == "assistant" else Trust.ANY


def forged_error(token: str, origin: Origin | None, messages: Messages, tools: Any) -> ControlTokenError:
    """The error that names message, field, position and token."""
    value: Any = {"messages": messages, "tools": tools}
    for key in () if origin is None or origin == UNKNOWN else origin:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            break
    advice = "remove it, or keep it as text with control_tokens='literal'"
    at = value.find(token) if isinstance(value, str) else -1
    where, position = (f" at character {at}", at) if at >= 0 else ("", None)
    problem = f"holds the control token {token!r}{where}; {advice}"
    return ControlTokenError(problem, **_place(origin), position=position, token=token)


def _place(origin: Origin | None) -> dict[str, Any]:
    return {"message": None if origin is None else origin.message, "field": field_name(origin)}


def unencodable_error(rendering: Rendering, tools: Any) -> InputError:
    """The error for lone surrogates, with the message and field that has one."""
    for text, _, origin in rendering.spans():
        if (surrogate := _SURROGATE.search(text)) is None:
            continue
        if origin is not None and origin.source == "tools":  # schemas are one field: find the text in them
            inside = texts_in(Origin(("tools",)), check_tools(tools), keys=True)
            origin = next((path for path, one in inside if _SURROGATE.search(one)), origin)
        return InputError(
            f"holds {surrogate[0]!r}, half of a surrogate pair, which is not text; decode the input with "
            "errors='replace'",
            **_place(origin),
        )
    return InputError("holds text that cannot be encoded as UTF-8")
