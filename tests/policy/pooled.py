"""Vectors that some requests of a simulation want."""

from __future__ import annotations

import random

from headway.policy.step.pooling import PoolingParams


def some_pooling(rng: random.Random, share: float = 0.25) -> PoolingParams | None:
    """A vector of either kind for this share of requests; else None."""
    return PoolingParams(rng.choice(["last", "mean"])) if rng.random() < share else None
