"""Two sequences of ids differ: where, and why."""
