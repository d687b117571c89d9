"""Three histories of one conversation, production, rollout and training, compared token by token."""

from .differences import Comparison, Difference, FieldCount, FieldTokens, Run, Shown, Step, View
from .findings import Finding, Verb
from .report import HistoryReport
from .walk import compare_histories

__all__ = [
    "Comparison",
    "Difference",
    "FieldCount",
    "FieldTokens",
    "Finding",
    "HistoryReport",
    "Run",
    "Shown",
    "Step",
    "Verb",
    "View",
    "compare_histories",
]
