"""tokentrace: train on the exact tokens the model saw and sampled.

>>> import tokentrace
>>> from tokentrace.pocket import POCKET
>>> renderer = tokentrace.create_renderer(POCKET)
>>> rendered = renderer.render([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> rendered.decode(rendered.mask)
'4<|end|>'
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        ControlTokenError,
        InputError,
        RendererError,
        TemplateError,
        TemplateLimitError,
        TokenizerError,
        TokentraceError,
    )
    from .rendered import RenderedTokens, TokenSpan
    from .renderer import Renderer, RendererPool, create_renderer, create_renderer_pool
    from .template import ChatTemplate
    from .tokens import ControlPolicy, Tokenizer, load_tokenizer

# Loaded when first asked for: `import tokentrace` and `tokentrace --help` cost next to nothing.
_HOMES = {
    "ChatTemplate": "template",
    "ControlPolicy": "tokens",
    "ControlTokenError": "errors",
    "InputError": "errors",
    "RenderedTokens": "rendered",
    "Renderer": "renderer",
    "RendererError": "errors",
    "RendererPool": "renderer",
    "TemplateError": "errors",
    "TemplateLimitError": "errors",
    "TokenSpan": "rendered",
    "Tokenizer": "tokens",
    "TokenizerError": "errors",
    "TokentraceError": "errors",
    "create_renderer": "renderer",
    "create_renderer_pool": "renderer",
    "load_tokenizer": "tokens",
}

__all__ = [
    "ChatTemplate",
    "ControlPolicy",
    "ControlTokenError",
    "InputError",
    "RenderedTokens",
    "Renderer",
    "RendererError",
    "RendererPool",
    "TemplateError",
    "TemplateLimitError",
    "TokenSpan",
    "Tokenizer",
    "TokenizerError",
    "TokentraceError",
    "create_renderer",
    "create_renderer_pool",
    "load_tokenizer",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
