"""Three histories of one conversation, production, rollout and training, compared token by token."""

from .differences import Comparison, Difference, DifferenceSide, FieldCount, FieldTokens, Shown, Step, View
from .findings import Finding, Verb
from .report import HistoryReport
from .walk import compare_histories

__all__ = [
    "Comparison",
    "Difference",
    "DifferenceSide",
    "FieldCount",
    "FieldTokens",
    "Finding",
    "HistoryReport",
    "Shown",
    "Step",
    "Verb",
    "View",
    "compare_histories",
]
