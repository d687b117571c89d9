"""What a tool of a question is for."""

from __future__ import annotations

from enum import StrEnum


class Purpose(StrEnum):
    """The purpose of a tool; its name differs between questions."""

    CALCULATE = "calculate"
    LOOK_UP = "look_up"
    CHECK = "check"
