"""Simulated users that workers can import: one who never answers, one who ends the process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from tokentrace.rollout import BaseInteraction


class Waiting(BaseInteraction):
    """It leaves a file in a folder for each rollout whose first turn is over, and never answers."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        (self._folder / instance_id).touch()
        await asyncio.Event().wait()


class Deadly(BaseInteraction):
    """The process ends, as for lack of memory, when one rollout begins; the others have nothing said to them."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id == "q3-1":
            os._exit(1)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return None
