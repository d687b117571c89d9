"""What is learned of one template: turns, stops, prompts, grammar, closing."""
