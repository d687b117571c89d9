"""Python functions as tools: the schema is transformers' own, where transformers makes one."""

from __future__ import annotations

import copy
import enum
import json
import operator
import pickle
from collections.abc import Callable
from marshal import dumps
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from tests.conversations import HI
from tokentrace import InputError, create_renderer
from tokentrace.conversation.functions import function_schema
from tokentrace.conversation.messages import KnownTools, check_tools, known_tools, tools_text
from tokentrace.pocket import POCKET
from tokentrace.rendering import inputs


def multiply(x: float, y: float = 1.0) -> float:
    """
    Multiply two numbers.

    Works for all numbers,
    large and small.

    Args:
        x: The first number,
            which may be negative.
        y: The second number.

    Returns:
        The product.
    """
    return x * y


def order(drink: str, sizes: list[int], extras: dict[str, str] | None = None, *, cold: bool = False) -> None:
    """Order a drink.

    Args:
        drink: What to drink (choices: ["tea", "coffee "])
        sizes: How much of it
        extras: What else
        cold: With ice
    """


def mixed(
    a: int | str,
    b: Literal["x", "y"],
    c: list[dict[str, int]] | tuple[int, str] | None,
    d: Any,
    e: tuple[int, float],
    f: Literal[1, "one", None],
    g: list,  # type: ignore[type-arg]
) -> dict[str, Any]:
    """Mix things.

    Args:
        a: One
        b: Two
        c: Three
        d: Four
        e: Five
        f: Six
        g: Seven
    Raises:
        ValueError: never
    """
    raise ValueError


def now() -> str:
    """The current time."""
    return ""


class Desk:
    def file(self, name: str, urgent: bool = False) -> None:
        """File something.

        Args:
            name: Its name
            urgent: Whether it is
        """


@pytest.mark.parametrize("function", [multiply, order, mixed, now, Desk().file, Desk.file])
def test_schemas_are_those_of_transformers(function: Callable[..., Any]) -> None:
    assert function_schema(function) == get_json_schema(function)
    assert check_tools([function]) == [get_json_schema(function)]


def test_a_function_renders_as_its_schema() -> None:
    renderer = create_renderer(POCKET)
    assert renderer.render_ids([HI], tools=[multiply]) == renderer.render_ids([HI], tools=[get_json_schema(multiply)])


def test_what_transformers_refuses_has_a_schema_too() -> None:
    def bare(a, b: "enum.Enum" = enum.Enum) -> None:  # type: ignore[no-untyped-def, assignment]  # noqa: UP037
        pass

    made = function_schema(bare)["function"]
    assert made["parameters"] == {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"type": "object"}},
        "required": ["a"],
    }


def test_functions_that_cannot_be_tools_are_refused_by_name() -> None:
    def loose(*values: int) -> None:
        pass

    def unreadable(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821, UP037
        pass

    def chosen(a: str) -> None:
        """Choose.

        Args:
            a: One (choices: [tea)
        """

    for function, said in ((loose, "values cannot be"), (unreadable, "type hints"), (chosen, "not a JSON list")):
        with pytest.raises(InputError, match=said) as caught:
            check_tools([HI_TOOL, function])
        assert caught.value.field == "tools.1"
    with pytest.raises(InputError, match="or a function"):
        check_tools([int])


HI_TOOL = {"name": "hi"}


def test_known_tools_are_checked_once_and_are_the_same_to_a_renderer() -> None:
    tools = [HI_TOOL]
    known = KnownTools(tools, json.dumps(tools))
    assert check_tools(known) is known == check_tools(tools)
    assert tools_text(known) == tools_text(tools) == json.dumps(known)
    renderer = create_renderer(POCKET)
    asked = [{"role": "user", "content": "Hi"}]
    assert renderer.render_ids(asked, tools=known) == renderer.render_ids(asked, tools=tools)
    with pytest.raises(InputError, match="a tool schema needs a name"):
        KnownTools([{"type": "function", "function": {}}], "[]")


def test_tools_that_are_made_known_are_not_looked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tools = [{"type": "function", "function": {"name": "hi", "parameters": {"type": "object", "properties": {}}}}]
    known = known_tools(tools)
    assert type(known) is KnownTools
    assert known == tools
    assert known_tools(known) is known
    assert known[0]["function"] is not tools[0]["function"]  # what the caller changes later is not seen
    for kept in (
        None,
        [],
        [{"name": "hi", "strict": (1, 2)}],
        [{"name": "hi", "x": {1: 2}}],
        [{"name": "hi", "x": {3}}],
    ):
        assert known_tools(kept) is kept  # JSON would change them
    with pytest.raises(InputError, match="a tool schema needs a name"):
        known_tools([{"type": "function", "function": {}}])
    renderer = create_renderer(POCKET)
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}]
    rendered = renderer.render(said, tools=tools)
    turn = rendered.turns[-1]
    stream = rendered.token_ids[: turn.start], rendered.token_ids[turn.start : turn.stop]
    new = [{"role": "user", "content": "And?"}]
    usual = renderer.bridge(*stream, new, tools=tools), renderer.parse_response(stream[1], tools=tools)
    looked: list[Any] = []
    monkeypatch.setattr(
        inputs, "marshal", SimpleNamespace(dumps=lambda one, *rest: looked.append(one) or dumps(one, *rest))
    )
    asked = {"tools": known}
    assert (renderer.bridge(*stream, new, **asked), renderer.parse_response(stream[1], **asked)) == usual
    assert tools not in looked  # but the template's study has tools of its own


def test_known_tools_cannot_be_changed_and_render_what_they_say() -> None:
    one, two = schema_named("one"), schema_named("two")
    known = known_tools([one])
    for change in (lambda: known.append(two), known.clear, lambda: operator.iadd(known, [two])):
        with pytest.raises(TypeError, match=r"list\(tools\)"):
            change()
    with pytest.raises(TypeError, match="not changed"):
        known[0] = two
    renderer = create_renderer(POCKET)
    asked = [{"role": "user", "content": "Hi."}]
    expected = renderer.render_ids(asked, tools=[one])
    known[0]["function"]["description"] = "Other."
    assert renderer.render_ids(asked, tools=known) == expected
    for copied in (copy.deepcopy(known), pickle.loads(pickle.dumps(known))):
        assert type(copied) is KnownTools
        assert (list(copied), copied.text) == (list(known), known.text)


def schema_named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Does.", "parameters": {"type": "object"}}}
