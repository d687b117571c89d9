"""The public names of tokens and where each is defined."""

from .control import Trust as Trust
from .encoding import ControlPolicy as ControlPolicy
from .encoding import Encoded as Encoded
from .encoding import encode_spans as encode_spans
from .kinds import Kind as Kind
from .kinds import Part as Part
from .loading import load_tokenizer as load_tokenizer
from .tokenizer import Ids as Ids
from .tokenizer import Tokenizer as Tokenizer
from .vocabulary import Vocabulary as Vocabulary
