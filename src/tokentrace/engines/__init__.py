"""Token-in token-out engines: ids and sampling parameters to ids, logprobs and a finish reason."""
