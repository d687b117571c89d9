"""The demo: questions, tools, three client paths."""
