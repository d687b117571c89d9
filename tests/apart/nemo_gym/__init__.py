"""Tests with NeMo Gym, in its own environment."""
