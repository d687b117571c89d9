"""Rows of ids that somebody made, compared with what the template gives for their conversations."""

from .dataset import check_dataset
from .report import CheckReport, Outcome

__all__ = ["CheckReport", "Outcome", "check_dataset"]
