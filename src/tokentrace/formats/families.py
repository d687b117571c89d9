"""Families."""

from __future__ import annotations

from typing import Any


def python_format(renderer: str, tokenizer: Any) -> Any:
    return None


def recognise(template: Any, variables: Any, renderer: str) -> str:
    return "default"
