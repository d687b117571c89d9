"""The public names of parsing and where each is defined."""

from .events import ArgumentsDelta as ArgumentsDelta
from .events import CallFinished as CallFinished
from .events import CallNamed as CallNamed
from .events import CallStarted as CallStarted
from .events import ContentDelta as ContentDelta
from .events import Done as Done
from .events import Event as Event
from .events import ReasoningDelta as ReasoningDelta
from .parser import StreamingParser as StreamingParser
from .readback import Unreadable as Unreadable
from .readback import UnreadableKind as UnreadableKind
from .response import CallReading as CallReading
from .response import CallStatus as CallStatus
from .response import Finish as Finish
from .response import ParsedResponse as ParsedResponse
from .response import ParsedToolCall as ParsedToolCall
