"""What a conversation is: its shapes, and what is wrong with one that is not."""
