"""From messages to spans: the model's own template, run with values that know where they came from."""

from .chat_template import ChatTemplate, PythonFormat, Template, wrap_tools, wrap_variables
from .origin import KEY, UNKNOWN, Origin
from .strings import TracedStr
from .trace import Rendering

__all__ = [
    "KEY",
    "UNKNOWN",
    "ChatTemplate",
    "Origin",
    "PythonFormat",
    "Rendering",
    "Template",
    "TracedStr",
    "wrap_tools",
    "wrap_variables",
]
