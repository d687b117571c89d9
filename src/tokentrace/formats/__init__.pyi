"""The public names of formats and where each is defined."""

from .dialects import DIALECTS as DIALECTS
from .dialects import Dialect as Dialect
from .families import FAMILIES as FAMILIES
from .grammar import CallGrammar as CallGrammar
from .grammar import Frame as Frame
from .grammar import TurnGrammar as TurnGrammar
