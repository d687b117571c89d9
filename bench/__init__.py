"""Measurements: tokentrace beside its peers, in one process, as ratios of CPU time."""
