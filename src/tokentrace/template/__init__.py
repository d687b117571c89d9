"""From messages to spans: the model's own template, run on traced values."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
