"""The store of recorded sessions, for rollouts and the gateway."""
