"""From spans to ids: one tokenizer facade, origins per token, and the one door for control tokens."""

from .control import Trust
from .encoding import ControlPolicy, Encoded, encode_spans
from .loading import load_tokenizer
from .tokenizer import Ids, Tokenizer
from .vocabulary import Vocabulary

__all__ = ["ControlPolicy", "Encoded", "Ids", "Tokenizer", "Trust", "Vocabulary", "encode_spans", "load_tokenizer"]
