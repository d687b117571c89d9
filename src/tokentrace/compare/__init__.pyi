"""The public names of compare and where each is defined."""

from .breaks import Break as Break
from .breaks import explain_break as explain_break
from .causes import Cause as Cause
