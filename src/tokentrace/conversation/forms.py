"""The form in which a template reads messages, and messages brought into it.

Text is a string or a list of parts, arguments are a mapping or JSON text, no content is ``""``, None or a missing
field. Most templates read one form; they print the others as Python would, drop them, or fail. `adapt` converts
messages as inference servers do (`study.forms` finds the form by tracing). An image raises InputError.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeAlias

from ..errors import kind_of
from ..errors import place as place_text
from .messages import RESULT_ROLES, Messages, usual_arguments
from .place import Place
from .values import check_depth, plain_json, strict_json

TEXT_PARTS: Final[Mapping[str, str]] = {
    **dict.fromkeys(("text", "input_text", "output_text"), "text"),
    "refusal": "refusal",
}
"""Types of text parts, and the field with the text."""

MEDIA_PARTS: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_file", "video", "video_url", "input_video"),
        *("audio", "audio_url", "input_audio", "output_audio", "file", "input_file", "document", "pdf"),
    }
)
"""Types of other parts. A part without a type names its media with the same words."""

BLOCKS: Final = frozenset(
    ("tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "function_call")
)
"""Blocks of Anthropic's and Responses' for what OpenAI's messages have fields for."""

SEPARATOR: Final = "\n"
"""Joins text parts, as in vLLM and TensorRT-LLM (SGLang: a space)."""

_WRAPPED: Final = "wrapped as a text part"
_ABSENT: Final = object()


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
    """A change to a message, or to a rendering compared with the shipped template's.

    `before` and `after` are pieces of text; `field` is the changed field, if it was one.
    """

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
    """Messages in the form that a template reads, and what was changed."""

    messages: Messages
    changes: list[Change] = field(default_factory=list)

    @property
    def wrapped(self) -> set[int]:
        """Messages whose text became a part: its origin is the content all the same."""
        return {change.message for change in self.changes if change.what == _WRAPPED}


def adapt(messages: Messages, forms: Forms) -> Adapted:
    """Checked messages in the form that the template reads; the same list if nothing has to change.

    Raises InputError for media, parts of an unknown type, and arguments that are not a JSON object.
    """
    changes: list[Change] = []
    adapted = [
        message if _is_read(message, forms) else _Adapter(Place(index), message, forms, changes).adapt()
        for index, message in enumerate(messages)
    ]
    return Adapted(messages if all(map(operator.is_, adapted, messages)) else adapted, changes)


def _is_read(message: Mapping[str, Any], forms: Forms) -> bool:
    """True for a message in the usual shape and in a form that the template reads: most are."""
    role, content = message["role"], message.get("content")
    if type(content) is not str or not forms.content(role).text:
        return False
    if role != "assistant" or "tool_calls" not in message:
        return role != "assistant" or bool(content)
    calls, form = message["tool_calls"], forms.calls
    if not calls or not (content or Silence.EMPTY in form.silence):
        return False
    return all(
        form.mapping if type(arguments) is dict else bool(arguments and form.text and arguments.strip())
        for arguments in map(usual_arguments, calls)
    )


@dataclass(slots=True)
class _Adapter:
    _place: Place
    _message: Mapping[str, Any]
    _forms: Forms
    _changes: list[Change]

    def adapt(self) -> Mapping[str, Any]:
        content, role = self._message.get("content"), self._message["role"]
        if content is not None:
            self._content(role, content, self._forms.content(role))
        if role == "assistant":
            self._calls()
            self._silence()
        return self._message

    def _set(self, field: str, value: Any) -> None:
        self._message = {key: item for key, item in {**self._message, field: value}.items() if item is not _ABSENT}

    def _note(self, field: str, what: str, before: Any, after: Any) -> None:
        old, new = (value if isinstance(value, str) else _json_text(value, default=str) for value in (before, after))
        self._changes.append(Change(self._place.message or 0, what, old, new, field))

    def _content(self, role: str, content: Any, form: Any) -> None:
        place = self._place.at("content")
        what, after = "", content
        if isinstance(content, str):
            if not form.text and (content or role != "assistant"):
                self._note("content", _WRAPPED, content, content)
                after = [{"type": "text", "text": content}]
        elif isinstance(content, Mapping) and form.mapping:
            after = plain_json(content, place)
        elif isinstance(content, Mapping) or (role in RESULT_ROLES and content and not any(map(_is_part, content))):
            value = content if isinstance(content, Mapping) else list(content)
            what, after = "written as JSON", _json_text(plain_json(value, place))
        else:
            texts = [_text_of(part, place.at(at)) for at, part in enumerate(content)]
            if not form.parts:
                what, after = "text parts joined", SEPARATOR.join(texts)
            elif not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
                what, after = "as text parts", [{"type": "text", "text": text} for text in texts]
        if what:
            self._note("content", what, content, after)
        if after is not content:
            self._set("content", after)

    def _calls(self) -> None:
        calls = self._message.get("tool_calls", _ABSENT)
        if not calls:
            self._note("tool_calls", "left out, as there are none", calls, "")
            self._set("tool_calls", _ABSENT)
        elif calls is not _ABSENT:
            adapted = _with_arguments(calls, self._place.at("tool_calls"), self._arguments)
            if not all(map(operator.is_, adapted, calls)):
                self._set("tool_calls", adapted)

    def _arguments(self, place: Place, function: Mapping[str, Any]) -> Any:
        arguments, form = function.get("arguments"), self._forms.calls
        is_text = isinstance(arguments, str)
        if arguments is None or (is_text and form.text and not arguments.strip()):
            before = "null" if arguments is None and "arguments" in function else arguments or ""
            after: Any = {} if arguments is None and form.mapping else "{}"
            what = "no arguments, in the form that the template reads"
        elif form.text if is_text else form.mapping:
            return arguments if is_text else plain_json(arguments, place)
        elif is_text:
            before, after, what = arguments, parse_arguments(arguments, place), "JSON text read as a mapping"
        else:
            before, after, what = arguments, _json_text(plain_json(arguments, place)), "mapping written as JSON text"
        self._note(str(place.field), what, before, after)
        return after

    def _silence(self) -> None:
        content, forms = self._message.get("content", _ABSENT), self._forms
        if content is not _ABSENT and content is not None and content != "":
            return
        words = {Silence.EMPTY: '""', Silence.NULL: "null", Silence.ABSENT: ""}
        values = {Silence.EMPTY: "", Silence.NULL: None, Silence.ABSENT: _ABSENT}
        silence = next(way for way, value in values.items() if value is content or value == content)
        accepted = (forms.calls.silence if self._message.get("tool_calls") else forms.alone) or (Silence.EMPTY,)
        if silence not in accepted:
            what = "no content, in the form that the template reads"
            self._note("content", what, words[silence], words[accepted[0]])
            content = values[accepted[0]]
            self._set("content", content)
        if content == "" and not forms.content("assistant").text:
            self._set("content", [{"type": "text", "text": ""}])


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
        raise place.error(f"is a part of type {kind!r}: media and files are not supported yet; leave it out")
    if kind in BLOCKS:
        fields = "tool_calls, reasoning_content and messages of role tool"
        problem = f"is a block of type {kind!r}, for which OpenAI's messages have {fields}"
        raise place.error(f"{problem}; tokentrace.conversation.openai_messages converts them")
    if kind not in TEXT_PARTS:
        raise place.error(f"is a part of the unknown type {kind[:80]!r}; parts of text are {', '.join(TEXT_PARTS)}")
    return place.string(part, TEXT_PARTS[kind])


def parse_arguments(text: str, place: Place) -> dict[str, Any]:
    """The mapping in JSON text, which may be empty. Raises InputError for anything lossy or not an object."""
    reads = "arguments are read as a mapping; give a JSON object"
    try:
        value = strict_json(text) if text.strip() else {}
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
    """Checked messages with the arguments of calls as mappings. Raises InputError for text that is not JSON."""

    def parse(place: Place, function: Mapping[str, Any]) -> Any:
        arguments = function.get("arguments")
        return parse_arguments(arguments, place) if isinstance(arguments, str) else arguments

    return [
        {**message, "tool_calls": _with_arguments(calls, Place(index, "tool_calls"), parse)}
        if (calls := message.get("tool_calls"))
        else message
        for index, message in enumerate(messages)
    ]


def _with_arguments(
    calls: Sequence[Any], place: Place, convert: Callable[[Place, Mapping[str, Any]], Any]
) -> list[Mapping[str, Any]]:
    """Calls with converted arguments; a call whose arguments stay is the same object."""
    converted: list[Mapping[str, Any]] = []
    for at, call in enumerate(calls):
        fields = place.at(at).mapping(call)
        function: Any = fields.get("function")
        is_nested = isinstance(function, Mapping)
        inner: Mapping[str, Any] = function if is_nested else fields
        arguments = convert(place.at(f"{at}.function.arguments" if is_nested else f"{at}.arguments"), inner)
        if arguments is not inner.get("arguments"):
            inner = {**inner, "arguments": arguments}
            fields = {**fields, "function": inner} if is_nested else inner
        converted.append(fields)
    return converted


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
