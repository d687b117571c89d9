"""The recording gateway: agents that speak OpenAI's or Anthropic's API, token for token."""
