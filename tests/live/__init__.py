"""Tests against real engines."""
