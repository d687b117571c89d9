"""The gateway's page at ``/``: live sessions, their trees, every token with its kind."""
