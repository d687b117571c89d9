"""JSON values: their place in a conversation, their tool's schema, schemas of Python functions."""
