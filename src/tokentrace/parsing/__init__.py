"""Completions to messages: reasoning, content and tool calls, by token id. There is one parser, and it streams.

Tokens become bytes in which control tokens cannot be confused with text (`marked`). A `reader` holds those that have
arrived; a grammar compiled for the vocabulary (`compiled`) says which delimiters to look for. `parser` runs a
generator over them: `turn`, or `channels` for Harmony. Text in which nothing can happen goes by in `lanes` without
waking it. A turn leaves calls to `calls`, which reads arguments by the
style of the grammar: `jsonreading`, `pairs` between tags, `bracketed`. `values` says what bare text means. What is
found goes to `output` and comes out as `events` or as a whole `response`; `messages` makes the message of one for a
conversation, and the gateway writes what clients know. `unreadable` says what of a message cannot be read back, with
`misread` by parsing it;
`proof` whether a grammar reads what its own template writes.
"""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
