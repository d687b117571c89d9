"""The keys by which a request finds the recorded turn it continues. Pure.

Agents repeat turns imperfectly, such as without reasoning. Messages that mean the same have the
same key. When in doubt, keys differ: an extra branch costs some tokens, a false match would train
on a history that never existed.
"""

import functools
import hashlib
import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..conversation.forms import TEXT_PARTS
from ..conversation.messages import REASONING_FIELDS, RESULT_ROLES
from ..errors import InputError
from ..values.plain import json_like

Message = Mapping[str, Any]
Key = bytes
"""A digest of a conversation, with its tools and template variables."""
Meaning = Callable[[Message], Any]
_PART_NOISE = {"annotations", "cache_control", "citations", "logprobs", "provider_specific_fields"}
NOISE = _PART_NOISE | {"extra", "extra_content", "id", "index", "parsed", "status", "train", "weight"}
"""Fields that agents change, and that no template prints. A part's id names a file."""
_REASONING_PARTS = ("thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text")
_EMPTY: Sequence[Any] = (None, "", [], (), {})


def _number(text: str) -> int | float:
    """Parse a number with a decimal point. 3.0 becomes 3, as far as floats are exact."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2.0**53 else value


_JSON = json.JSONDecoder(strict=False, parse_float=_number)
"""Not strict: models write line breaks into strings."""
_SORTED = json.JSONEncoder(sort_keys=True)


def meaning(message: Message) -> Any:
    """What a message means to an agent that repeats it.

    For the assistant: its stripped text, calls by name and value, a refusal, other parts. For other
    roles: every character of the content. `same_fields` compares other fields.
    """
    content = message.get("content")
    if message.get("role") != "assistant":
        return [message.get("role"), _content(content)]
    parts = content if isinstance(content, (list, tuple)) else [content or ""]
    printed = (part for part in parts if not _is_reasoning(part))
    values = [part if isinstance(part, str) else _part(part, "text") for part in printed]
    text = "".join(value for value in values if isinstance(value, str))  # a model writes one text
    calls = [_call(call) for call in message.get("tool_calls") or ()]
    extras = [value for value in values if not isinstance(value, str)]
    more = [name for name in ("refusal", "function_call") if message.get(name) not in _EMPTY]
    extras += [[name, _raw(message[name])] for name in more]
    return ["assistant", text.strip(), calls or "", *([extras] if extras else [])]


def strict_meaning(message: Message) -> Any:
    """Every field as it is, but empty is absent, and JSON text is its value."""
    fields = {
        name: value for name, value in message.items() if name != "tool_calls" and value not in _EMPTY
    }
    calls = [_strict_call(call) for call in message.get("tool_calls") or ()]
    return [_raw(sorted(fields.items())), calls]


def same_fields(one: Message, other: Message) -> bool:
    """True if two messages have the same fields, `NOISE` aside."""

    def fields(message: Message) -> Any:
        printed = {name: message[name] for name in message if name not in NOISE and name != "tool_call_id"}
        return strict_meaning({**printed, "content": _content(message.get("content"), strict=True)})

    return identical(one, other) or bool(fields(one) == fields(other))


def root_key(tools: Any, variables: Mapping[str, Any], template: str) -> Key:
    """The key of an empty conversation. `template` is the template's digest."""
    try:
        return _first_key(_raw(tools or None), _raw(sorted(variables.items())), template)
    except RecursionError:
        raise InputError("is nested too deeply", field="tools") from None


def next_key(before: Key, value: Any) -> Key:
    return hashlib.sha256(before + marshal.dumps(value, 2)).digest()[:16]


_first_key = functools.lru_cache(256)(lambda *values: next_key(b"", [*values]))


def chain(root: Key, messages: Sequence[Message], means: Meaning = meaning) -> list[Key]:
    """The key of the first k messages for each k. Raises InputError if one is nested too deeply."""
    keys = [root]
    answered: dict[str, int] = {}
    results = 0
    for at, message in enumerate(messages):
        try:
            value = means(message)
        except RecursionError:
            raise InputError("is nested too deeply", message=at) from None
        if message.get("role") == "assistant":
            results, answered = 0, {name: at for at, name in enumerate(call_ids(message))}
            if len(answered) != len(message.get("tool_calls") or ()):
                answered = {}
        elif message.get("role") in RESULT_ROLES:
            value = [value, str(answered.get(str(message.get("tool_call_id")), results))]
            results += 1
        keys.append(next_key(keys[-1], value))
    return keys


def call_ids(message: Message) -> tuple[str, ...]:
    return tuple(str(call["id"]) for call in message.get("tool_calls") or () if call.get("id"))


def reasoning(message: Message) -> str:
    text = next((str(message[field]).strip() for field in REASONING_FIELDS if message.get(field)), "")
    content = message.get("content")
    parts = filter(_is_reasoning, content) if isinstance(content, (list, tuple)) and not text else ()
    texts = (str(part.get("thinking") or part.get("reasoning") or part.get("text") or "") for part in parts)
    return text or "".join(texts).strip()


def identical(one: Any, other: Any) -> bool:
    """True if two values, their types and key orders are equal."""
    return one is other or _raw(one) == _raw(other)


def shared_prefix(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of keys, or identical JSON values, that two sequences begin with."""
    for at, (left, right) in enumerate(zip(one, other, strict=False)):
        if left is not right and (left != right or not identical(left, right)):
            return at
    return min(len(one), len(other))


def _call(call: Message) -> Any:
    """A call by name and value; invalid JSON counts as text."""
    custom = call.get("custom")
    function = call.get("function") or (custom if isinstance(custom, Mapping) else call)
    arguments = function.get("arguments")
    arguments = function.get("input") if arguments is None else arguments
    name, is_text = str(function.get("name")), isinstance(arguments, str)
    try:
        value = _decoded(arguments)
        return [name, "json", _SORTED.encode(value) if is_text else canonical(value)]
    except (ValueError, RecursionError):
        if not is_text:
            raise
        return [name, "text", arguments]


def _strict_call(call: Message) -> Any:
    function = call.get("function") or call
    try:
        arguments = _decoded(function.get("arguments"))
    except (ValueError, RecursionError):
        arguments = [function.get("arguments")]  # invalid JSON: unlike any JSON object
    more = {name: value for name, value in call.items() if name not in ("function", "index", "arguments")}
    return [str(function.get("name")), _raw(arguments or {}), _raw(sorted(more.items()))]


def _decoded(arguments: Any) -> Any:
    if isinstance(arguments, str):
        arguments = _JSON.decode(arguments) if arguments.strip() else None
    return {} if arguments is None else arguments


def _content(content: Any, strict: bool = False) -> Any:
    if not content or isinstance(content, str):
        return str(content or "")
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        return ["value", _raw(content)]  # a tool's result: templates print it in this order
    parts = [_part(part, strict=strict) for part in content]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else ["parts", parts]


def _part(part: Any, default_type: str | None = None, strict: bool = False) -> Any:
    """A text part as its text, unless `strict`; others by fields."""
    if not isinstance(part, Mapping):
        return ["value", _raw(part)]
    fields = {str(name): value for name, value in part.items() if value not in _EMPTY}
    field = TEXT_PARTS.get(str(part.get("type") or default_type), "")
    text = part.get(field)
    if isinstance(text, str) and not (strict and fields.keys() - NOISE - {"type", field}):
        return text
    printed = {name: value for name, value in fields.items() if name not in _PART_NOISE}
    return ["part", _raw(sorted(printed.items()))]


def _is_reasoning(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in _REASONING_PARTS


def _raw(value: Any) -> bytes:
    """A JSON value as bytes, with the order of keys. Marshal is faster than JSON."""
    try:
        return b"m" + marshal.dumps(value, 2)  # the last version that gives equal values equal bytes
    except ValueError:  # nested deeply, or not made of built-in types
        return b"j" + json.dumps(value, default=lambda it: json_like(it, repr(it))).encode()


def canonical(value: Any) -> str:
    """JSON text that equal values share. Raises RecursionError or TypeError."""

    def plain(value: Any) -> Any:
        if (value := json_like(value, plain)) is plain:
            raise TypeError("not a JSON value")
        return value

    return _SORTED.encode(_JSON.decode(json.dumps(value, default=plain)))
