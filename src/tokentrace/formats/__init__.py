"""Data: families, dialects and grammars; how calls are written; formats that have no template."""
