"""What tokentrace learns about one template: turns, stops, prompts, grammar, closing."""
