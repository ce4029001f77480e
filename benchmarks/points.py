"""The points of a sitting: what runs, and which of its rates counts."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)
class Point:
    """One row of the table; lengths in tokens.

    Args:
        rate: decode or prefill.
        batch: prompts at once.
        prompt: length of each.
        new: tokens for each; of a held point, those of each round.
        held: the prompts are taken in once, and every round decodes on where the last one ended.
    """

    label: str
    rate: str
    batch: int
    prompt: int
    new: int
    held: bool = False

    def longest(self, rounds: int) -> int:
        """Prompt and output of one sequence at the end of a sitting with so many rounds."""
        return self.prompt + self.total_new(rounds)

    def total_new(self, rounds: int) -> int:
        """New tokens of a sequence: of a held point for all rounds, with some to spare so that none ends before."""
        return self.new * (rounds + 2) if self.held else self.new


def decode(batch: int, prompt: int, new: int) -> Point:
    return Point(f"decode, batch {batch}", "decode", batch, prompt, new)


def prefill(batch: int, prompt: int) -> Point:
    return Point(f"prefill, {batch} x {prompt}", "prefill", batch, prompt, 1)


def held(batch: int, prompt: int, new: int) -> Point:
    return Point(f"decode, batch {batch} at {prompt:,} tokens", "decode", batch, prompt, new, held=True)


def product(text: str) -> tuple[int, int]:
    """Parse BATCHxTOKENS. Raises argparse.ArgumentTypeError."""
    left, separator, right = text.partition("x")
    if not (separator and left.isdigit() and right.isdigit() and int(left) and int(right)):
        raise argparse.ArgumentTypeError(f"{text!r} is not BATCHxTOKENS, such as 8x128, with both at least 1")
    return int(left), int(right)


def named(text: str) -> tuple[str, int, int]:
    """Parse decode:BATCH (tokens: 0) or prefill:BATCHxTOKENS. Raises argparse.ArgumentTypeError."""
    kind, _, amount = text.partition(":")
    if kind == "prefill":
        return (kind, *product(amount))
    if kind == "decode" and amount.isdigit() and int(amount):
        return kind, int(amount), 0
    raise argparse.ArgumentTypeError(f"{text!r} is not decode:BATCH or prefill:BATCHxTOKENS, with both at least 1")
