"""Integrations with trainers and other libraries."""
