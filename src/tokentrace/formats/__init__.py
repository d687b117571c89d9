"""What follows from a template's trace: turns and masks, kept reasoning, patched history, families."""
