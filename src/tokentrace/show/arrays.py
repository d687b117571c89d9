"""The view for programs: one array per column, one entry per token."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..rendering.rendered import RenderedTokens


def json_view(rendered: RenderedTokens) -> dict[str, Any]:
    """A rendering as plain data that ``json.dumps`` takes.

    ``token_ids``, ``tokens``, ``message_indices`` (-1: no message), ``roles``, ``fields`` and ``sampled`` have
    one entry per token. ``turns`` lists the sampled turns with their stop tokens.
    """
    return {
        "text": rendered.text,
        "token_ids": rendered.token_ids,
        "tokens": rendered.tokens(),
        "message_indices": rendered.message_indices,
        "roles": [rendered.role(message) for message in rendered.message_indices],
        "fields": rendered.fields,
        "sampled": rendered.sampled,
        "turns": [
            {
                "message": turn.message,
                "start": turn.start,
                "stop": turn.stop,
                "stop_token_id": turn.stop_token,
                "stop_token": None if turn.stop_token is None else rendered.decode(slice(turn.stop - 1, turn.stop)),
            }
            for turn in rendered.turns
        ],
        "changes": [dataclasses.asdict(made) for made in rendered.changes],
        "lost": [dataclasses.asdict(one) for one in rendered.lost],
        "dropped": [dataclasses.asdict(one) for one in rendered.dropped],
        "notes": list(rendered.notes),
    }
