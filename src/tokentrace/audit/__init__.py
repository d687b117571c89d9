"""Certify a template, inspect rollouts."""
