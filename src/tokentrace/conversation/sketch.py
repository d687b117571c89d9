"""A sketch of messages: what a template's control flow may look at."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from ..values.place import Place
from ..values.plain import check_depth
from .messages import Messages


def sketch(messages: Messages, words: Sequence[str]) -> tuple[Any, ...]:
    """Roles, kinds of values, and which of the `words` that the template looks for they have.

    Raises InputError for a field that contains itself, or is too deep or too large to print.
    """
    out: list[Any] = []
    for at, message in enumerate(messages):
        for key, value in message.items():
            if type(value) is not str:
                check_depth(value, Place(at, str(key)))
        content = message.get("content")
        parts = [content] if isinstance(content, (str, Mapping)) else content or ()
        values = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
        texts = [(text, text.lower()) for text in values if isinstance(text, str)]
        inside = tuple(
            (
                word,
                lower.count(word.lower()),
                word in text,
                text.startswith(word),
                text.endswith(word),
            )
            for word, (text, lower) in itertools.product(words, texts)
            if word.lower() in lower
        )
        fields = tuple(
            sorted((str(key), _sketch(value)) for key, value in message.items() if key != "role")
        )
        out.append((message["role"], fields, inside))
    return tuple(out)


def _sketch(value: Any) -> str:
    if isinstance(value, str):
        return "text" if value.strip() else "blank"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_sketch(item)}" for key, item in value.items()) + "}"
    if isinstance(value, Sequence):
        return "[" + ",".join(_sketch(item) for item in value) + "]"
    has_truth = value is None or isinstance(value, int | float)  # an array has none
    return type(value).__name__ + (str(bool(value)) if has_truth else "")
