"""What a message means, whoever repeats it: the keys by which a request finds the recorded turn it goes on from. Pure.

Agents send the whole conversation with every request, and repeat the model's own turns imperfectly: without reasoning,
with arguments spaced or ordered another way, with content as parts, with ids and markers of their own. What is equal
in meaning has the same key, and the recorded tokens are used in place of the echo. A message that means something else
has another key, and the conversation branches there. In doubt two messages are different: a branch too many costs
some tokens, a false match would train on a history that the agent never had. docs/gateway.md has the table.
"""

from __future__ import annotations

import hashlib
import json
import marshal
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from ..conversation.forms import TEXT_PARTS
from ..conversation.messages import RESULT_ROLES, THOUGHTS
from ..conversation.values import MAX_DEPTH, json_like
from ..errors import InputError
from ..rollout.loading import load_object
from .requests import RequestError

Key = bytes
"""A digest of everything that was said up to a message, tools and template variables included."""

Meaning = Callable[[Mapping[str, Any]], Any]
"""What of a message counts, as a value that JSON can hold. Messages with equal values are taken for the same."""


class Matcher(StrEnum):
    """How faithfully an agent has to repeat what was recorded."""

    STRICT = "strict"
    """Every field counts, as it is written; see `strict_meaning`."""
    NORMAL = "normal"
    """What is equal in meaning is the same; see `meaning`."""


NOISE: Final = frozenset(
    {
        "annotations", "cache_control", "citations", "extra", "extra_content", "id", "index", "logprobs", "parsed",
        "provider_specific_fields", "status", "train", "weight",
    }
)  # fmt: skip
"""Fields that agents add to a message, lose, or change from one request to the next, and that no template prints."""

PART_NOISE: Final = frozenset({"annotations", "cache_control", "citations", "logprobs", "provider_specific_fields"})
"""The same for a part of a content. The id of a part that is no text says what it is: a file, an image."""

REASONING_PARTS: Final = frozenset({"thinking", "redacted_thinking", "reasoning", "reasoning_text", "summary_text"})

EXACT_INTEGERS: Final = 2.0**53
"""Below it an integer is the same number in every language."""

_JSON: Final = json.JSONDecoder(strict=False)
"""Models write line breaks into strings, and most agents read them."""

_MARSHAL: Final = 2
"""The format's last version in which equal values have equal bytes: later ones tell shared strings from others."""

_SCALARS: Final = frozenset({str, bytes, int, bool, type(None)})
_PLAIN: Final = frozenset({"role", "content", "tool_call_id"})


def meaning(message: Mapping[str, Any]) -> Any:
    """What a message means, for an agent that repeats what it was told.

    Of the assistant's own messages: the words, white space at their ends aside, the calls by name and value of
    their arguments, a refusal, and parts that are no text. Reasoning does not count, nor do ids and other fields: the
    recorded tokens have what the model wrote. Of all other messages every character of the content counts, for their
    tokens come of them; content of one text part is the same as that text. Whether any other field tells two messages
    apart depends on the template: `written_alike` finds those in doubt, and the session renders them.
    """
    role = message.get("role")
    if role == "assistant":
        return _said_by_model(message)
    content = message.get("content")
    return [role, content if type(content) is str else _content(content, _words_of)]


def written_alike(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages that mean the same, and that no model sampled, have the same fields but for `NOISE`.

    If they do not, they may still have the same tokens: a template prints few fields.
    """
    written = strict_meaning if one.get("role") == "assistant" else _fields
    return identical(one, other) or bool(written(one) == written(other))


def _fields(message: Mapping[str, Any]) -> Any:
    more = [
        [str(name), _as_written(value)]
        for name, value in sorted(message.items(), key=_name)
        if name not in NOISE and name not in _PLAIN and _says(value)
    ]
    return [_content(message.get("content"), _text_of), more]


def strict_meaning(message: Mapping[str, Any]) -> Any:
    """Every field of a message that says anything, as it is written: reasoning, ids and white space too.

    Absent, None and empty are the same, and so are arguments as JSON text and as a mapping, since dialects differ in
    that: white space between them does not count, the order of keys does.
    """
    meant = [
        [str(name), value if type(value) is str else _as_written(value)]
        for name, value in sorted(message.items(), key=_name)
        if name != "tool_calls" and _says(value)
    ]
    calls = message.get("tool_calls")
    return [meant, [_strict_call(call) for call in calls]] if calls else [meant]


MEANINGS: Final[Mapping[Matcher, Meaning]] = {Matcher.STRICT: strict_meaning, Matcher.NORMAL: meaning}


def load_matcher(text: str, folder: Path | None = None) -> Meaning:
    """What counts, as a setting names it: ``strict``, ``normal``, or a function of one's own (``module:function``).

    A function is given a message, never to be changed, and returns a value that JSON can hold. Messages of the same
    role for which it returns equal values are taken for the same, and the recorded tokens are used for both: what it
    leaves out, the model is not told. Files and modules that are not installed are looked for in `folder`. InputError
    where there is no such function.
    """
    if text in tuple(Matcher):
        return MEANINGS[Matcher(text)]
    if ":" not in text:
        raise InputError(f"the matcher must be strict, normal or module:function, not {text[:80]!r}")
    found = load_object(text, folder or Path())
    if not callable(found):
        raise InputError(f"the matcher {text[:80]!r} is not a function; it takes a message and returns what counts")

    def custom(message: Mapping[str, Any]) -> Any:
        try:
            return [message.get("role"), _by_value(found(message))]
        except Exception as error:  # whatever a function of the operator's raises
            problem = f"the matcher {text[:80]} failed on a message: {type(error).__name__}: {str(error)[:200]}"
            raise RequestError(problem, status=500, code="matcher_failed") from error

    return custom


# -- keys


def root_key(tools: Any, variables: Mapping[str, Any], template: str) -> Key:
    """The key of an empty conversation: what the template is given beside the messages.

    Tools count as they are written, in their order: a template prints them so.
    """
    try:
        return _digest(b"", [_as_written(tools or None), _as_written(sorted(variables.items(), key=_name)), template])
    except RecursionError:
        raise InputError("is nested too deeply", field="tools") from None


def next_key(before: Key, meant: Any) -> Key:
    """The key after one more message, of which `meant` is what counts: any value that JSON can hold."""
    return _digest(before, _settled(meant, 0))


def chain(root: Key, messages: Sequence[Mapping[str, Any]], means: Meaning = meaning) -> list[Key]:
    """The key after each message, the first for none: ``chain(...)[k]`` stands for the first `k` messages.

    A tool result counts by the call that it answers, whatever the ids are: the second result to the first call is
    not the first result to the second. Without an id it answers the calls in order. InputError for a message that is
    nested too deeply, with its number.
    """
    keys = [root]
    ours = means is meaning or means is strict_meaning
    answered: dict[str, int] = {}
    results = 0
    for at, message in enumerate(messages):
        try:
            meant = means(message) if ours else _settled(means(message), 0)
            role = message.get("role")
            if role == "assistant":
                results, answered = 0, _places(message)
            elif role in RESULT_ROLES:
                meant = [meant, str(answered.get(str(message.get("tool_call_id")), results))]
                results += 1
            keys.append(_digest(keys[-1], meant))
        except RecursionError:
            raise InputError("is nested too deeply", message=at) from None
    return keys


def _places(message: Mapping[str, Any]) -> dict[str, int]:
    """The number of each call by its id; none where ids are not unique."""
    calls = message.get("tool_calls")
    if not calls:
        return {}
    ids = [str(call["id"]) for call in calls if call.get("id")]
    return dict(zip(ids, range(len(ids)), strict=True)) if len(set(ids)) == len(calls) else {}


def call_ids(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The ids of a message's calls, those that it has."""
    return tuple(str(call["id"]) for call in message.get("tool_calls") or () if call.get("id"))


def reasoning(message: Mapping[str, Any]) -> str:
    """The reasoning that a message repeats, white space at its ends aside."""
    said = next((str(message[field]).strip() for field in THOUGHTS if message.get(field)), "")
    content = message.get("content")
    if said or not isinstance(content, (list, tuple)):
        return said
    parts = [part for part in content if isinstance(part, Mapping) and part.get("type") in REASONING_PARTS]
    return "".join(
        str(part.get("thinking") or part.get("reasoning") or part.get("text") or "") for part in parts
    ).strip()


def identical(one: Any, other: Any) -> bool:
    """Whether two JSON values are the same in every respect: so have they the same key, whatever counts.

    Python takes 1, 1.0 and True for equal, and mappings with their keys in another order.
    """
    kind = type(one)
    if kind is str or kind is not type(other):
        return type(other) is str and bool(one == other)
    if kind is dict:
        if list(one) != list(other):
            return False
        for name, value in one.items():
            its = other[name]
            if value is not its and not (value == its if type(value) is str is type(its) else identical(value, its)):
                return False
        return True
    if kind is list:
        return len(one) == len(other) and all(map(identical, one, other))
    return bool(one == other)


# -- what an assistant's message says


def _said_by_model(message: Mapping[str, Any]) -> Any:
    content = message.get("content")
    others: list[Any] = []
    if type(content) is not str:
        content, others = _model_content(content)
    calls = message.get("tool_calls")
    meant = ["assistant", content.strip(), [_call(call) for call in calls] if calls else ""]
    others += [[name, _as_written(message[name])] for name in ("refusal", "function_call") if _says(message.get(name))]
    return [*meant, others] if others else meant


def _model_content(content: Any) -> tuple[str, list[Any]]:
    """The text of a content and its other parts. A model writes one text: parts of it are joined with nothing.

    Of a text part only the text counts: @openai/agents repeats the message's role, reasoning and calls in it.
    """
    if isinstance(content, str) or not content:
        return content or "", []
    texts: list[str] = []
    others: list[Any] = []
    for part in content if isinstance(content, (list, tuple)) else [content]:
        text = part if isinstance(part, str) else _words_of(part, "text")
        if text is not None:
            texts.append(text)
        elif not isinstance(part, Mapping) or part.get("type") not in REASONING_PARTS:
            others.append(_part(part))
    return "".join(texts), others


def _call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or call.get("custom") or call
    arguments = function.get("arguments")
    return [str(function.get("name")), *_value(function.get("input") if arguments is None else arguments)]


def _value(arguments: Any) -> tuple[str, Any]:
    """The value of arguments, in the one way to write it; those that are not JSON count as written."""
    value = arguments
    if isinstance(arguments, str):
        try:
            value = _JSON.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            return "text", arguments
    if value is None:
        value = {}
    try:
        return "json", _by_value(value)
    except RecursionError:
        if not isinstance(arguments, str):
            raise
        return "text", arguments


def _strict_call(call: Mapping[str, Any]) -> Any:
    function = call.get("function") or call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = _JSON.decode(arguments) if arguments.strip() else None
        except (ValueError, RecursionError):
            arguments = [arguments]  # no JSON: as it is written, and unlike any JSON object
    others = {name: value for name, value in call.items() if name not in ("function", "index", "arguments")}
    return [str(function.get("name")), _as_written(arguments or {}), _as_written(sorted(others.items(), key=_name))]


# -- what every other message says


def _content(content: Any, text_of: Callable[[Any], str | None]) -> Any:
    """A content in the form that all ways to write it share: a text, texts, or parts. `text_of` reads text parts."""
    if not content:
        return ""
    if isinstance(content, str):
        return str(content)
    if isinstance(content, Mapping) or not isinstance(content, Sequence):
        return ["value", _as_written(content)]  # a tool's result: the template prints it in this order
    parts: list[Any] = []
    for part in content:
        text = text_of(part) if isinstance(part, Mapping) else None
        parts.append(_part(part) if text is None else text)
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else ["parts", parts]


def _text_of(part: Any) -> str | None:
    """The text of a part that is nothing but text; None for any other."""
    text = _words_of(part)
    if text is None:
        return None
    name = TEXT_PARTS[part["type"]]
    if len(part) > 2 and any(
        _says(value) and key not in NOISE and key not in ("type", name) for key, value in part.items()
    ):
        return None
    return text


def _words_of(part: Any, untyped: str | None = None) -> str | None:
    """The text of a text part, whatever else it has; None for any other part. `untyped`: the type of one without."""
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type") or untyped
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    text = part.get(name) if name else None
    return text if isinstance(text, str) else None


def _part(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return ["value", _as_written(part)]
    said = [(str(name), part[name]) for name in sorted(part, key=str) if name not in PART_NOISE and _says(part[name])]
    return ["part", _as_written(said)]


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])


def _says(value: Any) -> bool:
    """Whether a field says anything: None and what is empty do not."""
    return value is not None and (not isinstance(value, (str, list, tuple, Mapping)) or len(value) > 0)


# -- values as bytes


def _as_written(value: Any) -> bytes:
    """A JSON value as bytes, in the order in which it was given. Marshal is four times as fast as JSON."""
    try:
        return b"m" + marshal.dumps(value, _MARSHAL)
    except ValueError:  # nested deeply, or made of types that are not Python's own
        return b"j" + json.dumps(value, default=_foreign).encode()


def _foreign(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    return repr(value)


def _by_value(value: Any) -> bytes:
    """A value as bytes that equal values share: keys in order, numbers by what they are worth (3.0 is 3).

    RecursionError for what is nested too deeply, TypeError for what JSON does not have.
    """
    return marshal.dumps(_settled(value, 0), _MARSHAL)


def _settled(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is float:
        return int(value) if abs(value) < EXACT_INTEGERS and value == int(value) else value
    if depth >= MAX_DEPTH:
        raise RecursionError
    if kind is dict:
        inside = depth + 1
        pairs = [(key, item if type(item) is str else _settled(item, inside)) for key, item in value.items()]
        pairs.sort()  # keys are unique, so that values are never compared
        return tuple(pairs)
    if kind is list or kind is tuple:
        return [_settled(item, depth + 1) for item in value]
    plain = json_like(value, None)
    if plain is not None and type(plain) is not kind:
        return _settled(plain, depth)
    raise TypeError(f"a {kind.__name__}, which is not valid JSON")


def _digest(before: Key, value: Any) -> Key:
    """The digest of a value made of strings, bytes and lists; each has its length before it, so none run together."""
    return hashlib.sha256(before + marshal.dumps(value, _MARSHAL)).digest()[:16]
