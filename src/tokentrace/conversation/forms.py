"""Convert messages to the form that a template reads, as inference servers do.

Most templates read one form of text, arguments and missing content; `study.forms` finds it.
"""

import json
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from types import SimpleNamespace
from typing import Any

from ..errors import InputError, kind_of
from ..errors import place as place_text
from ..values.place import Fields, Place, is_list
from ..values.plain import check_depth, finite, is_flat, no_constant, parse_json, plain_json, unique
from .messages import RESULT_ROLES, Messages, placed_functions

TEXT_PARTS: Mapping[str, str] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}
"""Types of text parts, and the field with the text of each."""

MEDIA_PARTS = (
    *("image", "image_url", "input_image", "image_file", "video", "video_url", "input_video"),
    *("audio", "audio_url", "input_audio", "output_audio", "file", "input_file", "document", "pdf"),
)
"""Types of media parts. A part without a type has its type as a key."""
_OF_MEDIA = frozenset({*MEDIA_PARTS, "source", "url", "data", "base64", "file_id", "file_data"})
"""Keys of media parts. A tool's result may list files: ``{"type": "file", "path": "a"}``."""

SEPARATOR = "\n"  # of text parts, as in vLLM and TensorRT-LLM (SGLang: a space)
_WRAPPED = "wrapped as a text part"
_AS_JSON = "written as JSON"
_ABSENT = object()


class MessageForm(StrEnum):
    """What happens to messages before the template sees them."""

    ADAPT = "adapt"
    """They are converted to the form that it reads."""
    AS_GIVEN = "as_given"
    """Nothing, as in transformers."""


class Silence(Enum):
    """The forms of missing content in an assistant message."""

    EMPTY = ""
    NULL = None
    ABSENT = _ABSENT

    @property
    def fields(self) -> dict[str, Any]:
        return {} if self.value is _ABSENT else {"content": self.value}


Conversion = tuple[str, Any]  # what was done to a value ("" for nothing), the new value


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a message, or a difference from what the shipped template writes."""

    message: int
    what: str
    before: str
    after: str
    field: str | None = None

    def __str__(self) -> str:
        texts = (self.before, self.after)
        before, after = (repr(one) if len(one) <= 400 else f"{one[:200]!r}…{one[-160:]!r}" for one in texts)
        return f"{place_text(self.message, self.field)}{self.what}: {before} -> {after}"


@dataclass(frozen=True, slots=True)
class Adapted:
    """Messages in the form that a template reads, and the changes."""

    messages: Messages
    changes: list[Change] = field(default_factory=list)

    @property
    def wrapped(self) -> set[int]:
        """Messages whose text became a text part."""
        return {change.message for change in self.changes if change.what == _WRAPPED}


def adapt(messages: Messages, forms: Any) -> Adapted:
    """Convert checked messages to the `forms` that the template reads (`study.forms.TemplateForms`).

    Raises InputError for media, unknown parts, and arguments that are not a JSON object.
    """
    changes: list[Change] = []
    text_roles = {role for role in {message["role"] for message in messages} if forms.content(role).text}
    adapted = [
        message if _is_read(message, text_roles, forms) else _adapt_message(index, message, forms, changes)
        for index, message in enumerate(messages)
    ]
    return Adapted(messages if all(map(operator.is_, adapted, messages)) else adapted, changes)


def _adapt_message(index: int, message: Fields, forms: Any, changes: list[Change]) -> Fields:
    role, before = message["role"], message.get("content", _ABSENT)
    is_reply, form = role == "assistant", forms.content(role)
    place = Place(index, "content")
    is_silent = is_reply and (before is _ABSENT or not before)
    conversion = _silence(message, forms, form) if is_silent else _content(message, form, place)
    edits = {"content": _note(changes, place, before, conversion)}
    if is_reply and "tool_calls" in message:
        place, calls = Place(index, "tool_calls"), message["tool_calls"]
        left_out = ("left out, as there are none", _ABSENT)
        adapted = _adapt_calls(calls, place, forms.calls, changes) if calls else None
        edits["tool_calls"] = adapted or _note(changes, place, calls, left_out)
    if all(message.get(field, _ABSENT) is value for field, value in edits.items()):
        return message
    return {key: value for key, value in {**message, **edits}.items() if value is not _ABSENT}


def _is_read(message: Fields, text_roles: Collection[str], forms: Any) -> bool:
    """True if the template reads a message as it is. `text_roles`: roles whose content may be text."""
    if message["role"] not in text_roles or type(message.get("content")) is not str:
        return False
    is_reply = message["role"] == "assistant"
    if not is_reply or "tool_calls" not in message:
        return not is_reply or bool(message["content"])
    calls, form = message["tool_calls"] or (), forms.calls
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        arguments: Any = function.get("arguments") if type(function) is dict else None
        is_text = isinstance(arguments, str)
        if not (form.text and arguments.strip() if is_text else form.mapping and is_flat(arguments)):
            return False
    return bool(calls and (message["content"] or Silence.EMPTY in form.silence))


def _note(changes: list[Change], place: Place, before: Any, conversion: Conversion) -> Any:
    """The new value; note the change, if there is one."""
    what, after = conversion
    if what:
        changes.append(Change(place.message or 0, what, _text(before), _text(after), place.field))
    return after


def _text(value: Any) -> str:
    if value is _ABSENT:
        return ""
    return value if isinstance(value, str) and value else _json(value, default=str, skipkeys=True)


def _json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _content(message: Fields, form: Any, place: Place) -> Conversion:
    content = message["content"]
    if isinstance(content, str):
        return ("", content) if form.text else (_WRAPPED, [{"type": "text", "text": content}])
    if isinstance(content, Mapping):
        plain = plain_json(content, place)
        return ("", plain) if form.mapping else (_AS_JSON, _json(plain))
    if message["role"] in RESULT_ROLES and content and not any(map(_is_part, content)):
        return _AS_JSON, _json(plain_json(list(content), place))
    texts = [_text_of(part, at) for at, part in place.each(content)]
    if not form.parts:
        return "text parts joined", SEPARATOR.join(texts)
    if all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        return "", content
    return "as text parts", [{"type": "text", "text": text} for text in texts]


def _silence(message: Fields, forms: Any, form: Any) -> Conversion:
    """`_content` for an assistant message without content."""
    what, after = "", message.get("content", _ABSENT)
    accepted = (forms.calls.silence if message.get("tool_calls") else forms.alone) or (Silence.EMPTY,)
    if after not in [way.value for way in accepted]:
        what, after = "no content, as the template reads it", accepted[0].value
    return what, [{"type": "text", "text": ""}] if after == "" and not form.text else after


def _adapt_calls(calls: Sequence[Any], place: Place, form: Any, changes: list[Change]) -> Sequence[Fields]:
    adapted: list[Fields] = []
    for inner, call, function in placed_functions(calls, place):
        before, at = function.get("arguments", _ABSENT), inner.at("arguments")
        after = _note(changes, at, before, _arguments(function.get("arguments"), form, at))
        if after is not before:
            changed = {**function, "arguments": after}
            call = changed if function is call else {**call, "function": changed}
        adapted.append(call)
    return calls if all(map(operator.is_, adapted, calls)) else adapted


def _arguments(arguments: Any, form: Any, place: Place) -> Conversion:
    is_text = isinstance(arguments, str)
    if arguments is None or (is_text and form.text and not arguments.strip()):
        after: Any = {} if arguments is None and form.mapping else "{}"
        return "no arguments, as the template reads them", after
    if is_text:
        read = "JSON text as a mapping"
        return ("", arguments) if form.text else (read, parse_arguments(arguments, place))
    plain = plain_json(arguments, place)
    return ("", plain) if form.mapping else ("mapping as JSON text", _json(plain))


def _is_part(item: Any) -> bool:
    """True for a part of content. A tool's result without any is a JSON value."""
    if isinstance(item, str) or item.keys() == {"text"}:
        return True
    kind = item.get("type")
    is_media = isinstance(kind, str) and kind in MEDIA_PARTS and not _OF_MEDIA.isdisjoint(item)
    return is_media or (isinstance(kind, str) and kind in TEXT_PARTS)


def _text_of(part: Any, place: Place) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind is None:
        media = next((name for name in sorted(MEDIA_PARTS) if name in part), None)
        kind = media or ("text" if isinstance(part.get("text"), str) else None)
    if not isinstance(kind, str):
        raise place.error("is a part without a type; text parts are {'type': 'text', 'text': …}")
    if kind in MEDIA_PARTS:
        raise place.error(f"is a part of type {kind!r}: media and files are not supported; leave it out")
    if kind not in TEXT_PARTS:
        advice = "openai_messages converts Anthropic's blocks, thinking to reasoning_content"
        raise place.error(f"is a part of the unknown type {kind[:80]!r}; {advice}")
    return place.string(part, TEXT_PARTS[kind])


def parse_arguments(text: str, place: Place) -> dict[str, Any]:
    """Parse a JSON object, empty for no text. Raises InputError for repeated keys and infinities."""
    advice = (
        "arguments are read as a mapping: give a JSON object, or move what the model wrote into content"
    )
    hooks = {"object_pairs_hook": unique, "parse_constant": no_constant, "parse_float": finite}
    try:
        value = parse_json(text, place, strict=False, **hooks) if text.strip() else {}
    except InputError as error:
        raise place.error(f"{error.problem}; {advice}") from None
    if not isinstance(value, dict):
        raise place.error(f"is JSON of {kind_of(value)}; {advice}")
    check_depth(value, place)
    return value


def with_parsed_arguments(messages: Messages) -> list[Fields]:
    """Checked messages with arguments as mappings. Raises InputError for text that is no JSON."""
    form, parsed = SimpleNamespace(text=False, mapping=True), list[Fields]()
    for index, message in enumerate(messages):
        if message["role"] == "assistant" and (calls := message.get("tool_calls")):
            message = {**message, "tool_calls": _adapt_calls(calls, Place(index, "tool_calls"), form, [])}
        parsed.append(message)
    return parsed


def texts_of(message: Fields) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Yield the texts in a message's content (a string, or text parts), each with its path."""
    content = message.get("content")
    if isinstance(content, str):
        yield ("content",), content
    for at, part in enumerate(content if is_list(content) else ()):
        if isinstance(part, str):
            yield ("content", at), part
        elif isinstance(part, Mapping):
            name = TEXT_PARTS.get(str(part.get("type")), "text")
            if isinstance(part.get(name), str):
                yield ("content", at, name), part[name]
