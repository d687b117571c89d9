"""The public names of audit and where each is defined."""

from .certify import audit_template as audit_template
from .report import AuditReport as AuditReport
from .verdicts import Grade as Grade
from .verdicts import Use as Use
from .verdicts import Verdict as Verdict
