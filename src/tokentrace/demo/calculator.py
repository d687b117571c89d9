"""An exact calculator for + - * / and parentheses."""

import operator
import re
from fractions import Fraction

LONGEST = 120
"""In characters: limits the nesting of an expression and the size of its value."""
_OPERATORS = ({"+": operator.add, "-": operator.sub}, {"*": operator.mul, "/": operator.truediv})


class CalculatorError(ValueError):
    """An expression without a value. The message says why."""


def calculate(expression: str) -> Fraction:
    """The exact value. Raises CalculatorError.

    >>> str(calculate("3 * (12 - 45) / 9"))
    '-11'
    """
    if len(expression) > LONGEST:
        raise CalculatorError(f"the expression is longer than {LONGEST} characters")
    tokens = re.findall(r"[0-9]+|\S", expression)
    if not tokens:
        raise CalculatorError("the expression is empty")
    value = _chain(tokens)
    if tokens:
        raise CalculatorError(f"unexpected {tokens[0]!r}")
    return value


def _chain(tokens: list[str], level: int = 0) -> Fraction:
    """Take a sum (level 0), a product (1) or a factor (2) from the tokens."""
    if level == len(_OPERATORS):
        return _factor(tokens)
    value = _chain(tokens, level + 1)
    while tokens and tokens[0] in _OPERATORS[level]:
        sign, other = tokens.pop(0), _chain(tokens, level + 1)
        if sign == "/" and not other:
            raise CalculatorError("division by zero")
        value = _OPERATORS[level][sign](value, other)
    return value


def _factor(tokens: list[str]) -> Fraction:
    if not tokens:
        raise CalculatorError("the expression ends too early")
    first = tokens.pop(0)
    if first.isascii() and first.isdigit():
        return Fraction(int(first))
    if first == "-":
        return -_factor(tokens)
    if first != "(":
        raise CalculatorError(f"unexpected {first!r}")
    value = _chain(tokens)
    if not tokens or tokens.pop(0) != ")":
        raise CalculatorError("a parenthesis is not closed")
    return value
