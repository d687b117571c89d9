"""Comparisons of the two encoders that came out once, remembered in a folder, so that loading need not repeat them.

A record holds for one ``tokenizer.json``, one text to compare on, and one version of either library, on one kind of
machine; anything else is compared anew. `TOKENTRACE_CACHE` names another folder, or switches it off (``off``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from ..files import write_whole

FOLDER: Final = "TOKENTRACE_CACHE"
_OFF: Final = frozenset({"off", "0", "no", "false", ""})
_VERSION: Final = 1
"""To be raised when the comparison itself changes."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a comparison came to."""

    fast: bool
    """Whether fastokens gives the ids that tokenizers gives."""
    ordinary: bool
    """Whether it does so for text in which no control token is to be found, too."""
    problem: str = ""
    """Why it cannot be used."""


def cache_folder() -> Path | None:
    """Where to remember; None where that is switched off, or there is no home."""
    chosen = os.environ.get(FOLDER)
    if chosen is not None:
        return None if chosen.strip().lower() in _OFF else Path(chosen).expanduser()
    try:
        home = Path.home()
    except RuntimeError:
        return None
    if sys.platform == "darwin":
        return home / "Library" / "Caches" / "tokentrace"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local") / "tokentrace" / "cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache") / "tokentrace"


class Check:
    """One comparison: its record is read with `remembered` and written with `remember`."""

    def __init__(self, digest: str, sample: str) -> None:
        self._compared = {
            "tokenizer": digest,
            "sample": hashlib.sha256(sample.encode("utf-8", "surrogatepass")).hexdigest(),
            "check": str(_VERSION),
            "fastokens": version("fastokens"),
            "tokenizers": version("tokenizers"),
            "machine": platform.machine(),
        }
        folder = cache_folder()
        name = hashlib.sha256(json.dumps(self._compared).encode()).hexdigest()
        self._path = None if folder is None else folder / "checks" / f"{name}.json"

    def remembered(self) -> Verdict | None:
        """What it came to the last time; None if it is not known, or what is there cannot be read."""
        if self._path is None:
            return None
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            verdict = Verdict(**record.pop("verdict"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        kinds = (verdict.fast, bool), (verdict.ordinary, bool), (verdict.problem, str)
        is_sound = record == self._compared and all(isinstance(value, kind) for value, kind in kinds)
        return verdict if is_sound else None

    def remember(self, verdict: Verdict) -> None:
        """Write what it came to. A folder that cannot be written is none."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps({**self._compared, "verdict": asdict(verdict)}).encode())
