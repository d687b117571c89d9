"""A dialect is an API that agents speak: it reads requests and writes answers. Pure.

`ItemStream` turns a parser's events into changes of items (reasoning, text and calls), each as
soon as it is certain. A `Dialect` writes changes as a stream, items as a whole answer.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from ..engines.channels import TOP_LOGPROBS
from ..engines.protocol import Completion, Delta
from ..parsing.events import ArgumentsDelta, CallFinished, CallNamed, ContentDelta, Event, ReasoningDelta
from ..parsing.response import CallStatus, Finish, ParsedResponse, ParsedToolCall, PartKind, TokenRange
from ..tokens.tokenizer import Ids
from ..values.plain import is_unicode, json_bytes
from .requests import AnswerOptions, Request, RequestError, TokenFields

StreamEvent = dict[str, Any]
CallId = Callable[[int], str]
OPENAI_END = b"data: [DONE]\n\n"
_LETTERS = (b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz" * 5)[:256]
_LOWEST = -9999.0
_UNSAFE = re.compile("\x85|\u2028|\u2029".encode())


@dataclass(slots=True, eq=False)
class Item:
    index: int
    kind: PartKind
    text: str = ""
    """The text, or arguments, which may be incomplete JSON."""
    name: str = ""
    id: str = ""
    attempt: int = -1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The arguments as an object. Set only if they must be one."""
    cut_off: bool = False

    def openai_call(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.text}}


class ItemChange(NamedTuple):
    event: Literal["opened", "grew", "closed"]
    item: Item
    text: str = ""


class ItemStream:
    """Builds the items of one completion and reports every change.

    **An attempt is a call once its name is certain**, whatever becomes of its arguments. Where
    these must be an object (Anthropic's ``input``), a call is sent whole at its end, and broken
    or cut-off arguments are text. It also looks for stop texts, since engines stop at ids.
    """

    def __init__(self, call_id: CallId, options: AnswerOptions, stop: Sequence[str] = ()) -> None:
        self.items: list[Item] = []
        self.statuses: list[CallStatus] = []
        self.late_ids: dict[str, str] = {}
        """The model's ids of calls, by the ids that the client knows."""
        self.stopped_by: str | None = None
        self._call_id = call_id
        self._options = options
        self._stop = tuple(stop)
        self._changes: list[ItemChange] = []
        self._withheld = ""
        self._open: Item | None = None

    def feed(self, events: Iterable[Event]) -> list[ItemChange]:
        options = self._options
        for event in events:
            if self.stopped_by is not None:
                break
            if type(event) is ContentDelta:
                self._content(event.text)
                continue
            self._release()
            match event:
                case ReasoningDelta(text):
                    self._grow(PartKind.REASONING, text)
                case CallNamed(index, name, id) if options.calls_allowed and not options.object_arguments:
                    self._start(PartKind.TOOL_CALL, name=name, id=id or self._call_id(index), attempt=index)
                case ArgumentsDelta(_, text) if self._call is not None:
                    self._grow(PartKind.TOOL_CALL, text)
                case CallFinished(_, call, lead):
                    self._end_call(call, lead)
        changes, self._changes = self._changes, []
        return changes

    def finish(self, events: Iterable[Event], *, cut_off: bool) -> list[ItemChange]:
        """Add the parser's last events. `cut_off`: there is no stop token."""
        changes = self.feed(events)
        if self.stopped_by is None:
            self._release()
            if self._open is not None:
                self._open.cut_off = cut_off
        self._close()
        return [*changes, *self._changes]

    def _content(self, text: str) -> None:
        if not self._stop:
            self._grow(PartKind.CONTENT, text)
            return
        text = self._withheld + text
        matches = [(at, -len(stop), stop) for stop in self._stop if (at := text.find(stop)) >= 0]
        if matches:
            end, _, self.stopped_by = min(matches)
            self._withheld = ""
        else:
            most = len(text) + 1
            starts = (stop[:size] for stop in self._stop for size in range(1, min(len(stop), most)))
            end = len(text) - max((len(start) for start in starts if text.endswith(start)), default=0)
            self._withheld = text[end:]
        self._grow(PartKind.CONTENT, text[:end])

    def _release(self) -> None:
        text, self._withheld = self._withheld, ""
        self._grow(PartKind.CONTENT, text)

    def _grow(self, kind: PartKind, text: str) -> None:
        if not text:
            return
        item = self._open
        if item is None or item.kind is not kind:
            item = self._start(kind)
        item.text += text
        self._changes.append(ItemChange("grew", item, text))

    def _start(self, kind: PartKind, **fields: Any) -> Item:
        self._close()
        item = self._open = Item(len(self.items), kind, **fields)
        self.items.append(item)
        self._changes.append(ItemChange("opened", item))
        return item

    def _close(self) -> None:
        if self._open is not None:
            self._changes.append(ItemChange("closed", self._open))
            self._open = None

    @property
    def _call(self) -> Item | None:
        return self._open if self._open is not None and self._open.kind is PartKind.TOOL_CALL else None

    def _end_call(self, call: ParsedToolCall, lead: str) -> None:
        item, options, status = self._call, self._options, call.status
        self.statuses.append(status)
        if item is not None:
            if call.late_id and call.id:
                self.late_ids[item.id] = call.id
            item.cut_off = status is CallStatus.TRUNCATED
            self._close()
            return
        # are the arguments complete? They may be empty only if the call is closed
        is_open = status is CallStatus.TRUNCATED or (not call.arguments and status is CallStatus.UNCLOSED)
        is_object = call.arguments is not None and not is_open and is_unicode(call.arguments)
        if not (options.calls_allowed and options.object_arguments and call.name and is_object):
            self._content(lead + call.raw)
            return
        id = call.id or self._call_id(call.index)
        arguments = call.arguments or {}
        self._start(PartKind.TOOL_CALL, name=call.name, id=id, attempt=call.index, arguments=arguments)
        self._grow(PartKind.TOOL_CALL, call.arguments_text)
        self._close()


def changes_of(items: Iterable[Item]) -> list[ItemChange]:
    changes: list[ItemChange] = []
    for item in items:
        grew = [ItemChange("grew", item, item.text)] if item.text else []
        changes += [ItemChange("opened", item), *grew, ItemChange("closed", item)]
    return changes


def token_spans(response: ParsedResponse, items: Sequence[Item]) -> dict[int, list[TokenRange]]:
    """The tokens of each text item, by its index."""
    calls = {item.attempt for item in items if item.kind is PartKind.TOOL_CALL}
    texts = [item for item in items if item.kind is PartKind.CONTENT]
    spans: dict[int, list[TokenRange]] = {item.index: [] for item in texts}
    remaining = [len(item.text) for item in texts]
    at = stop = 0
    for part in response.parts:
        start, stop = stop if part.lead else part.span.start, part.span.stop
        is_call = part.call is not None and response.tool_calls[part.call].index in calls
        length = len(part.lead) + len(part.text)
        if is_call or part.kind is PartKind.REASONING or not length or at == len(texts):
            continue
        spans[texts[at].index].append(TokenRange(start, stop))
        remaining[at] -= length
        if remaining[at] <= 0:
            at += 1
    return spans


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    items: Sequence[Item]
    completion: Completion
    response: ParsedResponse
    stopped_by: str | None = None
    statuses: Sequence[CallStatus] = ()
    late_ids: Mapping[str, str] = field(default_factory=dict)

    @property
    def message(self) -> dict[str, Any]:
        """A chat completions message. ``content`` is None only if there are calls."""
        texts = dict.fromkeys(PartKind, "")
        for item in self.items:
            texts[item.kind] += item.text
        calls = [item.openai_call() for item in self.items if item.kind is PartKind.TOOL_CALL]
        message = {"role": "assistant", "content": texts[PartKind.CONTENT] or (None if calls else "")}
        if texts[PartKind.REASONING]:
            message["reasoning_content"] = texts[PartKind.REASONING]
        return {**message, "tool_calls": calls} if calls else message

    @property
    def finish_reason(self) -> Literal["stop", "length", "tool_calls"]:
        """Chat completions' finish reason. After a stop text it is never ``length``."""
        if self.stopped_by is None and self.response.finish is Finish.LENGTH:
            return "length"
        return "tool_calls" if any(item.kind is PartKind.TOOL_CALL for item in self.items) else "stop"


class Usage(NamedTuple):
    prompt: int
    completion: int
    cached: int
    reasoning: int

    def openai(self, prompt: str = "prompt", completion: str = "completion") -> dict[str, Any]:
        return {
            f"{prompt}_tokens": self.prompt,
            f"{completion}_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            f"{prompt}_tokens_details": {"cached_tokens": self.cached},
            f"{completion}_tokens_details": {"reasoning_tokens": self.reasoning},
        }


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    request: Request
    id: str
    """Letters and digits. Dialects add a prefix."""
    created: int
    model: str
    prompt_ids: Ids
    token_bytes: Callable[[int], bytes]


class Dialect(ABC):
    """An API that agents speak. An instance writes one answer, streamed or whole."""

    name: ClassVar[str]
    history: ClassVar[str] = "messages"
    structure: ClassVar[str] = "response_format"
    end: ClassVar[bytes] = b""
    keep_alive: ClassVar[bytes] = b": keep-alive\n\n"
    read: ClassVar[Callable[..., Request]]

    def __init__(self, head: Head) -> None:
        self.head, self.options = head, head.request.answer

    @staticmethod
    def error(error: RequestError) -> dict[str, Any]:
        about = {"message": str(error), "type": error.kind, "param": error.field}
        return {"error": {**about, "code": error.code or None}}

    @abstractmethod
    def whole(self, replies: Sequence[Reply]) -> dict[str, Any]: ...

    def open(self) -> list[StreamEvent]:
        return []

    def feed(self, choice: int, changes: Sequence[ItemChange], delta: Delta | None) -> list[StreamEvent]:
        return [event for change in changes for event in self.encode(change)]

    def encode(self, change: ItemChange) -> list[StreamEvent]:
        raise NotImplementedError

    @abstractmethod
    def close(self, replies: Sequence[Reply]) -> list[StreamEvent]:
        """The last events, sent after the turn is stored."""

    def fail(self, error: RequestError) -> list[StreamEvent]:
        """The events for a failed answer. No end marker follows."""
        return [self.error(error)]

    @property
    def prompt_fields(self) -> dict[str, Any]:
        is_requested = TokenFields.VLLM in self.options.token_fields
        return {"prompt_token_ids": self.head.prompt_ids.tolist()} if is_requested else {}

    def usage(self, replies: Sequence[Reply]) -> Usage:
        """The token counts of an answer. Its prompt counts once."""
        spans = [span for reply in replies if (span := reply.response.span(PartKind.REASONING)) is not None]
        return Usage(
            prompt=len(self.head.prompt_ids),
            completion=sum(len(reply.completion.ids) for reply in replies),
            cached=max((reply.completion.cached_tokens or 0 for reply in replies), default=0),
            reasoning=sum(span.stop - span.start for span in spans),
        )

    def token_fields(self, reply: Reply, way: TokenFields) -> dict[str, Any]:
        if way not in self.options.token_fields:
            return {}
        ids = reply.completion.ids.tolist()
        logprobs = reply.completion.logprobs.tolist()
        if way is TokenFields.VLLM:
            return {"token_ids": ids}
        prompt = {"prompt_token_ids": self.head.prompt_ids.tolist()}
        if way is TokenFields.NEMO_GYM:
            return {**prompt, "generation_token_ids": ids, "generation_log_probs": logprobs}
        return {"tokentrace": {**prompt, "completion_token_ids": ids, "logprobs": logprobs}}

    def logprobs(self, delta: Delta) -> list[dict[str, Any]]:

        def entry(id: int, logprob: float) -> dict[str, Any]:
            raw = self.head.token_bytes(id)
            text = f"token_id:{id}" if self.options.tokens_as_ids else raw.decode("utf-8", "replace")
            return {"token": text, "logprob": max(float(logprob), _LOWEST), "bytes": list(raw)}

        limit = self.options.logprobs or 0
        alternatives = delta.channels.get(TOP_LOGPROBS, ()) if limit else ()
        # a channel that comes with the last piece covers the whole completion
        if len(alternatives) != len(delta.ids):
            alternatives = [()] * len(delta.ids)
        sampled = zip(delta.ids.tolist(), delta.logprobs.tolist(), alternatives, strict=True)
        return [
            {**entry(id, logprob), "top_logprobs": [entry(*one) for one in list(some)[:limit]]}
            for id, logprob, some in sampled
        ]


def encode_sse(event: Mapping[str, Any]) -> bytes:
    data = _UNSAFE.sub(lambda match: b"\\u%04x" % ord(match[0].decode()), json_bytes(event))
    name = f"event: {event['type']}\n".encode() if "type" in event else b""
    return b"%sdata: %s\n\n" % (name, data)


def response_name(id: str) -> str:
    return "response:" + id.rsplit("_", 1)[-1].rsplit("-", 1)[-1]


def call_ids_of(id: str, choice: int) -> CallId:
    """Nine letters and digits, as Mistral's templates require."""

    def call_id(index: int) -> str:
        data = hashlib.blake2b(f"{id}/{choice}/{index}".encode(), digest_size=9).digest()
        return data.translate(_LETTERS).decode("ascii")

    return call_id
