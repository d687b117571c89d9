"""Every error tokentrace raises on purpose: what happened, where, and what to do next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self


class TokentraceError(Exception):
    """The base of all errors that tokentrace raises on purpose."""

    conversation: int | None = None
    """Which conversation it is about, where several were given."""

    def of_conversation(self, number: int) -> Self:
        """The same error, saying in which of several conversations."""
        self.conversation = number
        self.args = (f"conversation {number}: {self}",)
        return self


class InputError(TokentraceError):
    """The conversation or the tools are not what they must be. Names the message and the field."""

    def __init__(self, problem: str, *, message: int | None = None, field: str | None = None) -> None:
        self.message = message
        self.field = field
        self.problem = problem
        super().__init__(f"{place(message, field)}{problem}")

    def renumbered(self, first: int) -> Self:
        """The same error with messages counted from `first` on."""
        if self.message is not None:
            self.message -= first
            self.args = (f"{place(self.message, self.field)}{self.problem}",)
        return self


class ControlTokenError(InputError):
    """Untrusted text spells a control token and the policy is ``reject``."""

    def __init__(
        self, problem: str, *, message: int | None, field: str | None, position: int | None, token: str
    ) -> None:
        self.position = position
        self.token = token
        super().__init__(problem, message=message, field=field)


class LostTextError(InputError):
    """Given text reached no token, and the setting is ``lost="error"``. `lost` lists all of it."""

    def __init__(self, problem: str, *, message: int | None, field: str | None, lost: Sequence[Any] = ()) -> None:
        self.lost = list(lost)
        super().__init__(problem, message=message, field=field)


class LostTextWarning(UserWarning):
    """Given text reached no token."""


class TemplateError(TokentraceError):
    """The chat template cannot be compiled, or refused the conversation."""

    def __init__(self, problem: str, *, message: int | None = None, line: int | None = None) -> None:
        self.message = message
        self.line = line
        self.problem = problem
        where = f" (template line {line})" if line is not None else ""
        super().__init__(f"{place(message, None)}{problem}{where}")


class TemplateLimitError(TemplateError):
    """The chat template ran for too long or wrote too much."""


class TokenizerError(TokentraceError):
    """A tokenizer could not be loaded, or it cannot do what was asked."""


class RendererError(TokentraceError):
    """A renderer cannot be made or used as asked: wrong name, wrong family, wrong setting."""


class TrajectoryError(TokentraceError):
    """A write that would leave a trajectory inconsistent, or a file that is none. Nothing was changed."""


class SampleError(TokentraceError):
    """A training row cannot be made, cut, padded or packed as asked."""


class ExtensionError(TrajectoryError):
    """A prompt does not begin with the stream so far. `position` is the first id that differs."""

    def __init__(self, problem: str, *, position: int) -> None:
        self.position = position
        super().__init__(problem)


def place(message: int | None, field: str | None) -> str:
    """``"message 3, content: "``, or ``""`` when nothing is known of the place."""
    parts = [f"message {message}"] if message is not None else []
    if field:
        parts.append(field)
    return ", ".join(parts) + ": " if parts else ""
