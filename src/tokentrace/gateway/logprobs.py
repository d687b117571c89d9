"""Logprobs as OpenAI's APIs tell them: for each token its text, its bytes, and the likeliest others. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ..engines.protocol import Delta

LOWEST: Final = -9999.0
"""What OpenAI says for a token that cannot be drawn; JSON has no infinity."""


def logprob_entries(
    piece: Delta, token_bytes: Callable[[int], bytes], most: int, *, as_ids: bool = False
) -> list[dict[str, Any]]:
    """An entry for every token that was sampled, the stop token too, with up to `most` alternatives.

    With `as_ids` a token's text is ``token_id:`` and its id, as vLLM's ``return_tokens_as_token_ids`` has it.
    """

    def entry(id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes(id)
        text = f"token_id:{id}" if as_ids else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": max(float(logprob), LOWEST), "bytes": list(raw)}

    ids, logprobs = piece.ids.tolist(), piece.logprobs.tolist()
    others = piece.channels.get("top_logprobs", ()) if most else ()
    if len(others) != len(ids):  # a channel that comes with the last piece covers the whole completion
        others = [()] * len(ids)
    return [
        {**entry(id, logprob), "top_logprobs": [entry(*one) for one in list(some)[:most]]}
        for id, logprob, some in zip(ids, logprobs, others, strict=True)
    ]
