"""Why a prompt does not begin with the stream so far: `explain_break` names the cause and shows the tokens.

Causes are claimed on evidence only, the most specific first. What shows none is `Cause.UNKNOWN`.
"""

from ..causes import ADVICE, Cause
from .explain import Break, explain_break
from .markup import REASONING_TAGS

__all__ = ["ADVICE", "REASONING_TAGS", "Break", "Cause", "explain_break"]
