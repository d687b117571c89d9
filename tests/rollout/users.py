"""A simulated user that workers can import: it ends the process."""

from __future__ import annotations

import os
from typing import Any

from tokentrace.rollout import BaseInteraction


class Deadly(BaseInteraction):
    """The process ends, as for lack of memory, when one rollout begins; the others have nothing said to them."""

    async def start_interaction(self, instance_id: str, **kwargs: Any) -> None:
        if instance_id == "q3-1":
            os._exit(1)

    async def generate_response(self, instance_id: str, messages: Any, **kwargs: Any) -> Any:
        return None
