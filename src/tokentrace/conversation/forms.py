"""The form in which a template reads messages, and messages brought into it.

The same thing can be said in several forms: text as a string or as a list of parts, a call's arguments as a mapping or
as JSON text, no content beside calls as ``""``, None or nothing at all. Most templates read one of them, and print the
others as Python would, leave them out, or fail. `adapt` gives a template the form that it reads (`study.forms` finds
out which), as inference servers do before they run it. What is in a form that the template reads stays as it is, and
nothing is left out: what has no text form (an image) is refused.

Pure: `Forms` is asked about the template.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Protocol

from ..errors import kind_of
from .messages import RESULT_ROLES, ROLES, TEXT_OR_NONE, THOUGHTS
from .place import Place
from .values import check_depth, finite, is_usual, no_constant, plain_json, unique

TEXT_PARTS: Final[Mapping[str, str]] = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
}
"""Parts that are text, and the field that holds it: OpenAI's chat and Responses, and Anthropic's text blocks."""

MEDIA_PARTS: Final = frozenset(
    {
        *("image", "image_url", "input_image", "image_file"),
        *("audio", "audio_url", "input_audio", "output_audio"),
        *("video", "video_url", "input_video"),
        *("file", "input_file", "document", "pdf"),
    }
)
"""Parts that are no text. Also the names under which a part without a type holds one."""

BLOCKS: Final = frozenset(
    {"tool_use", "tool_result", "thinking", "redacted_thinking", "server_tool_use", "function_call"}
)
"""Anthropic's and Responses' blocks for what has fields of its own in OpenAI's messages."""

SEPARATOR: Final = "\n"
"""What joins text parts for a template that reads strings: as vLLM and TensorRT-LLM join them (SGLang: a space)."""

HAND_OVER: Final = (
    ", or use messages='as_given' to hand it to the template, which writes one placeholder for it at most"
)
"""What else can be done with media, for whoever makes the renderer."""


class MessageForm(StrEnum):
    """What becomes of messages before the template sees them."""

    ADAPT = "adapt"
    """They are given the form that the template reads."""
    AS_GIVEN = "as_given"
    """They stay as they are, as in transformers."""


class Silence(StrEnum):
    """Ways to say that an assistant's message has no content."""

    EMPTY = "empty"
    NULL = "null"
    ABSENT = "absent"


class ContentForm(Protocol):
    """The forms of content that a template reads from messages of one role, found out when asked for."""

    @property
    def text(self) -> bool: ...
    @property
    def parts(self) -> bool: ...
    @property
    def mapping(self) -> bool:
        """A tool's result that is a JSON object."""


class CallForm(Protocol):
    """The forms of tool calls that a template reads, found out when asked for."""

    @property
    def mapping(self) -> bool:
        """Arguments that are a mapping."""

    @property
    def text(self) -> bool:
        """Arguments that are JSON text."""

    @property
    def silence(self) -> tuple[Silence, ...]:
        """How no content beside calls may be said, the best first."""


class Forms(Protocol):
    """What a template reads. Found out when first asked for."""

    def content(self, role: str) -> ContentForm:
        """The forms of content that it reads from messages of a role."""

    @property
    def calls(self) -> CallForm:
        """The forms of tool calls that it reads."""

    @property
    def alone(self) -> tuple[Silence, ...]:
        """How an assistant's message may say that it has no content, and no calls either; the best first."""


@dataclass(frozen=True, slots=True)
class Change:
    """What was changed: a message before the template saw it, or a rendering against that of the shipped template.

    `before` and `after` are pieces of text; `field` is the field that was changed, where it was one.
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
    """Messages in the form that a template reads, and what was changed for it."""

    messages: Sequence[Mapping[str, Any]]
    changes: list[Change] = field(default_factory=list)
    wrapped: frozenset[int] = frozenset()
    """Messages whose text was put into a part: its origin is the content all the same."""


def adapt(messages: Sequence[Mapping[str, Any]], forms: Forms) -> Adapted:
    """Checked messages in the form that the template reads; the same list where nothing has to change.

    InputError names the message and the field of what has no such form: media, parts of an unknown type, arguments that
    are no JSON object.
    """
    changes: list[Change] = []
    made: dict[int, Mapping[str, Any]] = {}
    wrapped: set[int] = set()
    reads_text: dict[str, bool] = {}
    for index, message in enumerate(messages):
        role, content = message["role"], message.get("content")
        if type(content) is str and (content or role != "assistant") and "tool_calls" not in message:
            if role not in reads_text:
                reads_text[role] = forms.content(role).text
            if reads_text[role]:
                continue
        shaper = _Shaper(index, message, changes)
        shaper.content(forms)
        if role == "assistant":
            shaper.calls(forms)
        if shaper.made is not message:
            made[index] = shaper.made
            if shaper.wrapped:
                wrapped.add(index)
    if not made:
        return Adapted(messages)
    return Adapted([made.get(at, message) for at, message in enumerate(messages)], changes, frozenset(wrapped))


def are_read_as_they_are(messages: Any, forms: Forms) -> bool:
    """Whether messages are of the usual form and the template reads all of them so, as nearly always.

    Then nothing can be wrong with them and nothing has to change: `check_messages` and `adapt` would return them.
    """
    if type(messages) is not list or not messages:
        return False
    texts: set[str] = set()  # the roles whose text is read
    for message in messages:
        if type(message) is not dict:
            return False
        role, content = message.get("role"), message.get("content")
        if type(role) is not str:
            return False
        if role not in texts:
            if role not in ROLES or not forms.content(role).text:
                return False
            texts.add(role)
        if role == "assistant":
            if not _is_read_as_it_is(message, content, forms):
                return False
        elif type(content) is not str:
            return False
    return True


def _is_read_as_it_is(message: dict[str, Any], content: Any, forms: Forms) -> bool:
    """The same of one message of an assistant, whose text is read."""
    for name in THOUGHTS:
        if name in message and type(message[name]) not in TEXT_OR_NONE:
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
        elif not form.mapping or not is_usual(arguments):
            return False
    if content is None:
        return (Silence.NULL if "content" in message else Silence.ABSENT) in form.silence
    return type(content) is str and (bool(content) or Silence.EMPTY in form.silence)


class _Shaper:
    """One message on its way into the template's form."""

    def __init__(self, index: int, message: Mapping[str, Any], changes: list[Change]) -> None:
        self.place = Place(index)
        self.made = message
        self.wrapped = False
        self._changes = changes

    def _set(self, field: str, value: Any, what: str, before: Any, after: str | None = None) -> None:
        self.made = {**self.made, field: value}
        self._note(field, what, before, after)

    def _note(self, field: str, what: str, before: Any, after: str | None) -> None:
        shown = before if isinstance(before, str) else json.dumps(before, ensure_ascii=False, default=str)
        self._changes.append(Change(self.place.message or 0, what, shown, after or "", field))

    # -- content

    def content(self, forms: Forms) -> None:
        content, role = self.made.get("content"), self.made["role"]
        if content is None:
            return  # said below, beside calls or alone
        if isinstance(content, str):
            if not forms.content(role).text and (content or role != "assistant"):
                self._set("content", [{"type": "text", "text": content}], "wrapped as a text part", content, content)
                self.wrapped = True
        elif isinstance(content, Mapping):
            if not forms.content(role).mapping:
                text = self._json(content, "content")
                self._set("content", text, "written as JSON", content, text)
            elif (plain := plain_json(content, self.place.at("content"))) is not content:
                self.made = {**self.made, "content": plain}
        elif role in RESULT_ROLES and content and not any(map(_is_part, content)):
            text = self._json(list(content), "content")
            self._set("content", text, "written as JSON", content, text)
        else:
            self._parts(content, forms.content(role))

    def _parts(self, content: Sequence[Any], form: ContentForm) -> None:
        place = self.place.at("content")
        texts = [_text_of(part, place.at(at)) for at, part in enumerate(content)]
        if not form.parts:
            text = SEPARATOR.join(texts)
            self._set("content", text, "text parts joined", list(content), text)
        elif not all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
            parts = [{"type": "text", "text": text} for text in texts]
            self._set("content", parts, "as text parts", list(content), _written(parts))

    # -- calls

    def calls(self, forms: Forms) -> None:
        calls = self.made.get("tool_calls")
        if "tool_calls" in self.made and not calls:
            self.made = {key: value for key, value in self.made.items() if key != "tool_calls"}
            self._note("tool_calls", "left out, as there are none", "null" if calls is None else "[]", "")
        if calls:
            made = [self._call(f"tool_calls.{at}", call, forms.calls) for at, call in enumerate(calls)]
            if any(new is not old for new, old in zip(made, calls, strict=True)):
                self.made = {**self.made, "tool_calls": made}
        content = self.made.get("content")
        if content is None or content == "":
            self._silence(forms.calls.silence if calls else forms.alone)
            if self.made.get("content") == "" and not forms.content("assistant").text:
                self.made = {**self.made, "content": [{"type": "text", "text": ""}]}

    def _silence(self, ways: tuple[Silence, ...]) -> None:
        """Say that there is no content in a way that the template takes for it."""
        given = Silence.ABSENT if "content" not in self.made else Silence.NULL
        if self.made.get("content") == "":
            given = Silence.EMPTY
        ways = ways or (Silence.EMPTY,)
        if given in ways:
            return
        before = {Silence.ABSENT: "", Silence.NULL: "null", Silence.EMPTY: '""'}[given]
        if ways[0] is Silence.ABSENT:
            self.made = {key: value for key, value in self.made.items() if key != "content"}
            self._note("content", "left out, as it says nothing", before, "")
        else:
            value, after = ("", '""') if ways[0] is Silence.EMPTY else (None, "null")
            self._set("content", value, "no content, as the template reads it", before, after)

    def _call(self, field: str, call: Any, form: CallForm) -> Mapping[str, Any]:
        made: Mapping[str, Any] = call if isinstance(call, Mapping) else dict(call.model_dump(exclude_none=True))
        inner = made.get("function")
        holder = inner if isinstance(inner, Mapping) else made
        if holder is inner:
            field += ".function"
        arguments = self._arguments(f"{field}.arguments", holder, form)
        if arguments is holder.get("arguments") and arguments is not None:
            return made
        changed = {**holder, "arguments": arguments}
        return {**made, "function": changed} if holder is inner else changed

    def _arguments(self, field: str, holder: Mapping[str, Any], form: CallForm) -> Any:
        given = holder.get("arguments")
        if given is None or (form.text and isinstance(given, str) and not given.strip()):
            before = "null" if given is None and "arguments" in holder else given or ""
            self._note(field, "no arguments, as JSON says it", before, "{}")
            return {} if given is None and form.mapping else "{}"
        if isinstance(given, str):
            if form.text:
                return given
            parsed = parsed_arguments(given, self.place.at(field))
            self._note(field, "JSON text read as a mapping", given, _written(parsed))
            return parsed
        if form.mapping:
            return plain_json(given, self.place.at(field))
        text = self._json(given, field)
        self._note(field, "mapping written as JSON text", given, text)
        return text

    def _json(self, value: Any, field: str) -> str:
        place = self.place.at(field)
        plain = plain_json(value, place)
        try:
            return _written(plain)
        except ValueError as error:  # an int of more digits than Python writes
            raise place.error(f"cannot be written as JSON: {error}") from None


def _text_of(part: Any, place: Place) -> str:
    """The text of a part, or InputError with what it is instead."""
    if isinstance(part, str):
        return part
    kind = part.get("type")
    if kind is None:
        media = next((name for name in sorted(MEDIA_PARTS) if name in part), None)
        kind = media or ("text" if isinstance(part.get("text"), str) else None)
    name = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
    if name is None:
        raise place.error(_no_text(kind))
    return place.string(part, name)


def parsed_arguments(text: str, place: Place) -> dict[str, Any]:
    """The mapping that JSON text stands for. What would be lost or changed on the way is refused."""
    if not text.strip():
        return {}
    reads = "arguments are read as a mapping; give a JSON object"
    try:
        value = json.loads(text, object_pairs_hook=unique, parse_constant=no_constant, parse_float=finite, strict=False)
    except RecursionError:
        raise place.error("is nested too deeply") from None
    except ValueError as error:
        advice = "or leave out the call and put what the model wrote into content"
        raise place.error(f"is not valid JSON ({error}), and {reads}, {advice}") from None
    if not isinstance(value, dict):
        raise place.error(f"is JSON of {kind_of(value)}, and {reads}")
    check_depth(value, place)
    return value


def with_parsed_arguments(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Checked messages with the arguments of calls parsed where they are text. Raises InputError if it is not JSON."""
    return [
        {
            **message,
            "tool_calls": [_parsed_call(Place(index, f"tool_calls.{at}"), call) for at, call in enumerate(calls)],
        }
        if (calls := message.get("tool_calls"))
        else message
        for index, message in enumerate(messages)
    ]


def _parsed_call(place: Place, call: Any) -> Mapping[str, Any]:
    made = place.mapping(call)
    if isinstance(made.get("function"), Mapping):
        return {**made, "function": _parsed_call(place.at("function"), made["function"])}
    if not isinstance(made.get("arguments"), str):
        return made
    return {**made, "arguments": parsed_arguments(made["arguments"], place.at("arguments"))}


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _is_part(item: Any) -> bool:
    """Whether an item of a tool's result is a part of a content; if none is, the list is JSON of its own."""
    return isinstance(item, str) or "type" in item or isinstance(item.get("text"), str)


def _no_text(kind: Any) -> str:
    if not isinstance(kind, str):
        return "is a part without a type; text parts are {'type': 'text', 'text': …}"
    if kind in MEDIA_PARTS:
        return (
            f"is a part of type {kind!r}: images, sound, video and files are not supported yet. Leave it out{HAND_OVER}"
        )
    if kind in BLOCKS:
        return (
            f"is a block of type {kind!r}, which OpenAI's messages say in fields of their own (tool_calls, "
            "reasoning_content, messages of role tool); tokentrace.conversation.shapes.openai_messages converts them"
        )
    known = ", ".join(TEXT_PARTS)
    return f"is a part of the unknown type {kind[:80]!r}; parts of text are {known}"


def texts_of(message: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """The texts that a message's content holds, each with its path: of a string, or of text parts."""
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
