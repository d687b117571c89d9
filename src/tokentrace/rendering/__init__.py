"""Messages to ids: the renderer and the bridge to the next turn."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
