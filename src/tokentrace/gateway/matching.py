"""What a message means, whoever repeats it: the keys by which a request finds the recorded turn it goes on from. Pure.

Agents send the whole conversation with every request, and repeat the model's own turns imperfectly: without reasoning,
with arguments spaced or ordered another way, with content as parts, with ids and markers of their own. What is equal
in meaning has the same key, and the recorded tokens are used in place of the echo. A message that means something else
has another key, and the conversation branches there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Final

Key = bytes
"""A digest of everything that was said up to a message, tools and template variables included."""

Meaning = Callable[[Mapping[str, Any]], Any]
"""What of a message counts, as a value that JSON can hold. Messages with equal values are taken for the same."""


class Matcher(StrEnum):
    """How faithfully an agent has to repeat what was recorded."""

    STRICT = "strict"
    """Every field counts, reasoning and ids too; only absent, None and empty fields are the same."""
    NORMAL = "normal"
    """What is equal in meaning is the same; see `meaning`."""


NOISE: Final = frozenset(
    {
        "annotations", "audio", "cache_control", "citations", "extra", "extra_content", "function_call", "id", "index",
        "is_error", "logprobs", "parsed", "provider_specific_fields", "refusal", "status", "train", "weight",
    }
)  # fmt: skip
"""Fields that agents add to a message, lose, or change from one request to the next, and that no template prints."""

REASONING: Final = ("reasoning_content", "reasoning", "thinking")


def meaning(message: Mapping[str, Any]) -> Any:
    """What a message means, for an agent that repeats what it was told.

    Of the assistant's own messages: the words, white space at their ends aside, and the calls by name and value of
    their arguments. Reasoning does not count, nor do ids: the recorded tokens have both. Of all others every word
    counts, for their tokens come of them: a content of one text part is that text.
    """
    role = "system" if message.get("role") == "developer" else message.get("role")
    if role == "assistant":
        return [
            role,
            _joined(message.get("content")).strip(),
            [_call(call) for call in message.get("tool_calls") or ()],
        ]
    more = {
        key: value
        for key, value in message.items()
        if key not in NOISE and key not in ("role", "content", "tool_call_id") and value not in (None, "", [], {})
    }
    return [role, _parts(message.get("content")), more]


def strict_meaning(message: Mapping[str, Any]) -> Any:
    """Every field of a message that says anything."""
    return {key: value for key, value in message.items() if value not in (None, "", [], {})}


MEANINGS: Final[Mapping[Matcher, Meaning]] = {Matcher.STRICT: strict_meaning, Matcher.NORMAL: meaning}


def root_key(tools: Any, variables: Mapping[str, Any], template: str) -> Key:
    """The key of an empty conversation: what the template is given beside the messages."""
    return _digest(b"", [tools or None, dict(variables), template])


def next_key(before: Key, meant: Any) -> Key:
    """The key after one more message."""
    return _digest(before, meant)


def chain(root: Key, messages: Sequence[Mapping[str, Any]], means: Meaning = meaning) -> list[Key]:
    """The key after each message, the first for none: ``chain(...)[k]`` stands for the first `k` messages.

    A tool result counts by the call that it answers, whatever the ids are: the second result to the first call is
    not the first result to the second. Without an id it answers the calls in order.
    """
    keys = [root]
    answered: dict[str, int] = {}
    results = 0
    for message in messages:
        meant = means(message)
        if message.get("role") in ("tool", "function"):
            place = answered.get(str(message.get("tool_call_id")), results)
            meant, results = [meant, place], results + 1
        else:
            results = 0
            answered = {
                str(call.get("id")): at for at, call in enumerate(message.get("tool_calls") or ()) if call.get("id")
            }
        keys.append(next_key(keys[-1], meant))
    return keys


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a message's calls, those that it has."""
    return tuple(str(call["id"]) for call in message.get("tool_calls") or () if call.get("id"))


def reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning that a message repeats, white space at its ends aside."""
    return next((str(message[field]).strip() for field in REASONING if message.get(field)), "")


def _call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or call
    return [function.get("name"), _value(function.get("arguments"))]


def _value(arguments: Any) -> Any:
    """The value of arguments: those that are not JSON count as written."""
    if not isinstance(arguments, str):
        return arguments or {}
    try:
        return json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError):
        return arguments


def _joined(content: Any) -> str:
    """The text of a content."""
    if isinstance(content, str) or not content:
        return content or ""
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))


def _parts(content: Any) -> Any:
    """A content in the form that all ways to write it share: one text, or a list of parts."""
    if isinstance(content, str) or not content:
        return content or ""
    parts = [
        {key: value for key, value in part.items() if key not in NOISE and value is not None}
        if isinstance(part, Mapping)
        else part
        for part in content
    ]
    texts = [
        part["text"] for part in parts if isinstance(part, Mapping) and set(part) <= {"type", "text"} and "text" in part
    ]
    return texts[0] if len(texts) == len(parts) == 1 else texts if len(texts) == len(parts) else parts


def _digest(before: Key, value: Any) -> Key:
    said = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=repr)
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16, key=before).digest()
