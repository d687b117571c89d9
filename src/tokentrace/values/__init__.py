"""JSON values: their place in a conversation, schemas of tools and Python functions."""
