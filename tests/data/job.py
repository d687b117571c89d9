"""What tests of tokenize jobs share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokentrace.data.tokenizing import TokenizeSettings
from tokentrace.pocket import POCKET

SETTINGS = TokenizeSettings(str(POCKET))


def write_lines(path: Path, rows: list[Any]) -> Path:
    text = "".join((row if isinstance(row, str) else json.dumps(row, ensure_ascii=False)) + "\n" for row in rows)
    path.write_text(text, encoding="utf-8")
    return path
