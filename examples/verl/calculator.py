"""A tool as a plain function; tools.yaml names it."""

from tokentrace.demo.calculator import calculate


def calculator(expression: str) -> int:
    """Evaluate an arithmetic expression."""
    return int(calculate(expression))
