"""The public names of templates and where each is defined."""

from .chat_template import ChatTemplate as ChatTemplate
from .chat_template import PythonFormat as PythonFormat
from .chat_template import Template as Template
from .chat_template import wrap_tools as wrap_tools
from .chat_template import wrap_variables as wrap_variables
from .origin import KEY as KEY
from .origin import UNKNOWN as UNKNOWN
from .origin import Origin as Origin
from .strings import TracedStr as TracedStr
from .trace import Rendering as Rendering
