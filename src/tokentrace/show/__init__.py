"""Results for people to look at: in a terminal, in a notebook, as a page, as JSON."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
