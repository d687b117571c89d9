"""The public names of diagnose and where each is defined."""

from .audit_report import AuditReport as AuditReport
from .certify import audit_template as audit_template
from .history_report import HistoryReport as HistoryReport
from .history_walk import compare_histories as compare_histories
from .incremental import tokenize_incrementally as tokenize_incrementally
from .splicing import splice_prefix as splice_prefix
from .verdicts import Grade as Grade
from .verdicts import Use as Use
from .verdicts import Verdict as Verdict
