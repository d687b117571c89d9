"""Messages to ids: the renderer, the bridge to the next turn, spliced prefixes."""
