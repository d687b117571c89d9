"""JSON values: where one is in a conversation, what a tool's schema says of it, schemas from Python functions."""
