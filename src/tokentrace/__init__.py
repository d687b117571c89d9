"""tokentrace: train on the exact tokens the model saw and sampled.

>>> import tokentrace
>>> from tokentrace.pocket import POCKET
>>> renderer = tokentrace.create_renderer(POCKET)
>>> rendered = renderer.render([{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}])
>>> rendered.decode(rendered.mask)
'4<|end|>'
"""

from .lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
