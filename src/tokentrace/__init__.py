"""tokentrace: train on the exact tokens the model saw and sampled."""

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
from .tokens import Tokenizer, load_tokenizer

__all__ = [
    "ChatTemplate",
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
