"""Python functions as tools: the schema equals that of transformers, for functions that it supports."""

from collections.abc import Callable
from typing import Any, Literal

import pytest

from tests.conversations import HI
from tests.lazy import lazy
from tokentrace import InputError, create_renderer
from tokentrace.conversation.messages import check_tools
from tokentrace.pocket import POCKET
from tokentrace.values.functions import function_schema

transformers_utils = lazy("transformers.utils")


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
    raise ValueError


letters = "\n".join(f"    {letter}: One" for letter in "abcdefg")
mixed.__doc__ = f"Mix things.\n\nArgs:\n{letters}\nRaises:\n    ValueError: never"


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
    schema = transformers_utils.get_json_schema(function)
    assert (function_schema(function), check_tools([function])) == (schema, [schema])
    renderer = create_renderer(POCKET)
    assert renderer.render_ids([HI], tools=[function]) == renderer.render_ids([HI], tools=[schema])


def test_functions_that_cannot_be_tools_are_refused_by_name() -> None:
    def loose(*values: int) -> None:
        pass

    def unreadable(a: "Nowhere") -> None:  # type: ignore[name-defined]  # noqa: F821
        pass

    def chosen(a: str) -> None:
        """Choose.

        Args:
            a: One (choices: [tea)
        """

    for function, problem in ((loose, "values cannot be"), (unreadable, "type hints"), (chosen, "not a JSON list")):
        with pytest.raises(InputError, match=problem) as caught:
            check_tools([{"name": "hi"}, function])
        assert caught.value.field == "tools.1"
    with pytest.raises(InputError, match="or a function"):
        check_tools([int])
