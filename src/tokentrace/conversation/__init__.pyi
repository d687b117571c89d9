"""The public names of conversations and where each is defined."""

from ..values.functions import function_schema as function_schema
from .forms import Change as Change
from .forms import MessageForm as MessageForm
from .messages import Message as Message
from .messages import Tool as Tool
from .messages import ToolCall as ToolCall
from .messages import check_messages as check_messages
from .messages import check_tools as check_tools
from .responses import from_responses as from_responses
from .shapes import Shape as Shape
from .shapes import from_anthropic as from_anthropic
from .shapes import from_sharegpt as from_sharegpt
from .shapes import openai_messages as openai_messages
from .shapes import openai_tools as openai_tools
