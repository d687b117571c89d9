"""Three histories of one conversation, production, rollout and training, compared token by token."""

from .differences import Comparison, Difference, FieldCount, Part, Run, Shown, Step, View
from .findings import Finding, Verb
from .report import HistoryReport, compare_histories

__all__ = [
    "Comparison",
    "Difference",
    "FieldCount",
    "Finding",
    "HistoryReport",
    "Part",
    "Run",
    "Shown",
    "Step",
    "Verb",
    "View",
    "compare_histories",
]
