"""The pinned package files, digests and control tokens of `lock.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

_LOCK = tomllib.loads(Path(__file__).with_name("lock.toml").read_text(encoding="utf-8"))


class AssetError(RuntimeError):
    """An asset is not available, or does not match its row. The message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Package:
    """One file of one release; its bytes are identified by `sha256`, whichever index they come from."""

    project: str
    version: str
    filename: str
    size: int
    sha256: str


PACKAGES = {key: Package(**row) for key, row in _LOCK["packages"].items()}
PINS: dict[str, tuple[str, str | None]] = {
    name: (digests[0], digests[1] if len(digests) > 1 else None) for name, digests in _LOCK["pins"].items()
}
CONTROL: dict[str, dict[int, str]] = {
    name: {int(token_id): text for token_id, text in tokens.items()} for name, tokens in _LOCK["control"].items()
}
CONTROL["kimi_k25"] = CONTROL["kimi_k2"] | CONTROL["kimi_k25"]
CONTROL["nemotron"] = CONTROL["nemo"] | CONTROL["nemotron"]
