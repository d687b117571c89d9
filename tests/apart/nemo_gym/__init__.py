"""NeMo Gym, in an environment of its own."""
