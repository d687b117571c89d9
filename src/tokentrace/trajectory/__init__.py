"""The append-only record of one rollout: exact tokens, their sources, and the tree of rewritten histories."""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
