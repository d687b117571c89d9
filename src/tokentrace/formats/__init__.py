"""Families, dialects and grammars as data; formats that have no template."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
