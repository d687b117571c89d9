"""Benchmarks of tokentrace and its rivals, as CPU time in one process. They write docs/benchmarks.md."""
