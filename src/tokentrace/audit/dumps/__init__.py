"""What was written of rollouts, by us or by others: read as calls of an engine, and rows that were made of them."""
