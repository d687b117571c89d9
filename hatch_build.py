"""The package page's links: README.md's are relative, and lead nowhere there.

They become links to the repository if pyproject.toml says where that is (``tool.hatch.metadata.hooks.custom``). Until
it has an address they stay as they are, and the package names no URLs.
"""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_LINK = re.compile(r"(\]\()(?!https?:|#|mailto:)([^)\s]+)(\))")


class Links(MetadataHookInterface):
    """Fills in ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Called by hatchling with the metadata as pyproject.toml has it."""
        told = self.config
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        repository = told["repository"].rstrip("/")
        urls = {"Documentation": told["documentation"], "Source": repository}
        if repository:
            text = _LINK.sub(rf"\g<1>{repository}/blob/main/\g<2>\g<3>", text)
            urls |= {"Issues": f"{repository}/issues", "Changelog": f"{repository}/blob/main/CHANGELOG.md"}
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        metadata["urls"] = {name: url for name, url in urls.items() if url}
