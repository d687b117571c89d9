"""What a request asks for, whatever dialect it came in, and what is wrong with one that cannot be answered. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

from ..conversation.place import Place
from ..conversation.values import check_depth, plain_json
from ..engines.protocol import COLDEST
from ..errors import InputError, TokentraceError, shown
from ..tokens.tokenizer import Ids
from ..trajectory.turns import PENALTIES

_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


_SHAPING: Final[Mapping[str, tuple[float, float]]] = {
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 2),
}


UNSERVED: Final[Mapping[str, Sequence[Any]]] = {
    "logit_bias": ({},),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "typical_p": (1,),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "best_of": (1,),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "echo": (False,),
    "logits_processors": ([],),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
}
"""Fields that would change what is sampled or shown, with the values that change nothing. In chat, min-p and penalties
are served, where the engine has them."""

NOT_OFFERED: Final = "the gateway samples from the model's own distribution, so that logprobs are what they say"

EFFORTS: Final = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""How much to think, in the words of the APIs. No other is taken: a template may print the word into its prompt."""


class RequestError(TokentraceError):
    """A request that is not answered. `status` is that of HTTP, `field` is what is wrong in the body.

    `details` is what clients of one dialect read by program.
    """

    def __init__(
        self,
        problem: str,
        *,
        field: str | None = None,
        status: int = 400,
        code: str = "",
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.problem, self.field, self.status, self.code, self.retry_after = problem, field, status, code, retry_after
        self.details = details
        super().__init__(f"{field}: {problem}" if field else problem)

    @property
    def kind(self) -> str:
        """What OpenAI and Anthropic call an error of this status."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @property
    def is_final(self) -> bool:
        """Whether the same request fails again, though clients would send it again: they do at 408, 409, 429, 5xx."""
        return self.status == 409 or self.code == "matcher_failed"


@contextmanager
def refusing(messages: str = "messages") -> Iterator[None]:
    """What is wrong with a conversation or with tools, as a RequestError that names the field of the body."""
    try:
        yield
    except InputError as error:
        raise refused_input(error, messages) from error


def refused_input(error: InputError, messages: str = "messages") -> RequestError:
    """What is wrong with a conversation or with tools, as what is wrong with a body."""
    places = [messages] if error.message is not None or not error.field else []
    places += [] if error.message is None else [str(error.message)]
    return RequestError(error.problem, field=".".join([*places, *filter(None, [error.field])]), code="invalid_value")


@dataclass(frozen=True, slots=True)
class Request:
    """A conversation, and how its next turn is to be sampled. None means: as the session or the engine has it."""

    messages: Sequence[Mapping[str, Any]]
    """In OpenAI's shape, checked."""
    tools: Sequence[Mapping[str, Any]] | None = None
    model: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """0 is all tokens."""
    seed: int | None = None
    shaping: Mapping[str, float] = field(default_factory=dict)
    """Min-p and penalties that were asked for, by name; an engine that does not have one is not asked."""
    stop: tuple[str, ...] = ()
    """Texts at which the answer's content ends. The text itself is not part of the answer."""
    n: int = 1
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: int | None = None
    """How many alternatives are to be told beside each logprob; None for no logprobs at all."""
    continued: bool = False
    """The last message is an assistant's, and is to be continued."""
    calls_allowed: bool = True
    """False for tool_choice "none": what the model writes as calls is content, as written."""
    object_arguments: bool = False
    """Whether a call's arguments have to be told as an object: what is not JSON is left out of them."""
    structure: Mapping[str, Any] | None = None
    """What the content has to be: ``{"type": "json_object"}`` or ``{"type": "json_schema", "schema": {…}}``."""
    prompt_ids: Ids | None = None
    """The prompt itself, where it is given as ids and not as messages."""
    stop_token_ids: tuple[int, ...] = ()
    """Where the engine stops; the template's stop tokens where none are given."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Template variables for this request; a name that the template does not read is refused."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Template variables that are set only where the template reads them (reasoning effort, thinking on or off)."""
    previous: str | None = None
    """The id of the response that this one goes on from: its conversation comes before `messages`."""
    references: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Assistants' messages that are not there whole, by their number: the ids of the items that stand for the rest."""
    instructions: int = 0
    """How many messages at the beginning are instructions for this request alone: 0 or 1."""
    stored: bool = True
    """Whether `previous` of a later request may name the response."""
    ignored: tuple[str, ...] = ()
    """Fields that were sent and that nothing reads."""
    wishes: tuple[str, ...] = ()
    """Fields that no engine can be made to keep to (tool_choice "required", say); the answer says so."""
    echo: Mapping[str, Any] = field(default_factory=dict)
    """What the dialect repeats in its answer, or needs to write it."""

    @property
    def token_ids(self) -> bool:
        """Whether the answer carries the ids of prompt and completion, and the completion's logprobs."""
        return bool(self.echo.get("token_fields"))


class Body:
    """A request's body, or the object `within` a field of it, read field by field; what was not read is `unread`."""

    def __init__(self, body: Any, within: str = "") -> None:
        if not isinstance(body, Mapping):
            problem = f"must be a JSON object, not {shown(body)}"
            raise RequestError(problem, field=within) if within else RequestError(f"the body {problem}")
        self._body, self._within = body, within
        self._read: set[str] = set()

    def wrong(self, name: str, problem: str, **more: Any) -> RequestError:
        """The error for a field."""
        return RequestError(problem, field=self._full(name), **more)

    def _full(self, name: str) -> str:
        return f"{self._within}.{name}" if self._within else name

    def inside(self, name: str) -> Body:
        """The object in a field, to be read field by field itself; an empty one where there is none."""
        return Body(self.get(name, Mapping, "an object", {}), self._full(name))

    def get(self, name: str, kind: type | tuple[type, ...], words: str, default: Any = None) -> Any:
        """A field, of one of these types. None and a field that is not there are the default."""
        self._read.add(name)
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self.wrong(name, f"must be {words}, not {shown(value)}")
        return value

    def number(self, name: str, least: float, most: float) -> float | None:
        """A number within these bounds; None where there is none."""
        value = self.get(name, (int, float), "a number")
        if value is not None and not least <= value <= most:
            raise self.wrong(name, f"must be a number from {least:g} to {most:g}, not {shown(value)}")
        return value  # type: ignore[no-any-return]

    def whole(self, name: str, least: int, most: int = 2**31 - 1) -> int | None:
        """An integer within these bounds; None where there is none."""
        value = self.get(name, int, "an integer")
        if value is not None and not least <= value <= most:
            raise self.wrong(name, f"must be an integer from {least} to {most}, not {shown(value)}")
        return value  # type: ignore[no-any-return]

    def sampling(self) -> dict[str, Any]:
        """What is called the same in every API, as fields of a `Request`: the model, how to sample, what is streamed.

        ``top_k``, ``seed`` and ``chat_template_kwargs`` are vLLM's.
        """
        given = self.get("chat_template_kwargs", Mapping, "an object", {})
        with refusing():
            variables = plain_json(given, Place(field="chat_template_kwargs"))
        return {
            "model": self.get("model", str, "a string", ""),
            "temperature": self.temperature(),
            "top_p": self.top_p(),
            "top_k": self.top_k(),
            "seed": self.whole("seed", 0, 2**63 - 1),
            "stream": self.flag("stream"),
            "variables": variables,
        }

    def temperature(self) -> float | None:
        """The temperature: 0, or one that engines keep to."""
        value = self.number("temperature", 0, 2)
        if value is not None and 0 < value < COLDEST:
            problem = f"must be 0, for greedy sampling, or at least {COLDEST}: engines do not keep to a lower one"
            raise self.wrong("temperature", problem)
        return value

    def top_p(self) -> float | None:
        """The share of the likeliest tokens that is sampled from."""
        value = self.number("top_p", 0, 1)
        if value == 0:
            raise self.wrong("top_p", "must be above 0: no token would be left; temperature 0 is greedy")
        return value

    def top_k(self) -> int | None:
        """How many of the likeliest tokens are sampled from; -1 and 0 are all."""
        value = self.whole("top_k", -1)
        return value if value is None else max(value, 0)

    def shaping(self) -> dict[str, float]:
        """Min-p and penalties, where they are not the value that does nothing."""
        found = {name: self.number(name, *bounds) for name, bounds in _SHAPING.items()}
        if found["repetition_penalty"] == 0:
            raise self.wrong("repetition_penalty", "must be above 0: logits are divided by it; 1 changes nothing")
        return {name: value for name, value in found.items() if value not in (None, PENALTIES.get(name, 0))}

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        return bool(self.get(name, bool, "true or false", default))

    def texts(self, name: str, most: int) -> tuple[str, ...]:
        """A string, or a list of strings."""
        value = self.get(name, (str, list), "a string or a list of strings", ())
        value = (value,) if isinstance(value, str) else tuple(value)
        if len(value) > most or not all(isinstance(each, str) and each for each in value):
            raise self.wrong(name, f"must be at most {most} strings, none of them empty")
        return value

    def refuse(self, name: str, harmless: Sequence[Any], why: str, details: Mapping[str, Any] | None = None) -> None:
        """Refuse a field that would change what is sampled and cannot be served; harmless values are fine."""
        self._read.add(name)
        value = self._body.get(name)
        if value is not None and value not in harmless:
            raise self.wrong(name, f"{why}; leave it out", code="unsupported_parameter", details=details)

    def refuse_unserved(self, served: Collection[str] = ()) -> None:
        """Refuse every setting of other servers that is not `served` here."""
        for name, harmless in UNSERVED.items():
            if name not in served:
                self.refuse(name, harmless, NOT_OFFERED)

    def skip(self, *names: str) -> None:
        """Fields that nothing has to read, because they change nothing that is sampled or recorded."""
        self._read.update(names)

    @property
    def unread(self) -> tuple[str, ...]:
        return tuple(sorted(self._full(str(name)[:80]) for name in self._body if name not in self._read))


def one_of(field: str, value: Any, options: Sequence[str]) -> str:
    """A value that is one of a few words."""
    if not isinstance(value, str) or value not in options:
        raise RequestError(f"must be one of {', '.join(options)}, not {shown(value)}", field=field)
    return value


def offered(field: str, name: Any, tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The name of a function that is among the tools, which are in the shape of chat completions."""
    if not isinstance(name, str) or all((tool.get("function") or tool).get("name") != name for tool in tools or ()):
        raise RequestError(f"no function {shown(name)} is among the tools", field=field)
    return name


def structure_of(kind: Any, schema: Any, field: str, inside: str = "schema") -> Mapping[str, Any] | None:
    """What content of a kind has to be, None for text: the kind is at ``type`` of the `field`, the schema `inside`."""
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "json_object"}
        case "json_schema":
            if not isinstance(schema, Mapping):
                raise RequestError("must be a JSON schema (an object)", field=f"{field}.{inside}")
            with refusing():
                check_depth(schema, Place(field=f"{field}.{inside}"))
            return {"type": "json_schema", "schema": schema}
    problem = f"must be text, json_object or json_schema, not {shown(kind)}"
    raise RequestError(problem, field=f"{field}.type", code="unsupported_parameter")


def thinking_hints(on: bool | None, effort: Any = None, *, field: str = "reasoning_effort") -> dict[str, Any]:
    """The variables for thinking `on` or off (None: not said) and for an effort; RequestError names the `field`.

    Templates call the switch ``enable_thinking`` or ``thinking``, and the effort ``reasoning_effort``. An effort of
    ``none`` is thinking off; any other is thinking on, unless it was said to be off.
    """
    hints: dict[str, Any] = {}
    if effort is not None and one_of(field, effort, EFFORTS) != "none":
        hints["reasoning_effort"] = effort
    if on is None and effort is not None:
        on = effort != "none"
    return hints if on is None else {**hints, "enable_thinking": on, "thinking": on}
