"""The append-only record of a rollout: exact tokens, sources, the tree of rewritten histories."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
