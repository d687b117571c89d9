"""The store of recorded sessions: SQLite or PostgreSQL, for rollouts and the gateway."""
