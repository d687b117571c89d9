"""The gateway's page at ``/``: live sessions, the tree of each one, and every token with its kind."""
