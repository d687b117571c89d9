"""What is wrong with a request: where, what, and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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


class RequestError(TokentraceError):
    """A request that is not answered. `field` is a path in the body (``messages.3.content``).

    `status` is the HTTP status, `fix` what the sender can do. `details` is for clients that read it by program.
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
        self.field, self.status, self.code = field or None, status, code
        self.retry_after, self.details = retry_after, details
        super().__init__((f"{field}: " if field else "") + message + (f"; {fix}" if fix else ""))

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
def naming_fields(messages: str = "messages", first: int = 0) -> Iterator[None]:
    """Turn an InputError about a conversation or tools into a RequestError.

    `messages` is the conversation's field, `first` the number of the first message that was read.
    """
    try:
        yield
    except InputError as error:
        raise request_error(error.renumbered(-first), messages) from error


def request_error(error: TokentraceError, messages: str = "messages") -> RequestError:
    """An error as an agent gets it."""
    match error:
        case RequestError():
            return error
        case InputError():
            path = [messages] if error.message is not None or not error.field else []
            path += [str(each) for each in (error.message, error.field) if each not in (None, "")]
            return RequestError(error.problem, field=".".join(path), code="invalid_value")
        case EngineUnavailable():
            return RequestError(f"the engine is not available: {error}", status=503, code="engine", retry_after=2)
        case EngineRefusal():
            status = error.status if error.status in (400, 413, 422, 429) else 400
            return RequestError(f"the engine refused the request: {error}", status=status, code="engine_refusal")
        case EngineError():
            return RequestError(f"the engine failed: {error}", status=502, code="engine")
        case Missing():
            return RequestError(str(error), status=404, code="no_session")
        case Closed() | KeyConflict():
            return RequestError(str(error), status=409, code="closed" if isinstance(error, Closed) else "exists")
        case StoreError():
            return RequestError(f"the store failed: {error}", status=503, code="store", retry_after=2)
    return RequestError(str(error), code="invalid_value")
