"""Ids to messages: reasoning, content and tool calls, whole or as they arrive. Pure."""
