"""What a request asks for, whatever its dialect. Pure.

A dialect serves a field, refuses it if it would change what is sampled, ignores it, or lists it
as unenforced.
"""

import bisect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from ..engines.errors import EngineError, EngineRefusal, EngineUnavailable
from ..engines.protocol import SamplingParams
from ..errors import InputError, TokentraceError, brief
from ..settings import explain_invalid
from ..store.store import Closed, KeyConflict, Missing, StoreError
from ..tokens.tokenizer import Ids

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Templates may print these words, so others are not allowed."""

TOKEN_IDS_HEADER = "x-tokentrace-token-ids"

_DISTRIBUTION = "the gateway samples from the model's own distribution, so that logprobs are exact"
Refused = Mapping[str, tuple[Sequence[Any], str]]
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(("length_penalty", "typical_p", "best_of"), (1,)),
    **dict.fromkeys(("echo", "ignore_eos", "include_stop_str_in_output", "min_tokens"), (0,)),
    "use_beam_search": (0,),
    **dict.fromkeys(("bad_words", "allowed_token_ids", "stop_token_ids", "logits_processors"), ([],)),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_logprobs", "structured_outputs"), ()),
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    "logit_bias": ({},),
}
REFUSED: Refused = {name: (values, _DISTRIBUTION) for name, values in _NEUTRAL.items()}


class TokenFields(StrEnum):
    TOKENTRACE = "tokentrace"
    VLLM = "vllm"
    NEMO_GYM = "nemo_gym"


class StreamOptions(Struct):
    include_usage: bool | None = None


class SamplingBody(Struct):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


SAMPLING = SamplingBody.__struct_fields__


class AgentBody(SamplingBody):
    model: str | None = None
    stream: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_ids: bool | None = None
    return_token_id_information: bool | None = None


Body = TypeVar("Body", bound=AgentBody)


class AnswerOptions(Struct, frozen=True, omit_defaults=True):
    logprobs: int | None = None
    """How many alternatives to report for each token; None for no logprobs."""
    calls_allowed: bool = True
    """If False, calls that the model writes are text."""
    object_arguments: bool = False
    usage_in_stream: bool = False
    functions: bool = False
    tokens_as_ids: bool = False
    token_fields: tuple[TokenFields, ...] = ()
    encrypted: bool = False
    """If True, Responses repeats reasoning as an opaque string."""
    namespaces: dict[str, list[str]] = {}
    """For each function that the model sees: its namespace, and its name in it."""
    repeated: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class ReadHistory:
    """The beginning of a history, read with an earlier request."""

    items: int = 0
    messages: Sequence[Mapping[str, Any]] = ()
    starts: Sequence[int] = ()
    tools: Sequence[Mapping[str, Any]] | None = None
    joined: bool = False


NOTHING_READ = ReadHistory()


@dataclass(frozen=True, slots=True)
class Request:
    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None
    model: str = ""
    max_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    continued: bool = False
    structure: Mapping[str, Any] | None = None
    """What the content must be: ``{"type": "json_schema", "schema": {…}}``."""
    prompt_ids: Ids | None = None
    stop_token_ids: tuple[int, ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Template variables that are set only if the template reads them."""
    previous: str | None = None
    references: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Stored items, by the number of the assistant message that they complete."""
    instructions: int = 0
    """How many messages are instructions for this request alone: 0 or 1."""
    stored: bool = False
    starts: Sequence[int] = field(default=(), compare=False)
    """How many messages precede each item of the history. If empty, nothing is reused."""
    joined: bool = False
    """Whether items are read with those before them, back to the assistant's message."""
    ignored: tuple[str, ...] = ()
    unenforced: tuple[str, ...] = ()
    answer: AnswerOptions = field(default_factory=AnswerOptions)

    def past(self, items: int) -> ReadHistory:
        """The first `items`, or fewer if a later one may join their last message."""
        messages = self.messages
        at, starts = min(items, len(self.starts)), [*self.starts, len(messages)]
        while at and self.joined:
            at -= 1
            start = starts[at]
            if start < starts[at + 1] and messages[start].get("role") == "assistant":
                break
        if not at:
            return NOTHING_READ
        first = starts[0]
        starts_read = [start - first for start in starts[:at]]
        return ReadHistory(at, messages[first : starts[at]], starts_read, self.tools, self.joined)


def sampling_of(body: SamplingBody, within: str = "") -> dict[str, Any]:
    values = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
    if values.get("top_k") == -1:
        values["top_k"] = 0  # vLLM's value for all tokens
    check_sampling(values, within)
    return values


def check_sampling(values: Mapping[str, Any], within: str = "") -> None:
    for name, value in values.items():
        try:
            SamplingParams(**{"max_tokens": 1, name: value})
        except EngineError as error:
            raise RequestError(str(error), field=f"{within}{name}", code="invalid_value") from error


def read_body(
    raw: Any, schema: type[Body], refused: Refused, harmless: Sequence[str]
) -> tuple[Body, dict[str, Any]]:
    """Also returns the `Request` fields that all APIs share."""
    body = convert(raw, schema)
    refuse(raw, refused)
    return body, {
        "model": body.model or "",
        "sampling": sampling_of(body),
        "stream": bool(body.stream),
        "variables": body.chat_template_kwargs or {},
        "ignored": ignored_fields(raw, body, *refused, *harmless),
    }


def unenforced(**conditions: bool) -> tuple[str, ...]:
    return tuple(filter(conditions.get, conditions))


def refuse(body: Mapping[str, Any], refused: Refused) -> None:
    for name in refused.keys() & body.keys():
        neutral, why = refused[name]
        if body[name] is not None and body[name] not in neutral:
            raise RequestError(f"{why}; leave it out", field=name, code="unsupported_parameter")


def ignored_fields(
    body: Mapping[str, Any], read: Struct, *listed: str, within: str = ""
) -> tuple[str, ...]:
    names = read.__struct_fields__
    ignored = [f"{within}{name[:80]}" for name in body if name not in names and name not in listed]
    for name, value in body.items():
        if isinstance(value, dict) and isinstance(inner := getattr(read, name, None), Struct):
            ignored += ignored_fields(value, inner, within=f"{within}{name}.")
    return tuple(sorted(ignored))


def requested_token_fields(
    body: AgentBody, headers: Mapping[str, str], default: TokenFields, served: Sequence[TokenFields]
) -> tuple[TokenFields, ...]:
    """The shapes of ids in the answer. Raises RequestError for one that is not served."""
    header = headers.get(TOKEN_IDS_HEADER, "").lower().replace("-", "_")
    words = {word.strip() for word in header.split(",")} - {"", "false", "0"}
    ways: set[str] = {"tokentrace" if word in ("true", "1") else word for word in words}
    if ways and not ways <= set(TokenFields):
        raise RequestError(f"must be true, or any of {', '.join(TokenFields)}", field=TOKEN_IDS_HEADER)
    ways |= {default} if body.return_token_ids else set()
    ways |= {TokenFields.NEMO_GYM} if body.return_token_id_information else set()
    if unserved := ways.difference(served):
        problem = f"{', '.join(unserved)} is for another API; use {', '.join(served)}"
        raise RequestError(problem, field=TOKEN_IDS_HEADER, code="unsupported_parameter")
    return tuple(way for way in TokenFields if way in ways) if ways else ()


def stop_texts(value: str | list[str] | None, field: str, most: int) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(value or ())
    if len(texts) > most or not all(texts):
        raise RequestError(f"must be at most {most} strings, none of them empty", field=field)
    return texts


def structure_of(kind: Any, schema: Any, field: str, inside: str = "schema") -> Mapping[str, Any] | None:
    if kind in (None, "text"):
        return None
    if kind not in ("json_object", "json_schema"):
        problem = f"must be text, json_object or json_schema, not {brief(kind)}"
        raise RequestError(problem, field=f"{field}.type", code="unsupported_parameter")
    if kind == "json_schema" and not isinstance(schema, dict):
        raise RequestError("must be a JSON schema (an object)", field=f"{field}.{inside}")
    return {"type": kind, **({"schema": schema} if kind == "json_schema" else {})}


def thinking_hints(on: bool | None, effort: Any, field: str = "reasoning_effort") -> dict[str, Any]:
    """Template variables. With `on` None, the effort decides whether to think."""
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(f"must be one of {', '.join(_EFFORTS)}, not {brief(effort)}", field=field)
    hints = {} if effort in (None, "none") else {"reasoning_effort": effort}
    if on is None and effort is not None:
        on = effort != "none"
    return hints if on is None else {**hints, "enable_thinking": on, "thinking": on}


_KINDS: Mapping[int, str] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip

Schema = TypeVar("Schema")


class RequestError(TokentraceError):
    """A request that cannot be answered. `field` is a path: ``messages.3.content``."""

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        status: int = 400,
        code: str = "",
        retry: float = 0,
        details: Any = None,
    ) -> None:
        self.field, self.status, self.code = field or None, status, code
        self.retry, self.details = retry, details
        super().__init__(f"{field}: {message}" if field else message)

    @property
    def kind(self) -> str:
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")


def convert(value: Any, schema: type[Schema], within: str = "", *, strict: bool = True) -> Schema:
    try:
        return msgspec.convert(value, schema, strict=strict)
    except msgspec.ValidationError as error:
        path, problem = explain_invalid(error, schema)
        place = ".".join(filter(None, (within, *map(str, path))))
        raise RequestError(problem.replace("`", ""), field=place, code="invalid_value") from None
    except UnicodeEncodeError:
        problem = "a field contains a lone surrogate"
        raise RequestError(problem, field=within, code="invalid_value") from None


@contextmanager
def naming_fields(messages: str = "messages", first: int = 0) -> Iterator[None]:
    """Turn an InputError into a RequestError. Items of `messages` count from `first`."""
    try:
        yield
    except InputError as error:
        raise request_error(error.renumbered(-first), messages) from error


def placed_error(error: InputError, history: str, starts: Sequence[int]) -> RequestError:
    """The error with the path of its item, and of its field if items are messages."""
    if error.message is None:
        return request_error(error)
    at = bisect.bisect_right(starts, error.message) - 1
    path = f"{history}.{at}" if at >= 0 else history
    path += f".{error.field}" if error.field and isinstance(starts, range) else ""
    return RequestError(error.problem, field=path, code="invalid_value")


def request_error(error: TokentraceError, messages: str = "messages") -> RequestError:
    match error:
        case RequestError():
            return error
        case InputError():
            path = [messages] if error.message is not None or not error.field else []
            path += [str(each) for each in (error.message, error.field) if each not in (None, "")]
            return RequestError(error.problem, field=".".join(path), code="invalid_value")
        case EngineUnavailable():
            return RequestError(f"the engine is not available: {error}", status=503, code="engine", retry=2)
        case EngineRefusal():
            status = error.status if error.status in (400, 413, 422, 429) else 400
            refusal = f"the engine refused the request: {error}"
            return RequestError(refusal, status=status, code="engine_refusal")
        case EngineError():
            return RequestError(f"the engine failed: {error}", status=502, code="engine")
        case Missing():
            return RequestError(str(error), status=404, code="no_session")
        case Closed() | KeyConflict():
            code = "closed" if isinstance(error, Closed) else "exists"
            return RequestError(str(error), status=409, code=code)
        case StoreError():
            return RequestError(f"the store failed: {error}", status=503, code="store", retry=2)
    return RequestError(str(error), code="invalid_value")
