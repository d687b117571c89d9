"""The public names of diagnose and where each is defined."""

from .breaks import Break as Break
from .breaks import explain_break as explain_break
from .certify import AuditReport as AuditReport
from .certify import audit_template as audit_template
from .finding import Cause as Cause
from .finding import Finding as Finding
from .histories import HistoryReport as HistoryReport
from .histories import compare_histories as compare_histories
from .incremental import tokenize_incrementally as tokenize_incrementally
from .rollouts import RolloutReport as RolloutReport
from .rollouts import check_rollouts as check_rollouts
from .row_files import CheckReport as CheckReport
from .row_files import check_dataset as check_dataset
from .verdicts import Grade as Grade
from .verdicts import Use as Use
from .verdicts import Verdict as Verdict
