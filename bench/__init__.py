"""Measurements: tokentrace beside its peers, in one process, as ratios of CPU time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

from tests.assets import family_dir

PEERS = {"qwen3": "Qwen3", "qwen3.5": "Qwen35", "glm-4.5": "GLM45", "minimax-m2": "MiniMaxM2", "kimi-k2.5": "KimiK25"}
"""The families that `renderers` has a renderer for, and what it calls them."""


def transformers_tokenizer(family: str) -> Any:
    """The tokenizer of a family, as transformers loads it."""
    from transformers import PreTrainedTokenizerFast, logging

    logging.set_verbosity_error()  # it says of long conversations that they are long
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return PreTrainedTokenizerFast.from_pretrained(str(family_dir(family)))


def peer_renderer(family: str, tokenizer: Any) -> Any:
    """The renderer that `renderers` has for a family, None where it has none."""
    if family not in PEERS:
        return None
    import renderers

    return renderers.create_renderer(tokenizer, getattr(renderers.configs, f"{PEERS[family]}RendererConfig")())


def cpu_time(call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Seconds of CPU time that a call takes, and what it returns."""
    start = time.process_time()
    result = call(*arguments)
    return time.process_time() - start, result
