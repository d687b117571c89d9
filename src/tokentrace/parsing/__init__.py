"""Completions to turns, by token id: reasoning, content, tool calls. One parser, which streams.

`marked` turns tokens into bytes in which control tokens cannot be confused with text. A grammar
compiled for the vocabulary (`compiled`) says which delimiters to look for. `parser` runs a
generator over a `reader` of these bytes: a turn, or `channels` for Harmony. Calls are left to
`calls`, which reads arguments by the style of the grammar (`arguments`). Results collect in
`output` and come out as `events` or as a `response`. `readback` compares a turn with its message.
"""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
