"""An exact calculator for + - * / and parentheses on whole numbers. It evaluates nothing else, whatever it is given."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

LONGEST: Final = 120
"""How many characters an expression may have: enough for any question, too few to nest or to grow without end."""

_TOKEN: Final = re.compile(r"\s*(?:([0-9]+)|(.))", re.DOTALL)


class CalculatorError(ValueError):
    """An expression that has no value; the message says why."""


def calculate(expression: str) -> Fraction:
    """The exact value, or CalculatorError.

    >>> str(calculate("3 * (12 - 45) / 9"))
    '-11'
    """
    if len(expression) > LONGEST:
        raise CalculatorError(f"the expression is longer than {LONGEST} characters")
    tokens = [number or sign for number, sign in _TOKEN.findall(expression.rstrip())]
    if not tokens:
        raise CalculatorError("the expression is empty")
    value, rest = _sum(tokens)
    if rest:
        raise CalculatorError(f"unexpected {rest[0]!r}")
    return value


def _sum(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _product(tokens)
    while tokens and tokens[0] in "+-":
        other, rest = _product(tokens[1:])
        value, tokens = (value + other if tokens[0] == "+" else value - other), rest
    return value, tokens


def _product(tokens: list[str]) -> tuple[Fraction, list[str]]:
    value, tokens = _factor(tokens)
    while tokens and tokens[0] in "*/":
        other, rest = _factor(tokens[1:])
        if tokens[0] == "/" and not other:
            raise CalculatorError("division by zero")
        value, tokens = (value * other if tokens[0] == "*" else value / other), rest
    return value, tokens


def _factor(tokens: list[str]) -> tuple[Fraction, list[str]]:
    if not tokens:
        raise CalculatorError("the expression ends too early")
    first, rest = tokens[0], tokens[1:]
    if first.isascii() and first.isdigit():
        return Fraction(int(first)), rest
    if first == "-":
        value, rest = _factor(rest)
        return -value, rest
    if first == "(":
        value, rest = _sum(rest)
        if rest[:1] != [")"]:
            raise CalculatorError("a parenthesis is not closed")
        return value, rest[1:]
    raise CalculatorError(f"unexpected {first!r}")
