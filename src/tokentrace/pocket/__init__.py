"""The pocket model: a small default that needs no download.

4,096 byte-level tokens, digits and newlines one token each; a template that only ever appends; and a model of a few
million parameters that answers questions by calling tools (`pocket.model` runs it, `pocket.tasks` has the questions).
``training/pocket`` makes the vocabulary and trains the model.
"""

from pathlib import Path
from typing import Final

POCKET: Final = Path(__file__).parent
"""The folder with tokenizer, template and weights, as model folders are laid out.

>>> from tokentrace import create_renderer
>>> rendered = create_renderer(POCKET).render([{"role": "user", "content": "2+2?"}])
>>> rendered.text
'<|bos|><|turn|>user\\n2+2?<|end|>'
"""

EXAMPLE: Final = POCKET / "example.json"
"""A conversation to look at: tools, reasoning, and a user who types a control token."""

__all__ = ["EXAMPLE", "POCKET"]
