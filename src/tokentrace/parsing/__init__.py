"""Completions to turns, by token id: reasoning, content and tool calls. There is one parser, and it streams.

`response` describes the result: parts with token ranges, calls, what is still open, the stop. `marked` turns tokens
into bytes in which control tokens cannot be confused with text. A grammar compiled for the vocabulary (`compiled`) says
which delimiters to look for. `parser` runs a generator over a `reader` of these bytes: `turn`, or `channels` for
Harmony. A turn leaves calls to `calls`, which reads arguments by the style of the grammar: `jsonreading`, `pairs`,
`bracketed`; `values` says what bare text means. Results collect in `output` and come out as `events` or as a whole
response; `messages` makes a message of one. `attempts` finds well-formed calls outside their place. `readback` compares
a parsed turn with its message; `proof` checks that a grammar reads what its own template writes.
"""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
