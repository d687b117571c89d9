"""What an inspection came to: counts over all rollouts, and a few examples of each thing that was found."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Generic, TypeVar

import numpy as np

from ..diagnose.finding import Cause
from ..show.document import Document
from ..showing import ShowsItself
from ..tokens.visible import counted
from .dumps.calls import DumpFault, FoundFault, UnreadSource
from .inspect_calls import FoundBreak, InspectedRollout, Relation
from .inspect_scores import Scores

EXAMPLES: Final = 3
"""Breaks that are kept of each cause, and findings of each fault."""
_UNREAD: Final = 20
"""Lines that could not be read, of which the reason is kept."""

Found = TypeVar("Found")


@dataclass(slots=True)
class Lengths:
    """How long things are: every length is kept as a number, so that memory grows by eight bytes for each."""

    values: array[int] = field(default_factory=lambda: array("q"))

    def add(self, *lengths: int) -> None:
        self.values.extend(lengths)

    def to_json(self) -> dict[str, float]:
        """Least, middle, 95 of 100 and most; nothing where there are none."""
        if not self.values:
            return {}
        found = np.percentile(np.asarray(self.values), [0, 50, 95, 100], method="nearest").tolist()
        return dict(zip(("least", "median", "p95", "most"), map(int, found), strict=True))


@dataclass(slots=True)
class Tally(Generic[Found]):
    """How often something was found, in how many tokens and rollouts, and the first few examples of it."""

    places: int = 0
    tokens: int = 0
    rollouts: int = 0
    examples: list[Found] = field(default_factory=list)

    def add(self, found: Found, tokens: int = 0) -> None:
        self.places += 1
        self.tokens += tokens
        if len(self.examples) < EXAMPLES:
            self.examples.append(found)


@dataclass(slots=True)
class Inspection(ShowsItself):
    """Counts over all rollouts, and the first few examples of each finding. Rollouts are added one at a time."""

    notes: list[str] = field(default_factory=list)
    """What was recognised, and what is to be known of the whole."""
    rollouts: int = 0
    broken: int = 0
    """Rollouts with at least one break."""
    calls: int = 0
    steps: Counter[Relation] = field(default_factory=Counter)
    causes: dict[Cause, Tally[FoundBreak]] = field(default_factory=dict)
    histories: Counter[str] = field(default_factory=Counter)
    """What became of the messages at breaks, where they are known."""
    recorded: Counter[str] = field(default_factory=Counter)
    """Why records say that a history was rewritten."""
    faults: dict[DumpFault, Tally[FoundFault]] = field(default_factory=dict)
    samples: int = 0
    """Rows that it takes to train each sampled token once."""
    tokens: int = 0
    sampled: int = 0
    row_tokens: int = 0
    prompted: int = 0
    """Tokens of all prompts: what an engine without a cache would read."""
    trained: int = 0
    masked: int = 0
    """Rollouts that say what is trained."""
    witnessed: int = 0
    """Those of them in which something beside the masks tells what was sampled."""
    reprefilled: int = 0
    lost: int = 0
    respelled: int = 0
    rewritten: int = 0
    turns: Lengths = field(default_factory=Lengths)
    prompts: Lengths = field(default_factory=Lengths)
    streams: Lengths = field(default_factory=Lengths)
    unreadable: int = 0
    unread: list[UnreadSource] = field(default_factory=list)
    stopped: bool = False
    """Whether rollouts were left that a limit kept from being looked at."""
    explained: bool = False
    """Whether a tokenizer was there to find causes with."""
    scores: Scores | None = None
    """Logprobs compared with those of an engine."""

    def document(self, tokenizer: Any = None) -> Document:
        """Return the report as a document."""
        from .inspection_document import inspection_document

        return inspection_document(self, tokenizer)

    def skip(self, found: UnreadSource) -> None:
        """Count what could not be read."""
        self.unreadable += 1
        if len(self.unread) < _UNREAD:
            self.unread.append(found)

    def add(self, found: InspectedRollout) -> None:
        """Count a rollout."""
        self.rollouts += 1
        self.calls += len(found.steps)
        self.steps.update(found.steps)
        self.samples += found.samples
        self.tokens += found.tokens
        self.sampled += found.sampled
        self.row_tokens += found.row_tokens
        self.prompted += sum(found.prompts)
        if found.trained is not None:
            self.trained += found.trained
            self.masked += 1
            self.witnessed += found.witnessed
        self.turns.add(len(found.steps))
        self.prompts.add(*found.prompts)
        self.streams.add(*(len(tip.stream) for tip in found.tips))
        self.broken += bool(found.breaks)
        for one in found.breaks:
            self._add_break(one)
        for cause in {one.cause for one in found.breaks}:
            self.causes[cause].rollouts += 1
        for finding in found.findings:
            self.faults.setdefault(finding.fault, Tally()).add(finding, finding.tokens)
        for fault in {finding.fault for finding in found.findings}:
            self.faults[fault].rollouts += 1

    def _add_break(self, one: FoundBreak) -> None:
        self.causes.setdefault(one.cause, Tally()).add(one)
        if one.history is not None:
            self.histories[one.history.cause.value] += 1
        if one.recorded:
            self.recorded[one.recorded.partition(":")[0]] += 1
        self.reprefilled += one.reprefilled
        self.lost += one.lost
        self.respelled += one.respelled
        self.rewritten += one.rewritten

    # -- what it came to

    @property
    def breaks(self) -> int:
        return self.steps[Relation.BREAKS]

    @property
    def compared(self) -> int:
        """Prompts that another call of their rollout came before: only these can extend a stream, or break off."""
        return self.calls - self.steps[Relation.FIRST]

    @property
    def repeated(self) -> int:
        """Tokens that rows have more than once: prefixes that several rows of a rollout begin with."""
        return self.row_tokens - self.tokens

    @property
    def samples_per_rollout(self) -> float:
        return self.samples / self.rollouts if self.rollouts else 0.0

    def failing(self, what: str) -> bool:
        """Whether something of a kind was found: breaks, masks, logprobs, ids, unreadable, or any of them."""
        found = {
            "breaks": self.breaks > 0,
            "unreadable": self.unreadable > 0,
            **{
                group: any(fault.group == group for fault in self.faults if fault is not DumpFault.NO_LOGPROBS)
                for group in ("masks", "logprobs", "ids")
            },
        }
        return any(found.values()) if what == "any" else found[what]

    @property
    def verdict(self) -> str:
        """What it came to, in a sentence."""
        if not self.rollouts:
            return "there are no rollouts"
        if self.broken:
            share = 100 * self.broken / self.rollouts
            times = counted(self.breaks, "time")
            verb = "breaks" if self.broken == 1 else "break"
            return f"{self.broken:,} of {counted(self.rollouts, 'rollout')} {verb} ({share:.1f} %), {times}"
        if self.failing("any"):
            return f"no prompt breaks in {counted(self.rollouts, 'rollout')}, but other things are wrong"
        if not self.compared:
            return (
                f"no prompt was compared with another: each of {counted(self.rollouts, 'rollout')} has one call; calls "
                "on lines of their own belong together by rollout_id (or session_id, conversation_id, episode_id)"
            )
        calls = counted(self.calls, "call")
        return f"every prompt extends its stream, in {counted(self.rollouts, 'rollout')} of {calls}"

    def ranked_causes(self) -> list[tuple[Cause, Tally[FoundBreak]]]:
        """Causes, the most frequent first."""
        return sorted(self.causes.items(), key=lambda item: (-item[1].places, item[0]))

    def to_json(self) -> dict[str, Any]:
        """All of it, as JSON can hold it."""
        plain = (
            *("rollouts", "broken", "calls", "compared", "breaks", "samples", "samples_per_rollout", "tokens"),
            *("sampled", "row_tokens", "prompted", "unreadable", "stopped", "explained"),
        )
        return {
            "verdict": self.verdict,
            **{name: getattr(self, name) for name in plain},
            "steps": {str(step): self.steps[step] for step in Relation if self.steps[step]},
            "causes": [
                {
                    "cause": str(cause) if self.explained else None,
                    "breaks": count.places,
                    "rollouts": count.rollouts,
                    "share": count.rollouts / self.rollouts,
                    "advice": cause.advice if self.explained else None,
                    "examples": [one.to_json() for one in count.examples],
                }
                for cause, count in self.ranked_causes()
            ],
            "histories": dict(self.histories.most_common()),
            "recorded": dict(self.recorded.most_common()),
            "cost": {"reprefilled": self.reprefilled, "repeated": self.repeated},
            "training": {
                "trained": self.trained if self.masked else None,
                "unwitnessed_rollouts": self.masked - self.witnessed,
                **{
                    name: self.faults[fault].tokens if fault in self.faults else 0 if self.witnessed else None
                    for name, fault in (
                        ("trained_unsampled", DumpFault.TRAINED_UNSAMPLED),
                        ("sampled_untrained", DumpFault.SAMPLED_UNTRAINED),
                    )
                },
                "lost_at_breaks": self.lost,
                "respelled_at_breaks": self.respelled,
                "rewritten_at_breaks": self.rewritten,
            },
            "faults": [
                {
                    "fault": str(fault),
                    "group": fault.group,
                    "places": count.places,
                    "tokens": count.tokens,
                    "rollouts": count.rollouts,
                    "examples": [asdict(one) | {"fault": str(one.fault)} for one in count.examples],
                }
                for fault, count in self.faults.items()
            ],
            "lengths": {
                "calls_per_rollout": self.turns.to_json(),
                "prompt_tokens": self.prompts.to_json(),
                "row_tokens": self.streams.to_json(),
            },
            "scores": None if self.scores is None else self.scores.to_json(),
            "unread": [asdict(one) for one in self.unread],
            "notes": self.notes,
        }
