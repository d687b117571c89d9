"""Tests with tinker-cookbook, in its own environment: it needs an older transformers."""
