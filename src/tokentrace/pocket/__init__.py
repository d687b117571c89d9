"""The pocket model's vocabulary and chat template: a small default that needs no download.

4,096 byte-level tokens, digits and newlines one token each, and a template that only ever appends.
``training/pocket`` makes the vocabulary.
"""

from pathlib import Path
from typing import Final

POCKET: Final = Path(__file__).parent
"""The folder with ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``.

>>> from tokentrace import create_renderer
>>> rendered = create_renderer(POCKET).render([{"role": "user", "content": "2+2?"}])
>>> rendered.text
'<|bos|><|turn|>user\\n2+2?<|end|>'
"""

EXAMPLE: Final = POCKET / "example.json"
"""A conversation to look at: tools, reasoning, and a user who types a control token."""

__all__ = ["EXAMPLE", "POCKET"]
