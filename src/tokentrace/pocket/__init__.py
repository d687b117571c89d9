"""The pocket model: a small default that needs no download.

4,096 byte-level tokens, a template that only ever appends, and a small model that calls tools
(`pocket.model` runs it, ``training/pocket`` trained it).
"""

from dataclasses import dataclass
from pathlib import Path

POCKET = Path(__file__).parent
"""The folder with tokenizer, template and weights, laid out like any model's.

>>> from tokentrace import create_renderer
>>> rendered = create_renderer(POCKET).render([{"role": "user", "content": "2+2?"}])
>>> rendered.text
'<|bos|><|turn|>user\\n2+2?<|end|>'
"""

EXAMPLE = POCKET / "example.json"
"""A conversation to look at: tools, reasoning, and a user who types a control token."""


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise in pocket's training data, in fractions."""

    unthinking: float
    """Conversations with enable_thinking=false."""
    slips: float
    """Calls that go wrong at first; the wrong reply carries no loss."""
    resegmented: float
    """Tokens of the assistant that were split into two shorter ones, out of those that can be."""
    compact: float
    """Calls whose arguments were written with no space after the colon."""


NOISE = Noise(unthinking=0.05, slips=0.03, resegmented=0.01, compact=0.02)
"""The noise that the shipped weights were trained with. The last two break streams."""

__all__ = ["EXAMPLE", "NOISE", "POCKET", "Noise"]
