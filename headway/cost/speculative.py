"""Speculative decoding: some proposed tokens, one step of the model that checks them all (Leviathan et al., 2023)."""

from __future__ import annotations

from headway.cost.attention import Chunk
from headway.cost.timing import Deployment

MOST_TOKENS = 16


def expected_tokens(tokens: int, acceptance: float) -> float:
    """Tokens that a step gives on average: (1 - a^(k+1)) / (1 - a), k proposed, accepted with probability a.

    The first that is refused ends it and is replaced, and when none is, one more comes free (Leviathan et al., equation
    1, which takes acceptances as independent).
    """
    return sum(acceptance**i for i in range(tokens + 1))


def cycle_s(deployment: Deployment, draft: Deployment | None, batch: int, context: int, tokens: int) -> float:
    """Seconds of proposing k tokens for each sequence and checking them.

    The draft takes k steps of one token, the model one step of k + 1.
    """
    check = deployment.step([Chunk(tokens + 1, context, tokens + 1, batch)]).seconds
    propose = draft.step([Chunk(1, context, 1, batch)]).device_s if draft is not None else 0.0
    return check + tokens * propose


def tpot_s(
    deployment: Deployment, draft: Deployment | None, batch: int, context: int, tokens: int, acceptance: float
) -> float:
    """Mean time of an output token; with k = 0, of plain decoding."""
    return cycle_s(deployment, draft, batch, context, tokens) / expected_tokens(tokens, acceptance)


def best_tokens(deployment: Deployment, draft: Deployment | None, batch: int, context: int, acceptance: float) -> int:
    """The k, from 0 to 16, with the lowest time of an output token; at 0, decoding is faster without proposals."""
    choices = range(MOST_TOKENS + 1)
    return min(choices, key=lambda k: tpot_s(deployment, draft, batch, context, k, acceptance))


def break_even(deployment: Deployment, draft: Deployment | None, batch: int, context: int, tokens: int) -> float | None:
    """The acceptance from which on k tokens are faster than none; None where not even acceptance 1 is.

    What a step takes does not depend on the acceptance, so it is where the expected tokens are as many as plain steps
    would have given in the time of a cycle.
    """
    plain = deployment.step([Chunk(1, context, 1, batch)]).seconds
    needed = cycle_s(deployment, draft, batch, context, tokens) / plain
    if needed > tokens + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(tokens, middle) < needed else (low, middle)
    return high
