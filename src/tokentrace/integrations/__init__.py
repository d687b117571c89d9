"""Integrations with trainers and other libraries, each in its own module."""
