"""Modules that are imported on first use: collecting tests imports no torch, no trl and no transformers."""

import importlib
from typing import Any


class Lazy:
    """A module that is imported when an attribute of it is used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        # pytest inspects what it collects
        if attribute.startswith(("__", "_mock_", "pytest_")) and attribute != "__all__":
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)


def lazy(name: str) -> Any:
    return Lazy(name)
