"""What loading a tokenizer came to once, remembered in a folder, so that it need not be repeated.

How the two encoders compared: for one ``tokenizer.json``, one text to compare on, and one version of either library, on
one kind of machine; anything else is compared anew. And the tables of a large vocabulary, for one ``tokenizer.json``.
What is there and cannot be read, or is not what was written, counts as nothing and is written anew. `TOKENTRACE_CACHE`
names another folder, or switches it off (``off``).
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

import numpy as np

from ..files import write_whole
from .vocabulary import Tables

FOLDER: Final = "TOKENTRACE_CACHE"
_OFF: Final = frozenset({"off", "0", "no", "false", ""})
_VERSION: Final = 1
"""To be raised when the comparison itself changes."""
_TABLES: Final = 2
"""To be raised when the tables change, or how they are written."""


@dataclass(frozen=True, slots=True)
class CheckResult:
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

    def remembered(self) -> CheckResult | None:
        """What it came to the last time; None if it is not known, or what is there cannot be read."""
        if self._path is None:
            return None
        try:
            record = json.loads(self._path.read_text(encoding="utf-8"))
            verdict = CheckResult(**record.pop("verdict"))
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None
        kinds = (verdict.fast, bool), (verdict.ordinary, bool), (verdict.problem, str)
        is_sound = record == self._compared and all(isinstance(value, kind) for value, kind in kinds)
        return verdict if is_sound else None

    def remember(self, verdict: CheckResult) -> None:
        """Write what it came to. A folder that cannot be written is none."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(self._path, json.dumps({**self._compared, "verdict": asdict(verdict)}).encode())


def remembered_tables(digest: str) -> Tables | None:
    """The tables of a ``tokenizer.json`` with this hash; None where they are not known."""
    path = _tables_path(digest)
    try:
        seal, _, data = (b"" if path is None else path.read_bytes()).partition(b"\n")
        if seal.decode("ascii") != hashlib.sha256(data).hexdigest():
            return None
        head, _, rest = data.partition(b"\n")
        facts = json.loads(head)
    except (OSError, ValueError):
        return None
    size = 4 * facts["size"]
    lengths, ends = (np.frombuffer(rest[at : at + size], "<i4").astype(np.int32, copy=False) for at in (0, size))
    return Tables(facts, lengths, ends, rest[2 * size :])


def remember_tables(digest: str, tables: Tables) -> None:
    """Write them. A folder that cannot be written is none."""
    path = _tables_path(digest)
    if path is not None:
        numbers = (array.astype("<i4").tobytes() for array in (tables.lengths, tables.ends))
        data = b"".join((json.dumps(tables.facts).encode(), b"\n", *numbers, tables.spelled))
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, hashlib.sha256(data).hexdigest().encode() + b"\n" + data)


def _tables_path(digest: str) -> Path | None:
    folder = cache_folder()
    return None if folder is None else folder / "vocabularies" / f"{digest}.{_TABLES}"
