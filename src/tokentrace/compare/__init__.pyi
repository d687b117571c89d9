"""The public names of compare and where each is defined."""

from .breaks import Break as Break
from .breaks import explain_break as explain_break
from .causes import Cause as Cause
from .histories import HistoryReport as HistoryReport
from .histories import compare_histories as compare_histories
from .incremental import tokenize_incrementally as tokenize_incrementally
from .splicing import splice_prefix as splice_prefix
