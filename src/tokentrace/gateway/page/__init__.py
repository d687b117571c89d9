"""The page at ``/`` of a gateway: sessions as they come, the tree of each, and every token by its kind."""
