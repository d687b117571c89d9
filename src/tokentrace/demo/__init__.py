"""The world of the demo: its questions, its tools, three client paths on them, and what is shown of it."""
