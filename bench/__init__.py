"""Measurements: tokentrace beside its rivals, in one process, as ratios of CPU time. They write docs/benchmarks.md."""
