"""Audits: what a template does to a conversation, found out and written down."""

from .differences import Comparison, Difference, FieldCount, Part, Run, Shown, View
from .findings import Finding, Verb
from .report import HistoryReport, Step, compare_histories

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
