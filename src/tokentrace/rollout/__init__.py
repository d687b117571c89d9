"""Agents on an engine: the loop, its tools, simulated users and budgets."""
