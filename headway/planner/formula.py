"""A formula with its numbers put in."""

from __future__ import annotations

from dataclasses import dataclass

# What the sources call "document".
DOCUMENTS = {
    "000": "A Deep Dive into LLM Inference Latencies",
    "001": "Bottlenecks: Why LLM Inference is So Difficult",
    "002": "LLM Inference System Characteristics",
    "003": "Inference Latency and Throughput",
}


@dataclass(frozen=True, slots=True)
class Formula:
    """One step of the calculation.

    Args:
        name: what comes out.
        rule: the formula in words.
        numbers: the formula with numbers, an arithmetic expression with +, -, *, /, ^, max, min, floor and ceil; empty
            where the value comes from a recursion and not from a formula.
        value: the result, in `unit`.
        source: a document and its section, a paper, or what was measured.
    """

    name: str
    rule: str
    numbers: str
    value: float
    unit: str
    source: str


def plain(value: float) -> str:
    """A number as it stands in a formula: whole numbers in full, others to six digits."""
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:.6g}"


def result(formula: Formula) -> str:
    """The last line of a formula."""
    return f"= {plain(formula.value)} {formula.unit}".rstrip()
