"""tinker-cookbook, in an environment of its own: it asks for an older transformers."""
