"""Rows of ids that are there already, held against a template and its masks."""

from .dataset import check_dataset
from .report import CheckReport, Outcome

__all__ = ["CheckReport", "Outcome", "check_dataset"]
