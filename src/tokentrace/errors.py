"""The errors: each says what happened, where, and what to do."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self


class TokentraceError(Exception):
    """The base class of all errors of tokentrace."""


class InputError(TokentraceError):
    """Bad input. `message` and `field` say where."""

    def __init__(self, problem: str, *, message: int | None = None, field: str | None = None) -> None:
        self.message, self.field, self.problem = message, field, problem
        super().__init__(f"{place(message, field)}{problem}")

    def renumbered(self, first: int) -> Self:
        """Count messages from `first`."""
        if self.message is not None:
            self.message -= first
            self.args = (f"{place(self.message, self.field)}{self.problem}",)
        return self


class ContinuationError(InputError):
    """A rollout cannot continue from a recorded trajectory."""


class ControlTokenError(InputError):
    """Untrusted text spells a control token and the policy is ``reject``."""

    def __init__(
        self, problem: str, *, message: int | None, field: str | None, position: int | None, token: str
    ) -> None:
        self.position, self.token = position, token
        super().__init__(problem, message=message, field=field)


class LostTextError(InputError):
    """Text of the input reached no token, and ``lost="error"`` is set. `lost` lists all of it."""

    def __init__(
        self, problem: str, *, message: int | None, field: str | None, lost: Sequence[Any] = ()
    ) -> None:
        self.lost = list(lost)
        super().__init__(problem, message=message, field=field)


class LostTextWarning(UserWarning):
    """Text of the input reached no token."""


class TemplateError(TokentraceError):
    """The chat template cannot be compiled, or refused the conversation."""

    def __init__(self, problem: str, *, message: int | None = None, line: int | None = None) -> None:
        self.message, self.line, self.problem = message, line, problem
        where = f" (template line {line})" if line is not None else ""
        super().__init__(f"{place(message, None)}{problem}{where}")


class TemplateLimitError(TemplateError):
    """The chat template ran for too long or wrote too much."""


class TokenizerError(TokentraceError):
    """A tokenizer could not be loaded, or it cannot do what was asked."""


class RendererError(TokentraceError):
    """A renderer cannot be created or used this way: wrong name, family or setting."""


class TrajectoryError(TokentraceError):
    """An invalid write, which changed nothing, or a file that is no trajectory."""


class SampleError(TokentraceError):
    """A training row cannot be built, cut, padded or packed this way."""


class WriteError(TokentraceError):
    """A file could not be written. `path` names it."""

    def __init__(self, problem: str, *, path: str) -> None:
        self.problem, self.path = problem, path
        super().__init__(f"{path} cannot be written: {problem}")

    def __reduce__(self) -> tuple[object, ...]:
        """Support pickling: errors travel between processes."""
        return functools.partial(WriteError, path=self.path), (self.problem,)


class ExtensionError(TrajectoryError):
    """A prompt does not begin with the stream. `position`: the first id that differs."""

    def __init__(self, problem: str, *, position: int) -> None:
        self.position = position
        super().__init__(problem)


def place(message: int | None, field: str | None) -> str:
    """``"message 3, content: "``; empty if the place is unknown."""
    parts = [*([] if message is None else [f"message {message}"]), *([field] if field else [])]
    return ", ".join(parts) + ": " if parts else ""


def kind_of(value: Any) -> str:
    """The type of a value with an article, for an error message.

    >>> print(kind_of(None), kind_of(1), kind_of([]))
    None an int a list
    """
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def brief(value: Any) -> str:
    """A short text for a value in an error message: containers by their size or their keys.

    Untrusted values may be infinitely nested, have a million digits, or contain a secret.

    >>> print(brief("x" * 3), brief([1, 2.5]), brief([0] * 99), brief({"error": {"key": "secret"}}))
    'xxx' [1, 2.5] a list of 99 an object with error
    """
    if value is None or isinstance(value, bool | int | float | str | bytes):
        try:
            return _cut(repr(value))
        except ValueError:  # Python refuses to print more than 4,300 digits
            return f"an integer of {value.bit_length() if isinstance(value, int) else 'many'} bits"
    if isinstance(value, Mapping):
        if not value:
            return "an empty object"
        names = [_cut(key, 40) if isinstance(key, str) else type(key).__name__ for key in list(value)[:8]]
        return f"an object with {', '.join(names)}{', …' if len(value) > 8 else ''}"
    is_short = isinstance(value, list | tuple) and len(value) <= 4
    if is_short and all(one is None or isinstance(one, bool | int | float | str) for one in value):
        inner = ", ".join(map(brief, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, Sequence):
        return f"a {type(value).__name__} of {len(value)}"
    shape = getattr(value, "shape", None)
    what = "a numpy" if type(value).__module__ == "numpy" else "an object of type"
    return (
        f"{what} {type(value).__name__}{f' of shape {shape}' if isinstance(shape, tuple) and shape else ''}"
    )


def _cut(text: str, most: int = 120) -> str:
    return text if len(text) <= most else f"{text[:most]}…"
