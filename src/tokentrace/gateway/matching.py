"""How faithfully an agent has to repeat a conversation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..diagnose.message_keys import Meaning, canonical, meaning, strict_meaning
from ..errors import InputError
from ..rollout.loading import load_object
from .requests import RequestError

MEANINGS: Mapping[str, Meaning] = {"strict": strict_meaning, "normal": meaning}


def load_matcher(text: str, folder: Path | None = None) -> Meaning:
    """Load a matcher: ``strict``, ``normal``, or a function (``module:function``, a file in `folder`).

    The function reduces a message to a JSON value. Messages with the same role and value match.
    """
    if text in MEANINGS:
        return MEANINGS[text]
    if ":" not in text:
        raise InputError(f"the matcher must be strict, normal or module:function, not {text[:80]!r}")
    function = load_object(text, folder or Path())
    if not callable(function):
        raise InputError(f"the matcher {text[:80]!r} is not a function")

    def custom(message: Mapping[str, Any]) -> Any:
        try:
            return [message.get("role"), canonical(function(message))]
        except Exception as error:  # whatever the operator's function raises
            why = f"{type(error).__name__}: {str(error)[:200]}"
            problem = f"the matcher {text[:80]} failed on a message: {why}"
            raise RequestError(problem, status=500, code="matcher_failed") from error

    return custom
