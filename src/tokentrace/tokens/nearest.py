"""Which model or file was meant by a name that is not there: the nearest of those that are."""

from __future__ import annotations

import difflib
import itertools
import os
from pathlib import Path
from typing import Final

_LOOKED_AT: Final = 1000
"""Folders beside a missing one that are looked at."""


def meant(name: str) -> str:
    """A hint for the name of a model that is not there: the nearest folders with a tokenizer, and what the hub's cache
    holds; empty where nothing is near."""
    cached = [
        one.name.removeprefix("models--").replace("--", "/")
        for one in folders_in(_hub_cache())
        if one.name.startswith("models--")
    ]
    found = [*_near_folders(Path(name).expanduser()), *difflib.get_close_matches(name, ["pocket", *cached], 3)]
    return f"; did you mean {' or '.join(map(repr, found[:3]))}?" if found else ""


def meant_file(path: Path) -> str:
    """A hint for a file or folder that is not there: the nearest beside it; empty where nothing is near."""
    try:
        names = [one.name for one in itertools.islice(path.parent.iterdir(), _LOOKED_AT)]
    except OSError:
        return ""
    near = difflib.get_close_matches(path.name, names, 1, 0.8)
    return f"; did you mean {str(path.with_name(near[0]))!r}?" if near else ""


def _near_folders(path: Path) -> list[str]:
    """Folders with a tokenizer whose path differs from one in the first name of it that is not there."""
    missing = path
    while missing.parent != missing and not missing.parent.is_dir():
        missing = missing.parent
    names = [one.name for one in folders_in(missing.parent)]
    rest = path.relative_to(missing)
    near = [missing.with_name(one) / rest for one in difflib.get_close_matches(missing.name, names, 3)]
    return [str(one) for one in near if (one / "tokenizer.json").is_file()]


def folders_in(parent: Path) -> list[Path]:
    """The folders in a folder by name, the first found of many; none where it cannot be read."""
    try:
        return sorted(one for one in itertools.islice(parent.iterdir(), _LOOKED_AT) if one.is_dir())
    except OSError:
        return []


def _hub_cache() -> Path:
    """Where huggingface_hub keeps what it fetched."""
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
