"""Counts over many rows or rollouts, with a few examples of each thing counted."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, ClassVar, NamedTuple

from ..show.document import Cell, Contrast, Document, Table
from ..show.visible import counted
from ..showing import ShowsItself
from ..tokens.tokenizer import Tokenizer
from .finding import Cause, Finding

EXAMPLES = 5
_MOST = 1000


class Example(NamedTuple):
    where: str
    words: str
    findings: Sequence[Finding] = ()
    contrasts: Sequence[Contrast] = ()

    def to_json(self) -> dict[str, Any]:
        return {"where": self.where, "words": self.words, "findings": list(map(asdict, self.findings))}


class Entry(NamedTuple):
    """One thing to count in a table of a report."""

    table: str
    key: Any
    tokens: int = 0
    example: Example | None = None


@dataclass(slots=True)
class Tally:
    places: int = 0
    tokens: int = 0
    units: int = 0
    examples: list[Example] = field(default_factory=list)


Tallies = dict[Any, Tally]


class Report(ShowsItself):
    unit: ClassVar[str]
    title: ClassVar[str]
    remedy: ClassVar[str] = ""
    """What to do, if the advice of causes does not fit."""
    tables: ClassVar[Mapping[str, str]]
    outcomes: Tallies
    causes: Tallies

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.counts: Counter[str] = Counter()
        self.stopped = False  # by a limit
        for name in self.tables:
            setattr(self, name, {})

    def add(self, counts: Mapping[str, int], entries: Iterable[Entry]) -> None:
        self.counts.update(counts)
        before = set()
        for table, key, tokens, example in entries:
            tallies: Tallies = getattr(self, table)
            if key not in tallies and len(tallies) == _MOST:
                continue
            tally = tallies.setdefault(key, Tally())
            tally.places += 1
            tally.tokens += tokens
            tally.units += (table, key) not in before
            before.add((table, key))
            if example is not None and len(tally.examples) < EXAMPLES:
                tally.examples.append(example)

    @property
    def total(self) -> int:
        return self.counts[f"{self.unit}s"]

    def count(self, outcome: Any) -> int:
        return self.outcomes.get(outcome, Tally()).places

    def judge(self) -> tuple[str, str]:
        raise NotImplementedError

    def figures(self) -> Iterator[str]:
        raise NotImplementedError

    @property
    def verdict(self) -> str:
        return self.judge()[1]

    def ranked(self, table: str) -> list[tuple[Any, Tally]]:
        return sorted(getattr(self, table).items(), key=lambda item: -item[1].places)

    def to_json(self) -> dict[str, Any]:
        def row(key: Any, one: Tally) -> dict[str, Any]:
            numbers = {"places": one.places, "tokens": one.tokens, f"{self.unit}s": one.units}
            return {"name": key, **numbers, "examples": [example.to_json() for example in one.examples]}

        tables = {name: [row(*pair) for pair in self.ranked(name)] for name in self.tables}
        more = {name: value for name, value in vars(self).items() if name not in tables}
        return {"verdict": self.verdict, **more, **tables}

    def document(self, tokenizer: Tokenizer | None = None) -> Document:
        contrasts: list[Contrast] = []
        examples, shown = list[list[str | Cell]](), set[int]()
        for key, tally in (pair for table in self.tables for pair in self.ranked(table)):
            for one in (one for one in tally.examples if id(one) not in shown):
                shown.add(id(one))
                link = f"diff={len(contrasts)}" if one.contrasts else ""
                examples.append([Cell(one.where, link=link), str(key), one.words])
                contrasts += (
                    replace(each, name=f"{one.where}: {finding.cause}", about=finding.words)
                    for each, finding in zip(one.contrasts, one.findings, strict=False)
                )
        tables = [
            *map(self._table, self.tables),
            Table("Examples", ["where", "", "what"], examples, words=3),
        ]
        tone, verdict = self.judge()
        return Document(
            self.title,
            "tokentrace check",
            summary=[verdict, *self.figures()],
            tone=tone,
            notes=self.notes + [f"stopped after {counted(self.total, self.unit)}"] * self.stopped,
            tables=[table for table in tables if table.rows],
            contrasts=contrasts,
        )

    def _table(self, name: str) -> Table:
        ranked = self.ranked(name)
        total = self.total + self.counts["unreadable"] * (name == "unread")
        columns = {
            what: [getattr(one, what) for _, one in ranked] for what in ("places", "units", "tokens")
        }
        if columns["places"] == columns["units"]:
            del columns["places"]
        columns = {what: values for what, values in columns.items() if any(values)}
        rows: list[list[str | Cell]] = []
        for at, (key, tally) in enumerate(ranked):
            text = " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            numbers = [f"{values[at]:,}" for values in columns.values()]
            repeated = name != "causes" and key in self.causes
            advice = key.advice if isinstance(key, Cause) and not repeated else ""
            text_cell = Cell(text, small=advice and (self.remedy or advice))
            rows.append([text_cell, *numbers, f"{100 * tally.units / max(1, total):.1f} %"])
        heads = [f"{self.unit}s" if what == "units" else what for what in columns]
        return Table(self.tables[name], ["", *heads, "of all"], rows)
