"""Inspect rollouts."""
