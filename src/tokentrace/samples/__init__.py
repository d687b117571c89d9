"""Training rows: from conversations and from trajectories, cut, padded, packed."""
