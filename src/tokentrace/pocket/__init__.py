"""The pocket model: a small default that needs no download.

4,096 byte-level tokens, digits and newlines one token each; a template that only ever appends; and a model of a few
million parameters that answers questions by calling tools (`pocket.model` runs it, `demo.questions` has the questions).
``training/pocket`` makes the vocabulary and trains the model.
"""

from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Noise:
    """What was done to pocket's training data, so that it writes a little as large models do. All are shares."""

    unthinking: float
    """Conversations with enable_thinking=false."""
    slips: float
    """Calls that go wrong first; the wrong reply carries no loss."""
    resegmented: float
    """Tokens of the assistant that were written as two shorter ones, of those that can be."""
    compact: float
    """Calls whose arguments were written with no space after the colon."""


NOISE: Final = Noise(unthinking=0.05, slips=0.03, resegmented=0.01, compact=0.02)
"""As the weights that ship were trained; ``training/pocket`` reads it here. The last two make streams break."""

__all__ = ["EXAMPLE", "NOISE", "POCKET", "Noise"]
