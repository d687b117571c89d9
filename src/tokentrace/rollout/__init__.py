"""The agent loop: tools, simulated users, budgets, and a store for rollouts.

>>> from tokentrace.rollout import Agent, Budget, RolloutStore, Task, run_rollouts
"""

from ..lazy import load_on_use

__getattr__, __dir__, __all__ = load_on_use(__name__, __file__)
