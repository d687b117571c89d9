"""How much a model is to think, in the words of the APIs, as the variables that templates read. Pure."""

from __future__ import annotations

from typing import Any, Final

from .requests import RequestError

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What the APIs know. Nothing else is taken: a template may print the word into its system prompt."""


def thinking_hints(on: bool | None, effort: Any = None, *, field: str = "reasoning_effort") -> dict[str, Any]:
    """The variables for thinking `on` or off (None: not said) and for an effort; RequestError names the `field`.

    Templates call the switch ``enable_thinking`` or ``thinking``, and the effort ``reasoning_effort``. An effort of
    ``none`` is thinking off; any other is thinking on, unless it was said to be off.
    """
    if effort is not None and (not isinstance(effort, str) or effort not in EFFORTS):
        raise RequestError(f"must be one of {', '.join(EFFORTS)}", field=field)
    hints: dict[str, Any] = {}
    if effort not in (None, "none"):
        hints["reasoning_effort"] = effort
    if on is None and effort is not None:
        on = effort != "none"
    return hints if on is None else {**hints, "enable_thinking": on, "thinking": on}
