"""Rows of a dataset to samples: for the local job, Ray, and the check of a dataset."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ..conversation.forms import with_parsed_arguments
from ..conversation.messages import check_tools
from ..errors import InputError, SampleError, TokentraceError, brief, place
from ..rendering.factory import create_renderer
from ..rendering.lost import LostPolicy
from ..rendering.renderer import Renderer
from ..rendering.trust import TRUSTED
from ..samples.sample import Sample
from ..samples.supervised import SampleBuilder, SampleSettings
from ..samples.truncation import Overlong, truncate
from ..settings import choose, instance, whole
from ..show.visible import counted
from ..template.chat_template import PythonFormat
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Tokenizer
from ..version import __version__
from .conversations import Columns, Conversation, conversation_of, plain_values, table_row
from .rows import ROW_BYTES, Row
from .sources import Format

_MANY_SETTINGS: Final = 32
"""How many renderers are cached: one for each combination of template variables in rows."""


_NOT_DESCRIBED: Final = ("tokenizer", "chat_template", "samples")
_TYPES: Final[Mapping[str, Any]] = {
    "tokenizer": (str, Tokenizer),
    "chat_template": (str, PythonFormat, type(None)),
    "template_kwargs": Mapping,
    "samples": SampleSettings,
    "columns": Columns,
    **dict.fromkeys(("renderer", "control_tokens"), str),
    **dict.fromkeys(("preserve_thinking_between_tool_calls", "use_patched", "parse_arguments", "labels"), bool),
}
"""Types of settings that nothing else checks."""


@dataclass(frozen=True, slots=True)
class TokenizeSettings:
    """How rows become samples: equal settings and equal rows give equal samples."""

    tokenizer: str | Tokenizer
    renderer: str = "auto"
    chat_template: str | PythonFormat | None = None
    """The source of a template, or the name of one that the tokenizer carries."""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: str = "literal"
    messages: str = "adapt"
    lost: str = "error"
    """Rows with text that reaches no token: ``"error"`` (bad rows), ``"warn"`` (a note) or ``"ignore"``."""
    preserve_thinking_between_tool_calls: bool = False
    use_patched: bool = False
    samples: SampleSettings = field(default_factory=SampleSettings)
    columns: Columns = field(default_factory=Columns)
    tools: tuple[Mapping[str, Any], ...] | None = None
    """The tools of rows that have none of their own."""
    parse_arguments: bool = False
    """Parse arguments that are JSON strings before the template sees them, as inference servers do."""
    max_length: int | None = None
    overlong: Overlong = Overlong.DROP
    row_bytes: int = ROW_BYTES
    labels: bool = True
    """Whether rows have a column of labels beside the loss mask: trainers look for it by that name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "overlong", choose(Overlong, "overlong", self.overlong, SampleError))
        for name in ("max_length", "row_bytes"):
            if getattr(self, name) is not None or name == "row_bytes":
                object.__setattr__(self, name, whole(name, getattr(self, name), least=1, error=SampleError))
        if isinstance(self.tokenizer, os.PathLike):
            object.__setattr__(self, "tokenizer", os.fspath(self.tokenizer))
        for name, kinds in _TYPES.items():
            instance(name, getattr(self, name), kinds, SampleError)
        choose(LostPolicy, "lost", self.lost, SampleError)
        if self.tools is not None:
            object.__setattr__(self, "tools", tuple(check_tools(self.tools) or ()))
        try:
            json.dumps(self.described())
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(f"settings must be what JSON can hold: {error}") from None

    def described(self) -> dict[str, Any]:
        """The settings as JSON, without the tokenizer and the source of the template."""
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in _NOT_DESCRIBED}
        columns = {name: column for name, column in dataclasses.asdict(self.columns).items() if column is not None}
        tools = None if self.tools is None else [dict(tool) for tool in self.tools]
        variables = dict(self.template_kwargs)
        return {**plain, **self.samples.described(), "template_kwargs": variables, "columns": columns, "tools": tools}

    @classmethod
    def read(cls, described: Mapping[str, Any], tokenizer: str) -> TokenizeSettings:
        """The settings that `described` returned, for this tokenizer; others have their defaults.

        Pass the source of a template as ``chat_template``. Raises SampleError for settings that do not exist.
        """
        of_rows, of_samples = cls.__dataclass_fields__, SampleSettings.__dataclass_fields__
        if unknown := sorted(set(described) - set(of_rows) - set(of_samples)):
            raise SampleError(f"there is no setting {', '.join(map(repr, unknown))}")
        plain = {name: value for name, value in described.items() if name in of_rows}
        plain["tokenizer"] = tokenizer
        plain["samples"] = SampleSettings(**{name: value for name, value in described.items() if name in of_samples})
        try:
            if "columns" in plain:
                plain["columns"] = Columns(**plain["columns"])
            if plain.get("tools") is not None:
                plain["tools"] = tuple(plain["tools"])
        except TypeError as error:
            raise SampleError(f"the settings cannot be read: {error}") from None
        return cls(**plain)


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that gave no sample, and why."""

    source: str
    row: int
    line: int | None
    kind: str
    """The name of the error."""
    reason: str
    message: int | None = None
    field: str | None = None

    def described(self) -> dict[str, Any]:
        """As it is written to the file of bad rows."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """The samples of a row, and the problems of those that it does not give."""

    row: Row
    samples: tuple[Sample, ...] = ()
    messages: int = 0
    problems: tuple[BadRow, ...] = ()

    @property
    def bad(self) -> BadRow | None:
        """Why the row gave no sample; None where it gave one."""
        return None if self.samples else self.problems[0]

    @property
    def left_out(self) -> tuple[BadRow, ...]:
        """The samples of an expanded row that were dropped beside others."""
        return self.problems if self.samples else self.problems[1:]

    def __repr__(self) -> str:
        why = f": {self.problems[0].reason}" if self.problems else ""
        return f"RowResult(row {self.row.number}, {counted(len(self.samples), 'sample')}{why})"


class RowTokenizer:
    """Turns rows into samples. An error in a row is part of its result, and never ends a run."""

    def __init__(self, settings: TokenizeSettings) -> None:
        self.settings = settings
        self._tokenizer = load_tokenizer(settings.tokenizer)
        self._builders: dict[str, SampleBuilder] = {}
        self.renderer = self._builder({}).renderer

    def _builder(self, variables: Mapping[str, Any]) -> SampleBuilder:
        """The builder for rows with these template variables of their own."""
        key = json.dumps(variables, sort_keys=True, default=repr)
        if key not in self._builders:
            if len(self._builders) >= _MANY_SETTINGS:
                self._builders.clear()
            self._builders[key] = SampleBuilder(self._renderer(variables), self.settings.samples)
        return self._builders[key]

    def _renderer(self, variables: Mapping[str, Any]) -> Renderer:
        settings = self.settings
        trusted = {f"kwargs.{name}" for name in settings.template_kwargs if name not in variables}
        return create_renderer(
            self._tokenizer,
            settings.renderer,
            chat_template=settings.chat_template,
            control_tokens=settings.control_tokens,
            messages=settings.messages,
            lost="error" if settings.lost == LostPolicy.ERROR else "ignore",
            preserve_thinking_between_tool_calls=settings.preserve_thinking_between_tool_calls,
            use_patched=settings.use_patched,
            trusted=(TRUSTED - {"kwargs"}) | trusted,  # variables of a row are data
            **{**settings.template_kwargs, **variables},
        )

    def tokenize(self, row: Row, source: str, form: Format = Format.LINES) -> RowResult:
        """The samples of one row, or why there are none."""
        if row.problem is not None:
            return _failed(row, source, "unreadable", row.problem)
        try:
            return self._tokenize(row, source, form)
        except TokentraceError as error:
            message, name = getattr(error, "message", None), getattr(error, "field", None)
            reason, field = " ".join(str(error).split())[:2000], name if isinstance(error, InputError) else None
            return _failed(row, source, type(error).__name__, reason, message, field)
        except RecursionError:
            return _failed(row, source, "RecursionError", "the row is nested too deeply")

    def _tokenize(self, row: Row, source: str, form: Format) -> RowResult:
        conversation = self.conversation(row.value, form)
        built = self._builder(conversation.variables).build(
            conversation.messages, conversation.tools, conversation.completion_from or 0
        )
        if not any(sample.trained for sample in built):
            raise SampleError(_nothing_trained(conversation))
        samples: list[Sample] = []
        problems: list[BadRow] = []
        for sample in built:
            fitted, reason = self._fitted(sample, conversation.notes)
            if fitted is not None:
                samples.append(fitted)
                continue
            which = f"sample of message {sample.messages.max()}: " if len(built) > 1 else ""
            problems.append(BadRow(source, row.number, row.line, "left out", f"{which}{reason}"))
        return RowResult(row, tuple(samples), len(conversation.messages), tuple(problems))

    def _fitted(self, sample: Sample, notes: Sequence[str]) -> tuple[Sample | None, str | None]:
        """The sample with the notes of its row, or why it is left out."""
        if notes:
            sample = sample.replace(notes=(*sample.notes, *notes))
        if self.settings.lost == LostPolicy.WARN and sample.rendered is not None:
            lost = (f"{place(item.message, item.field)}{item.why}" for item in sample.rendered.lost)
            sample = sample.replace(notes=(*sample.notes, *dict.fromkeys(lost)))
        if not sample.trained:
            return None, "nothing in it carries loss"
        if self.settings.max_length is None:
            return sample, None
        cut = truncate(sample, self.settings.max_length, self.settings.overlong)
        return cut.sample, cut.reason

    def conversation(self, value: Any, form: Format = Format.LINES) -> Conversation:
        """The conversation of a row, as the template will see it."""
        notes: tuple[str, ...] = ()
        if form is Format.PARQUET:
            value, notes = table_row(value)
        read = conversation_of(value, self.settings.columns)
        messages, tools = read.messages, read.tools
        if tools is None and self.settings.tools is not None:
            tools = [dict(tool) for tool in self.settings.tools]
        if self.settings.parse_arguments:
            messages = with_parsed_arguments(self.renderer.check_messages(messages, tools=tools))
        return Conversation(messages, tools, read.completion_from, read.variables, notes)

    def described(self) -> dict[str, Any]:
        """What the samples depend on: for the metadata of a file."""
        return {
            "tokentrace": __version__,
            "tokenizer": self.renderer.tokenizer.name,
            "tokenizer_sha256": self.renderer.tokenizer.digest,
            "template_sha256": self.renderer.template_digests(),
            "family": self.renderer.family,
            "settings": self.settings.described(),
        }


def _failed(row: Row, source: str, kind: str, reason: str, *where: Any) -> RowResult:
    return RowResult(row, problems=(BadRow(source, row.number, row.line, kind, reason, *where),))


def _nothing_trained(conversation: Conversation) -> str:
    if not any(message.get("role") == "assistant" for message in conversation.messages):
        return "there is no assistant turn, so nothing carries loss"
    return "nothing carries loss: the settings leave out every turn"


@dataclass(slots=True)
class Counts:
    """The counts of a run."""

    rows: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    bad: Counter[str] = field(default_factory=Counter)
    left_out: int = 0
    """Samples of expanded rows that were dropped beside others."""
    notes: Counter[str] = field(default_factory=Counter)
    """How many samples have each note, without the messages that it names."""

    def add(self, result: RowResult) -> None:
        self.rows += 1
        self.left_out += len(result.left_out)
        if result.bad is not None:
            self.bad[result.bad.kind] += 1
        for sample in result.samples:
            self.samples += 1
            self.tokens += len(sample)
            self.trained += sample.trained
            self.notes.update({without_place(note) for note in sample.notes})

    def update(self, other: Counts) -> None:
        for name in ("rows", "samples", "tokens", "trained", "left_out"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.bad.update(other.bad)
        self.notes.update(other.notes)

    def described(self) -> dict[str, Any]:
        """As JSON, sorted."""
        out = {name: getattr(self, name) for name in ("rows", "samples", "tokens", "trained", "left_out")}
        return {**out, "bad": dict(sorted(self.bad.items())), "notes": dict(sorted(self.notes.items()))}

    @property
    def bad_rows(self) -> int:
        return sum(self.bad.values())


def without_place(note: str) -> str:
    """A note without the messages it names, or the numbers of a cut."""
    place, colon, text = note.partition(": ")
    if colon and place.startswith("message"):
        return text
    return "cut to fit" if note.startswith("cut to the ") else note


def tokenize_rows(settings: TokenizeSettings, rows: Iterator[Any] | list[Any]) -> Iterator[RowResult]:
    """Samples of rows in memory: dicts, or a ``datasets.Dataset``. Rows are counted from 1.

    Rows may come from a table, which fills in nulls: see `data.conversations.table_row`.
    """
    tokenizer = RowTokenizer(settings)
    if not isinstance(rows, Iterable):
        raise SampleError(f"rows must be a list, a dataset or an iterator, not {brief(rows)}")
    for number, value in enumerate(rows, 1):
        try:
            row = Row(number, None, plain_values(value))
        except RecursionError:
            row = Row(number, None, problem="the row is nested too deeply")
        yield tokenizer.tokenize(row, "rows", Format.PARQUET)
