"""Conversations to training rows: one at a time, or whole datasets."""
