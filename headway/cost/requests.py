"""Requests that are alike, and what an engine that serves them has room for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from headway.policy.step.step_budget import MIXED, Sharing


@cache
def _random_shares() -> list[float]:
    import numpy as np  # not at the top: `--help` reads this module's limits, and does without

    shares: list[float] = np.random.default_rng(0).random(65_537).tolist()
    return shares


@dataclass(frozen=True, slots=True)
class RequestShape:
    """Requests that are alike, in tokens."""

    prompt: int
    output: int  # tokens of an answer, on average
    cached: int = 0  # tokens of the prompt that are found in the prefix cache; at least one is always computed
    # Answers are evenly spread between output * (1 - spread) and output * (1 + spread). At 0 requests that begin
    # together end together and their successors come together: bursts that never dissolve.
    spread: float = 0.0

    @property
    def mean_context(self) -> int:
        """Tokens before a decode step halfway through an answer."""
        return self.prompt + self.output // 2

    def output_of(self, number: int) -> int:
        """Tokens of the answer to the request of this number: drawn at random, and the same in every run.

        Lengths that are more even than random ones keep requests apart, whose prompts meet on a real server.
        """
        shares = _random_shares()
        share = 2.0 * shares[number % len(shares)] - 1.0
        return max(1, round(self.output * (1.0 + self.spread * share)))


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of an engine: tokens in a step, and sequences at once."""

    batched_tokens: int = 8192
    sequences: int = 256
    # Seconds by which prompts may lengthen a step for the decodes beside them; they may lengthen it by as long as these
    # decodes take alone where that is more (`policy.step.step_budget`). Infinite for no bound but the tokens.
    prefill_stall_s: float = math.inf
    least_tokens: int = 16  # tokens that the first prompt gets beside decodes, however long those take
    # A step is scheduled when the one before it begins, so that what comes meanwhile waits for a further one.
    ahead: bool = False
    sharing: Sharing = MIXED  # how prompts and decodes share steps
    whole_prompts: bool = False  # a prompt that fits in a step waits for one with room for all of it


USUAL = Limits()
