"""The one error of the asset list."""

from __future__ import annotations


class AssetError(RuntimeError):
    """An asset could not be had, or is not what its row promises. The message says which and what to do."""
