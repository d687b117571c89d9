"""What is wrong with a request, as data: where, what, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from ..engines.protocol import EngineError, EngineRefusal, EngineUnavailable
from ..errors import InputError, TokentraceError
from ..store.store import Closed, KeyConflict, Missing, StoreError

_KINDS: Final[Mapping[int, str]] = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip
_INDEX: Final = re.compile(r"\[(\d+|\.\.\.)\]")

Schema = TypeVar("Schema")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem at a `path` of the body (``messages.3.content``), or with the whole request."""

    path: str
    message: str
    fix: str = ""
    """What the sender can do, if that is not obvious."""

    def __str__(self) -> str:
        text = f"{self.path}: {self.message}" if self.path else self.message
        return f"{text}; {self.fix}" if self.fix else text


class RequestError(TokentraceError):
    """A request that is not answered. `status` is the HTTP status, `field` the path in the body.

    `details` is for clients of one dialect that read it by program.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        fix: str = "",
        status: int = 400,
        code: str = "",
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.problem = Problem(field, message, fix)
        self.status, self.code, self.retry_after, self.details = status, code, retry_after, details
        super().__init__(str(self.problem))

    @property
    def field(self) -> str | None:
        """The path of the field, if one is wrong."""
        return self.problem.path or None

    @property
    def kind(self) -> str:
        """OpenAI's and Anthropic's name for errors of this status."""
        return _KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")

    @property
    def is_final(self) -> bool:
        """True if the same request fails again, although clients retry this status (408, 409, 429, 5xx)."""
        return self.status == 409 or self.code == "matcher_failed"


def convert(value: Any, schema: type[Schema], within: str = "") -> Schema:
    """Read a JSON value by its schema. Raises RequestError that names the first field which does not fit."""
    try:
        return msgspec.convert(value, schema)
    except msgspec.ValidationError as error:
        message, _, path = str(error).removesuffix("`").partition(" - at `$")
        path = _INDEX.sub(r".\1", f"{within}{path}").strip(".").removesuffix("....")
        raise RequestError(message.replace("`", ""), field=path, code="invalid_value") from None
    except UnicodeEncodeError:
        raise RequestError("a field has half of a surrogate pair", field=within, code="invalid_value") from None


@contextmanager
def naming_fields(messages: str = "messages") -> Iterator[None]:
    """Turn an InputError about a conversation or tools into a RequestError. `messages` is the conversation's field."""
    try:
        yield
    except InputError as error:
        raise input_problem(error, messages) from error


def input_problem(error: InputError, messages: str = "messages") -> RequestError:
    """An InputError as a RequestError."""
    path = [messages] if error.message is not None or not error.field else []
    path += [] if error.message is None else [str(error.message)]
    path += [error.field] if error.field else []
    return RequestError(error.problem, field=".".join(path), code="invalid_value")


def request_error(error: EngineError | StoreError) -> RequestError:
    """A failure of the engine or the store, as an agent gets it."""
    match error:
        case EngineUnavailable():
            return RequestError(f"the engine is not available: {error}", status=503, code="engine", retry_after=2)
        case EngineRefusal():
            status = error.status if error.status in (400, 413, 422, 429) else 400
            return RequestError(f"the engine refused the request: {error}", status=status, code="engine_refusal")
        case Missing():
            return RequestError(str(error), status=404, code="no_session")
        case Closed() | KeyConflict():
            return RequestError(str(error), status=409, code="closed" if isinstance(error, Closed) else "exists")
        case StoreError():
            return RequestError(f"the store failed: {error}", status=503, code="store", retry_after=2)
    return RequestError(f"the engine failed: {error}", status=502, code="engine")
