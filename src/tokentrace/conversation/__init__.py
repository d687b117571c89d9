"""What a conversation is: its shapes, and what is wrong with one that is not."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
