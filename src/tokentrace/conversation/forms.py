"""The form in which a template reads messages, and messages brought into it.

The same thing can be written in several forms: text as a string or as a list of parts, a call's arguments as a mapping
or as JSON text, no content beside calls as ``""``, None or a missing field. Most templates read one of them, and print
the others as Python would, drop them, or fail. `adapt` brings messages into the form that the template reads
(`study.forms` finds it by tracing), as inference servers do. What the template reads already stays as it is, and
nothing is dropped: content without a text form (an image) raises InputError.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ..errors import kind_of
from .messages import RESULT_ROLES, ROLES, THOUGHTS, Messages
from .place import Place
from .values import check_depth, is_plain, plain_json, strict_json

TEXT_PARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}
"""Types of text parts, and the field with the text: OpenAI's chat and Responses, and Anthropic's text blocks."""

MEDIA_PARTS: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_file", "video", "video_url", "input_video"),
        *("audio", "audio_url", "input_audio", "output_audio", "file", "input_file", "document", "pdf"),
    }
)
"""Types of parts that are not text. A part without a type names its media with the same words."""

BLOCKS: Final = frozenset(
    ("tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "function_call")
)
"""Anthropic's and Responses' blocks for what OpenAI's messages have separate fields for."""

SEPARATOR: Final = "\n"
"""Joins text parts for a template that reads strings: as vLLM and TensorRT-LLM join them (SGLang: a space)."""


class MessageForm(StrEnum):
    """What happens to messages before the template sees them."""

    ADAPT = "adapt"
    """They are brought into the form that the template reads."""
    AS_GIVEN = "as_given"
    """They stay as they are, as in transformers."""


class Silence(StrEnum):
    """Ways to write that an assistant's message has no content."""

    EMPTY = "empty"
    NULL = "null"
    ABSENT = "absent"


Forms: TypeAlias = Any
"""What a template reads (`study.forms.TemplateForms`).

- ``content(role)``: `text`, `parts` and `mapping` are True for the forms of content that it reads from a role.
- ``calls``: the same for arguments, as JSON `text` or as a `mapping`; `silence`: no content beside them, best first.
- ``alone``: how a message without calls may have no content, best first.
"""


@dataclass(frozen=True, slots=True)
class Change:
    """A change to a message before the template saw it, or to a rendering compared with the shipped template's.

    `before` and `after` are pieces of text; `field` is the changed field, if it was one.
    """

    message: int
    what: str
    before: str
    after: str
    field: str | None = None

    def __str__(self) -> str:
        place = f"message {self.message}" + (f", {self.field}" if self.field else "")
        return f"{place}: {self.what}: {_short(self.before)} -> {_short(self.after)}"


def _short(text: str) -> str:
    return repr(text) if len(text) <= 400 else f"{text[:200]!r}…{text[-160:]!r}"


@dataclass(frozen=True, slots=True)
class Adapted:
    """Messages in the form that a template reads, and what was changed."""

    messages: Messages
    changes: list[Change] = field(default_factory=list)
    wrapped: frozenset[int] = frozenset()
    """Messages whose text became a part: its origin is the content all the same."""


def adapt(messages: Messages, forms: Forms) -> Adapted:
    """Checked messages in the form that the template reads; the same list if nothing has to change.

    Raises InputError naming message and field for media, parts of an unknown type, and arguments that are not a JSON
    object.
    """
    changes: list[Change] = []
    adapted: dict[int, Mapping[str, Any]] = {}
    wrapped: set[int] = set()
    reads_text: dict[str, bool] = {}
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if type(content) is str and (content or role != "assistant") and "tool_calls" not in message:
            if role not in reads_text:
                reads_text[role] = forms.content(role).text
            if reads_text[role]:
                continue
        adapter = _Adapter(index, message, forms, changes)
        adapter.content()
        if role == "assistant":
            adapter.calls()
        if adapter.message is not message:
            adapted[index] = adapter.message
        if adapter.wrapped:
            wrapped.add(index)
    if not adapted:
        return Adapted(messages)
    return Adapted([adapted.get(at, message) for at, message in enumerate(messages)], changes, frozenset(wrapped))


def reads_unchanged(messages: Any, forms: Forms) -> bool:
    """True if all messages have the usual form and the template reads it: `check_messages` and `adapt` return them.

    The one quick path: checking and adapting 60 messages takes a fifth of the time of their render.
    """
    if type(messages) is not list or not messages:
        return False
    roles: set[str] = set()
    for message in messages:
        role = message.get("role") if type(message) is dict else None
        if type(role) is not str:
            return False
        if role not in roles:
            if role not in ROLES or not forms.content(role).text:
                return False
            roles.add(role)
        content = message.get("content")
        if role == "assistant":
            if not _reads_turn(message, content, forms):
                return False
        elif type(content) is not str:
            return False
    return True


def _reads_turn(message: dict[str, Any], content: Any, forms: Forms) -> bool:
    for name in THOUGHTS:
        if name in message and type(message[name]) not in _TEXT_OR_NONE:
            return False
    if "tool_calls" not in message:
        return type(content) is str and bool(content)
    calls, form = message["tool_calls"], forms.calls
    if type(calls) is not list or not calls:
        return False
    for call in calls:
        function = call.get("function") if type(call) is dict else None
        if type(function) is not dict or type(function.get("name")) is not str:
            return False
        arguments = function.get("arguments")
        if type(arguments) is str:
            if not form.text or not arguments.strip():
                return False
        elif not form.mapping or type(arguments) is not dict or not is_plain(arguments):
            return False
    if content is None:
        return (Silence.NULL if "content" in message else Silence.ABSENT) in form.silence
    return type(content) is str and (bool(content) or Silence.EMPTY in form.silence)


_TEXT_OR_NONE: Final = frozenset({str, type(None)})
_ABSENT: Final = object()
_SILENT: Final = {Silence.EMPTY: ("", '""'), Silence.NULL: (None, "null"), Silence.ABSENT: (_ABSENT, "")}
"""The content that each way of having none writes, and how a change shows it."""


class _Adapter:
    """One message on its way into the template's form."""

    def __init__(self, index: int, message: Mapping[str, Any], forms: Forms, changes: list[Change]) -> None:
        self.place = Place(index)
        self.message = message
        self.wrapped = False
        self._forms = forms
        self._changes = changes

    def _set(self, field: str, value: Any) -> None:
        self.message = {key: item for key, item in {**self.message, field: value}.items() if item is not _ABSENT}

    def _note(self, field: str, what: str, before: Any, after: Any) -> None:
        old, new = (value if isinstance(value, str) else _json_text(value, default=str) for value in (before, after))
        self._changes.append(Change(self.place.message or 0, what, old, new, field))

    def _change(self, field: str, value: Any, what: str) -> None:
        self._note(field, what, self.message[field], value)
        self._set(field, value)

    # -- content

    def content(self) -> None:
        content, role = self.message.get("content"), self.message["role"]
        if content is None:
            return  # `calls` writes no content in the template's form
        form = self._forms.content(role)
        if isinstance(content, str):
            if not form.text and (content or role != "assistant"):
                self._note("content", "wrapped as a text part", content, content)
                self._set("content", [{"type": "text", "text": content}])
                self.wrapped = True
        elif isinstance(content, Mapping):
            if not form.mapping:
                self._change("content", self._json(content, "content"), "written as JSON")
            elif (plain := plain_json(content, self.place.at("content"))) is not content:
                self._set("content", plain)
        elif role in RESULT_ROLES and content and not any(map(_is_part, content)):
            self._change("content", self._json(list(content), "content"), "written as JSON")
        else:
            self._parts(content, form)

    def _parts(self, content: Sequence[Any], form: Any) -> None:
        place = self.place.at("content")
        texts = [_text_of(part, place.at(at)) for at, part in enumerate(content)]
        if not form.parts:
            self._change("content", SEPARATOR.join(texts), "text parts joined")
        elif not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            self._change("content", [{"type": "text", "text": text} for text in texts], "as text parts")

    # -- calls

    def calls(self) -> None:
        calls, forms = self.message.get("tool_calls"), self._forms
        if "tool_calls" in self.message and not calls:
            self._note("tool_calls", "left out, as there are none", "null" if calls is None else "[]", "")
            self._set("tool_calls", _ABSENT)
        if calls:
            adapted = [self._call(f"tool_calls.{at}", call) for at, call in enumerate(calls)]
            if any(new is not old for new, old in zip(adapted, calls, strict=True)):
                self._set("tool_calls", adapted)
        content = self.message.get("content", _ABSENT)
        if content is None or content is _ABSENT or content == "":
            silence = Silence.NULL if content is None else Silence.ABSENT if content is _ABSENT else Silence.EMPTY
            accepted = (forms.calls.silence if calls else forms.alone) or (Silence.EMPTY,)
            if silence not in accepted:
                content, after = _SILENT[accepted[0]]
                what = "no content, in the form that the template reads"
                self._note("content", what, _SILENT[silence][1], after)
                self._set("content", content)
            if content == "" and not forms.content("assistant").text:
                self._set("content", [{"type": "text", "text": ""}])

    def _call(self, field: str, call: Any) -> Mapping[str, Any]:
        call = self.place.at(field).mapping(call)
        function = call.get("function")
        if isinstance(function, Mapping):
            adapted = self._function(f"{field}.function", function)
            return call if adapted is function else {**call, "function": adapted}
        return self._function(field, call)

    def _function(self, field: str, function: Mapping[str, Any]) -> Mapping[str, Any]:
        arguments = self._arguments(f"{field}.arguments", function)
        return function if arguments is function.get("arguments") else {**function, "arguments": arguments}

    def _arguments(self, field: str, function: Mapping[str, Any]) -> Any:
        arguments, form = function.get("arguments"), self._forms.calls
        if arguments is None or (form.text and isinstance(arguments, str) and not arguments.strip()):
            before = "null" if arguments is None and "arguments" in function else arguments or ""
            self._note(field, "no arguments, in the form that the template reads", before, "{}")
            return {} if arguments is None and form.mapping else "{}"
        if isinstance(arguments, str):
            if form.text:
                return arguments
            parsed = parse_arguments(arguments, self.place.at(field))
            self._note(field, "JSON text read as a mapping", arguments, parsed)
            return parsed
        if form.mapping:
            return plain_json(arguments, self.place.at(field))
        text = self._json(arguments, field)
        self._note(field, "mapping written as JSON text", arguments, text)
        return text

    def _json(self, value: Any, field: str) -> str:
        return _json_text(plain_json(value, self.place.at(field)))


def _json_text(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _is_part(item: Any) -> bool:
    """True if an item of a tool's result is a part of its content; if none is, the list is a JSON value."""
    return isinstance(item, str) or "type" in item or isinstance(item.get("text"), str)


def _text_of(part: Any, place: Place) -> str:
    """The text of a part. Raises InputError that says what it is instead."""
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind is None:
        media = next((name for name in sorted(MEDIA_PARTS) if name in part), None)
        kind = media or ("text" if isinstance(part.get("text"), str) else None)
    if not isinstance(kind, str):
        raise place.error("is a part without a type; text parts are {'type': 'text', 'text': …}")
    if kind in MEDIA_PARTS:
        problem = f"is a part of type {kind!r}: images, sound, video and files are not supported yet"
        raise place.error(f"{problem}; leave it out")
    if kind in BLOCKS:
        fields = "tool_calls, reasoning_content and messages of role tool"
        problem = f"is a block of type {kind!r}, for which OpenAI's messages have {fields}"
        raise place.error(f"{problem}; tokentrace.conversation.openai_messages converts them")
    if kind not in TEXT_PARTS:
        problem = f"is a part of the unknown type {kind[:80]!r}; parts of text are {', '.join(TEXT_PARTS)}"
        raise place.error(problem)
    return place.string(part, TEXT_PARTS[kind])


def parse_arguments(text: str, place: Place) -> dict[str, Any]:
    """The mapping in JSON text; empty text is an empty one. Raises InputError for anything lossy or not an object."""
    if not text.strip():
        return {}
    reads = "arguments are read as a mapping; give a JSON object"
    try:
        value = strict_json(text)
    except RecursionError:
        raise place.error("is nested too deeply") from None
    except ValueError as error:
        advice = "or leave out the call and move what the model wrote into content"
        raise place.error(f"is not valid JSON ({error}), and {reads}, {advice}") from None
    if not isinstance(value, dict):
        raise place.error(f"is JSON of {kind_of(value)}, and {reads}")
    check_depth(value, place)
    return value


def with_parsed_arguments(messages: Messages) -> list[Mapping[str, Any]]:
    """Checked messages with the arguments of calls parsed where they are text. Raises InputError if it is not JSON."""

    def parsed(place: Place, call: Any) -> Mapping[str, Any]:
        fields = dict(place.mapping(call))
        if isinstance(fields.get("function"), Mapping):
            fields["function"] = parsed(place.at("function"), fields["function"])
        elif isinstance(fields.get("arguments"), str):
            fields["arguments"] = parse_arguments(fields["arguments"], place.at("arguments"))
        return fields

    return [
        {**message, "tool_calls": [parsed(Place(index, f"tool_calls.{at}"), call) for at, call in enumerate(calls)]}
        if (calls := message.get("tool_calls"))
        else message
        for index, message in enumerate(messages)
    ]


def texts_of(message: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The texts in a message's content, each with its path: of a string, or of text parts."""
    content = message.get("content")
    if isinstance(content, str):
        yield ("content",), content
    elif isinstance(content, Sequence):
        for at, part in enumerate(content):
            if isinstance(part, str):
                yield ("content", at), part
            elif isinstance(part, Mapping):
                name = TEXT_PARTS.get(str(part.get("type")), "text")
                if isinstance(part.get(name), str):
                    yield ("content", at, name), part[name]
