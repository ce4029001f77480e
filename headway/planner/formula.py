"""Formulas with their numbers put in. A number remembers the expression that it came from, so each is written once."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import reduce

# What the sources call "document".
DOCUMENTS = {
    "000": "A Deep Dive into LLM Inference Latencies",
    "001": "Bottlenecks: Why LLM Inference is So Difficult",
    "002": "LLM Inference System Characteristics",
    "003": "Inference Latency and Throughput",
}
# How tightly the text of a number binds.
_SUM, _PRODUCT, _POWER, _ALONE = range(4)


def _operator(
    sign: str, compute: Callable[[float, float], float], binds: int, left: int, right: int
) -> Callable[[Number | float, Number | float], Number]:
    """An operator of numbers; `left` and `right` are how tightly its operands must bind to need no brackets."""

    def applied(one: Number | float, other: Number | float) -> Number:
        one, other = _number(one), _number(other)
        text = f"{one.within(left)}{sign}{other.within(right)}"
        return Number(compute(one.value, other.value), text, binds)

    return applied


def _divided(one: float, other: float) -> float:
    """The quotient; if whole numbers divide each other, a whole number, however large."""
    is_whole = isinstance(one, int) and isinstance(other, int) and one % other == 0
    return one // other if is_whole else one / other


@dataclass(frozen=True, slots=True)
class Number:
    """A value and the arithmetic expression that it came from, with +, -, *, /, ^, max, min, floor and ceil.

    Python's numbers in an expression are its constants, written as they are.
    """

    value: float
    text: str
    binds: int = _ALONE

    __add__ = _operator(" + ", operator.add, _SUM, _SUM, _SUM)
    __sub__ = _operator(" - ", operator.sub, _SUM, _SUM, _PRODUCT)
    __mul__ = _operator(" * ", operator.mul, _PRODUCT, _PRODUCT, _POWER)
    __truediv__ = _operator(" / ", _divided, _PRODUCT, _PRODUCT, _POWER)
    __pow__ = _operator("^", operator.pow, _POWER, _ALONE, _ALONE)

    def __rsub__(self, other: float) -> Number:
        return _number(other) - self

    def __rmul__(self, other: float) -> Number:
        return _number(other) * self

    def __rtruediv__(self, other: float) -> Number:
        return _number(other) / self

    def within(self, binds: int) -> str:
        """The text as a part of an expression, in brackets unless it binds so tightly."""
        return self.text if self.binds >= binds else f"({self.text})"

    def rounded_to(self, value: float) -> Number:
        """The same expression with the value that the cost model has, which rounds it."""
        return replace(self, value=value)


@dataclass(frozen=True, slots=True)
class Formula:
    """One step of the calculation."""

    name: str  # what comes out
    rule: str  # the formula in words
    # The formula with numbers, and what it comes to, in `unit`; a plain number where it comes from a search or a
    # simulation and not from a formula.
    outcome: Number | float
    unit: str
    source: str  # a document and its section, a paper, or what was measured

    @property
    def value(self) -> float:
        return self.outcome.value if isinstance(self.outcome, Number) else self.outcome

    @property
    def lines(self) -> tuple[str, str, str]:
        """The rule; the formula with its numbers, or nothing; and the result."""
        numbers = f"= {self.outcome.text}" if isinstance(self.outcome, Number) else ""
        return self.rule, numbers, f"= {plain(self.value)} {self.unit}".rstrip()


def plain(value: float) -> str:
    """A number as it stands in a formula: whole numbers in full, others to six digits."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.6g}"


def given(value: float) -> Number:
    """A number that an expression begins with."""
    return Number(value, plain(value))


def ms(seconds: float) -> Number:
    """A time in milliseconds that an expression begins with."""
    return given(seconds * 1e3)


def added(terms: Iterable[Number]) -> Number:
    return reduce(operator.add, terms)


def larger(one: Number | float, other: Number | float) -> Number:
    one, other = _number(one), _number(other)
    return Number(max(one.value, other.value), f"max({one.text}, {other.text})")


def smaller(one: Number | float, other: Number | float) -> Number:
    one, other = _number(one), _number(other)
    return Number(min(one.value, other.value), f"min({one.text}, {other.text})")


def rounded(name: Callable[[float], int], number: Number) -> Number:
    """The floor or ceiling of a number."""
    return Number(name(number.value), f"{name.__name__}({number.text})")


def bracketed(number: Number) -> Number:
    """The number in brackets, also where it needs none."""
    return Number(number.value, f"({number.text})")


def _number(value: Number | float) -> Number:
    return value if isinstance(value, Number) else Number(value, str(value))
