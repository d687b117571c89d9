"""What `compare_histories` found: step by step, and what it comes to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..rendering.rendered import RenderedTokens
from ..show.document import Document
from ..showing import ShowsItself
from ..tokens.tokenizer import Ids, Tokenizer
from .history_differences import DifferenceSide, Step, View
from .history_findings import Finding


@dataclass(frozen=True, slots=True, eq=False)
class HistoryReport(ShowsItself):
    """Where production, rollout and training differ, step by step. Made by `compare_histories`.

    `row` is the training row.
    """

    steps: tuple[Step, ...]
    findings: tuple[Finding, ...]
    roles: tuple[str, ...]
    row: RenderedTokens
    notes: tuple[str, ...]
    settings: Mapping[str, Any]
    tokenizer: Tokenizer = field(repr=False)

    @property
    def equal(self) -> bool:
        """Whether all three agree at every step, and the rollout never breaks."""
        return all(step.equal and step.refusal is None for step in self.steps)

    @property
    def branches(self) -> tuple[Ids, ...]:
        """The streams of the rollout: one, and one more for every break; with history ``train`` these are also the rows
        that the rollout is trained on."""
        last = {step.branch: step.rollout for step in self.steps}
        return tuple(shown.ids for shown in last.values())

    @property
    def breaks(self) -> list[Step]:
        """The steps at which the rollout could not go on."""
        return [step for step in self.steps if step.refusal is not None]

    def differing(self, left: View | str, right: View | str) -> list[Step]:
        """The steps at which two views differ."""
        return [step for step in self.steps if (found := step.compare(left, right)) is None or not found.equal]

    @property
    def summary(self) -> str:
        """What it comes to, a sentence a line."""
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """What it comes to, in plain language."""
        if not self.steps:
            return ["There is no turn to compare: the model is never asked for one."]
        out = [str(found) for found in self.findings]
        for step in self.steps:
            if step.refusal is not None:
                out.append(f"The rollout breaks at {self.place(step)}: {step.refusal}.")
            if step.training is None:
                out.append(f"The training row holds no turn for {self.place(step)}.")
        if not out:
            steps = f"all {len(self.steps)} steps" if len(self.steps) > 1 else "the one step there is"
            held = f"{len(self.steps[-1].rollout):,} at the last" if len(self.steps) > 1 else len(self.steps[0].rollout)
            out = [f"Production, rollout and training hold the same tokens at {steps}: {held}."]
        return out

    def place(self, step: Step) -> str:
        """What a step asks for, in words."""
        return "the turn to come" if step.message is None else f"message {step.message}"

    def rows(self) -> list[dict[str, Any]]:
        """All that differs as a flat table: one row for each field's part of each side of each difference."""
        return [
            {
                "step": step.index,
                "message": step.message,
                "left": str(found.left),
                "right": str(found.right),
                "difference": number,
                "in": "turn" if difference.in_turn else "prompt",
                "side": str(side),
                "start": part.start,
                "stop": part.stop,
                "tokens": len(part),
                "from_message": part.message,
                "role": part.role,
                "field": part.field,
                "text": part.text,
            }
            for step in self.steps
            for found in step.comparisons
            for number, difference in enumerate(found.differences)
            for side, run in ((found.left, difference.left), (found.right, difference.right))
            for part in run.parts
        ]

    def to_json(self) -> dict[str, Any]:
        """The report as plain data that ``json.dumps`` takes. Nothing is lost.

        A step's rollout is the first ids of its branch, its training the first ids of the row, and its production is
        made from either with the differences of the comparison.
        """
        return {
            "equal": self.equal,
            "summary": self.sentences(),
            "settings": dict(self.settings),
            "roles": list(self.roles),
            "branches": [ids.tolist() for ids in self.branches],
            "row": self.row.token_ids,
            "steps": [_json_step(step) for step in self.steps],
            "findings": [
                {
                    "views": [str(view) for view in found.views],
                    "agrees": [str(view) for view in found.agrees],
                    "verb": str(found.verb),
                    "what": found.what,
                    "in": "turn" if found.in_turn else "prompt",
                    "once": found.once,
                    "messages": list(found.messages),
                    "tokens": found.tokens,
                    "scaffold": found.scaffold,
                    "steps": list(found.steps),
                    "text": str(found),
                }
                for found in self.findings
            ],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        differ = sum(not step.equal for step in self.steps)
        return f"HistoryReport({len(self.steps)} steps, {differ} differ, {len(self.breaks)} breaks)"

    def __str__(self) -> str:
        from .history_document import plain_view

        return plain_view(self)

    def document(self, _: Any = None) -> Document:
        """Return the report as a document."""
        from .history_document import history_document

        return history_document(self)


def _json_step(step: Step) -> dict[str, Any]:
    refusal = step.refusal
    shown = {view: step.shown(view) for view in View}
    return {
        "step": step.index,
        "message": step.message,
        "equal": step.equal,
        "branch": step.branch,
        "break": None if refusal is None else {"reason": str(refusal.reason), "detail": refusal.detail},
        "prompt_tokens": {str(view): None if found is None else found.prompt for view, found in shown.items()},
        "tokens": {str(view): None if found is None else len(found) for view, found in shown.items()},
        "comparisons": [
            {
                "left": str(found.left),
                "right": str(found.right),
                "equal": found.equal,
                "first": found.first,
                "left_tokens": found.left_tokens,
                "right_tokens": found.right_tokens,
                "fields": found.lines(),
                "differences": [
                    {
                        "in": "turn" if difference.in_turn else "prompt",
                        "left": _json_run(difference.left),
                        "right": _json_run(difference.right),
                    }
                    for difference in found.differences
                ],
            }
            for found in step.comparisons
        ],
    }


def _json_run(run: DifferenceSide) -> dict[str, Any]:
    parts = [asdict(part) for part in run.parts]
    return {"start": run.start, "stop": run.stop, "token_ids": list(run.ids), "text": run.text, "parts": parts}
