"""Token-in, token-out engines: ids and sampling parameters in; ids, logprobs and a finish reason out.

Importing them loads no optional dependency; connecting to a server needs
``tokentrace[engines]``.

>>> from tokentrace.engines import EmbeddedEngine, SamplingParams, VLLMEngine
"""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
