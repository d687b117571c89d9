"""The public names of rendering and where each is defined."""

from ..study.seams import BridgeRefusal as BridgeRefusal
from ..study.seams import RefusalReason as RefusalReason
from .bridged import BridgedTokens as BridgedTokens
from .bridged import Truncation as Truncation
from .factory import RendererPool as RendererPool
from .factory import create_renderer as create_renderer
from .factory import create_renderer_pool as create_renderer_pool
from .lost import Lost as Lost
from .lost import LostPolicy as LostPolicy
from .past import Past as Past
from .rendered import RenderedTokens as RenderedTokens
from .renderer import Renderer as Renderer
