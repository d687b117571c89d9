"""Results in a terminal, in a notebook, as a page and as JSON."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
