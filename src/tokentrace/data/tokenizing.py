"""Turn rows of a dataset into samples."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..conversation.forms import with_parsed_arguments
from ..conversation.messages import check_tools
from ..errors import SampleError, TokentraceError, brief, place
from ..rendering.factory import create_renderer
from ..rendering.lost import LostPolicy
from ..rendering.trust import TRUSTED
from ..samples.sample import Overlong, Sample, truncate
from ..samples.supervised import SampleBuilder, SampleSettings
from ..settings import choose, instance, whole
from ..study.memory import Memory
from ..template.chat_template import PythonFormat
from ..tokens.loading import load_tokenizer
from ..tokens.tokenizer import Tokenizer
from ..version import __version__
from .conversations import Columns, conversation_of, plain_values, table_row
from .sources import Row
from .tables import sample_columns

_OF_RENDERER = (
    *("chat_template", "control_tokens", "messages", "use_patched"),
    "preserve_thinking_between_tool_calls",
)


@dataclass(frozen=True, slots=True)
class TokenizeSettings:
    """How rows become samples: equal settings and rows give equal samples."""

    tokenizer: str | Path | Tokenizer
    renderer: str = "auto"
    chat_template: str | PythonFormat | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    control_tokens: str = "literal"
    messages: str = "adapt"
    lost: str = "error"
    """Text that reaches no token: ``"error"``, ``"warn"`` (a note) or ``"ignore"``."""
    preserve_thinking_between_tool_calls: bool = False
    use_patched: bool = False
    samples: SampleSettings = field(default_factory=SampleSettings)
    columns: Columns = field(default_factory=Columns)
    tools: tuple[Mapping[str, Any], ...] | None = None
    """For rows that have none."""
    parse_arguments: bool = False
    max_length: int | None = None
    overlong: Overlong = Overlong.DROP
    labels: bool = True
    """Whether rows have labels, which trainers look for, besides the loss mask."""

    def __post_init__(self) -> None:
        checked: dict[str, Any] = {"overlong": choose(Overlong, "overlong", self.overlong, SampleError)}
        if self.max_length is not None:
            checked["max_length"] = whole("max_length", self.max_length, least=1, error=SampleError)
        if self.tools is not None:
            checked["tools"] = tuple(check_tools(self.tools) or ())
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        kinds = {"samples": SampleSettings, "columns": Columns, "template_kwargs": Mapping}
        for name, kind in (kinds | dict.fromkeys(("parse_arguments", "labels"), bool)).items():
            instance(name, getattr(self, name), kind, SampleError)
        choose(LostPolicy, "lost", self.lost, SampleError)
        try:
            json.dumps(self.described())
        except (TypeError, ValueError, RecursionError) as error:
            raise SampleError(f"settings must be JSON values: {error}") from None

    def described(self) -> dict[str, Any]:
        """The settings as JSON, without tokenizer and template."""
        hidden = ("tokenizer", "chat_template", "samples")
        plain = {name: getattr(self, name) for name in self.__dataclass_fields__ if name not in hidden}
        plain |= {"template_kwargs": dict(self.template_kwargs), "columns": filled(self.columns)}
        plain["tools"] = None if self.tools is None else list(map(dict, self.tools))
        return {**plain, **self.samples.described()}

    @classmethod
    def read(cls, described: Mapping[str, Any], tokenizer: str) -> TokenizeSettings:
        """Read what `described` returned. Raises SampleError."""
        plain = {**described, "tokenizer": tokenizer}
        names = [name for name in SampleSettings.__dataclass_fields__ if name in plain]
        try:
            plain["samples"] = SampleSettings(**{name: plain.pop(name) for name in names})
            plain["columns"] = Columns(**plain.get("columns", {}))
            return cls(**plain)
        except TypeError as error:  # an unknown setting
            raise SampleError(f"the settings cannot be read: {error}") from None

    @property
    def output(self) -> Mapping[str, Any]:
        return sample_columns("parts", *(["labels"] if self.labels else []))


def filled(record: Any) -> dict[str, Any]:
    """The fields that are not None."""
    return {name: value for name, value in asdict(record).items() if value is not None}


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row without samples, and why; `kind` names the error."""

    source: str
    row: int
    line: int | None
    kind: str
    reason: str
    message: int | None = None
    field: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowResult:
    """The samples of a row, and why others are missing."""

    row: Row
    samples: tuple[Sample, ...] = ()
    messages: int = 0
    problems: tuple[BadRow, ...] = ()

    @property
    def bad(self) -> BadRow | None:
        return None if self.samples else self.problems[0]


class RowTokenizer:
    """Turns rows into samples. An error in a row is part of its result."""

    def __init__(self, settings: TokenizeSettings) -> None:
        self.settings = settings
        self._tokenizer = load_tokenizer(settings.tokenizer)
        self._builders = Memory(most=32)
        self.renderer = self._builder({}).renderer

    def _builder(self, variables: Mapping[str, Any]) -> SampleBuilder:
        key = json.dumps(variables, sort_keys=True, default=repr)
        return self._builders.once(key, lambda: self._new_builder(variables))

    def _new_builder(self, variables: Mapping[str, Any]) -> SampleBuilder:
        settings = self.settings
        trusted = {f"kwargs.{name}" for name in settings.template_kwargs if name not in variables}
        renderer = create_renderer(
            self._tokenizer,
            settings.renderer,
            **{name: getattr(settings, name) for name in _OF_RENDERER},
            lost="error" if settings.lost == LostPolicy.ERROR else "ignore",
            trusted=(TRUSTED - {"kwargs"}) | trusted,  # variables of a row are data
            **{**settings.template_kwargs, **variables},
        )
        return SampleBuilder(renderer, settings.samples)

    def tokenize(self, row: Row) -> RowResult:
        try:
            if row.problem is None:
                return self._tokenize(row)
            why: tuple[Any, ...] = ("unreadable", row.problem)
        except TokentraceError as error:
            reason = " ".join(str(error).split())[:2000]
            why = (
                type(error).__name__,
                reason,
                getattr(error, "message", None),
                getattr(error, "field", None),
            )
        except RecursionError:
            why = ("RecursionError", "the row is nested too deeply")
        return RowResult(row, problems=(BadRow(row.source, row.number, row.line, *why),))

    def _tokenize(self, row: Row) -> RowResult:
        value, notes = table_row(plain_values(row.value)) if row.filled else (row.value, ())
        read = conversation_of(value, self.settings.columns)
        messages, tools = read.messages, read.tools
        if tools is None and self.settings.tools is not None:
            tools = list(map(dict, self.settings.tools))
        if self.settings.parse_arguments:
            messages = with_parsed_arguments(self.renderer.check_messages(messages, tools=tools))
        built = self._builder(read.variables).build(messages, tools, read.completion_from or 0)
        if not any(sample.trained for sample in built):
            raise SampleError("nothing carries loss: there is no assistant turn that the settings include")
        samples, problems = list[Sample](), list[BadRow]()
        for sample in built:
            result = self._fit(sample, notes)
            if isinstance(result, Sample):
                samples.append(result)
            else:
                which = f"sample of message {sample.messages.max()}: " if len(built) > 1 else ""
                problems.append(BadRow(row.source, row.number, row.line, "left out", f"{which}{result}"))
        return RowResult(row, tuple(samples), len(messages), tuple(problems))

    def _fit(self, sample: Sample, notes: Iterable[str]) -> Sample | str | None:
        """The sample, cut and with notes if necessary, or why it is left out."""
        if self.settings.lost == LostPolicy.WARN and sample.rendered is not None:
            lost = (f"{place(item.message, item.field)}{item.why}" for item in sample.rendered.lost)
            notes = (*notes, *dict.fromkeys(lost))
        sample = sample.replace(notes=(*sample.notes, *notes))
        if not sample.trained:
            return "nothing in it carries loss"
        if self.settings.max_length is None:
            return sample
        cut = truncate(sample, self.settings.max_length, self.settings.overlong)
        return cut.reason if cut.sample is None else cut.sample

    def described(self) -> dict[str, Any]:
        """What the samples depend on."""
        return {
            "tokentrace": __version__,
            "tokenizer": self._tokenizer.name,
            "tokenizer_sha256": self._tokenizer.digest,
            "template_sha256": self.renderer.template_digests(),
            "family": self.renderer.family,
            "settings": self.settings.described(),
        }


def tokenize_rows(settings: TokenizeSettings, rows: Iterable[Any]) -> Iterator[RowResult]:
    """Tokenize rows in memory: dicts, or a ``datasets.Dataset``."""
    tokenizer = RowTokenizer(settings)
    try:
        numbered = enumerate(rows, 1)
    except (TypeError, ValueError):
        raise SampleError(f"rows must be a list, a dataset or an iterator, not {brief(rows)}") from None
    for number, value in numbered:
        yield tokenizer.tokenize(Row(number, None, value, filled=True))


@dataclass(slots=True)
class Counts:
    rows: int = 0
    samples: int = 0
    tokens: int = 0
    trained: int = 0
    left_out: int = 0
    """Dropped samples of rows that gave others."""
    bad: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)
    """How many samples have each note, without the messages that it names."""

    def add(self, result: RowResult) -> None:
        self.rows += 1
        self.left_out += len(result.problems) - (result.bad is not None)
        self.bad.update([] if result.bad is None else [result.bad.kind])
        for sample in result.samples:
            self.samples += 1
            self.tokens += len(sample)
            self.trained += sample.trained
            self.notes.update({_without_place(note) for note in sample.notes})

    def update(self, other: Counts) -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def described(self) -> dict[str, Any]:
        return asdict(self) | {name: dict(sorted(getattr(self, name).items())) for name in ("bad", "notes")}


def _without_place(note: str) -> str:
    """A note without the messages or numbers that it names."""
    where, colon, text = note.partition(": ")
    if colon and where.startswith("message"):
        return text
    return "cut to fit" if note.startswith("cut to the ") else note
