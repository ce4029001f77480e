"""Scores become weights, for every part of a chunk that counts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headway.kernels.cpu.chunks import CHUNK
from headway.kernels.cpu.compile import callable_of
from headway.kernels.cpu.jobs import once_per_kind
from headway.kernels.cpu.simd import BFLOAT16, FLOAT32, store
from headway.kernels.cpu.softmax import MASKED, largest_score, weigh
from tests.kernels.steps import random

SCALE, BEST = 0.125, 3.0
PARTS = [(0, CHUNK), (0, 1), (0, 37), (5, 6), (16, 32), (31, 127), (1, CHUNK), (127, CHUNK)]


@once_per_kind
def _weigh(kind: np.generic) -> Any:
    def both(scores, low, high, padded, weights, results):  # type: ignore[no-untyped-def]
        scale, best = np.float32(SCALE), np.float32(BEST)
        store(results, 0, largest_score(scores, low, high), FLOAT32)
        store(results, 1, weigh(kind, scores, low, high, padded, scale, best, weights), FLOAT32)

    return callable_of(both)


def weighed(scores: torch.Tensor, low: int, high: int, dtype: torch.dtype) -> tuple[torch.Tensor, float, float]:
    """The weights, the largest score and the sum."""
    weights, results = torch.full((CHUNK,), torch.nan).to(dtype), torch.zeros(2)
    kind = BFLOAT16 if dtype == torch.bfloat16 else FLOAT32
    _weigh(kind)(scores.data_ptr(), low, high, CHUNK, weights.data_ptr(), results.data_ptr())
    return weights, *results.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("low", "high"), PARTS)
def test_weights_are_exponentials_of_what_counts(dtype: torch.dtype, low: int, high: int) -> None:
    """What does not count may be anything; its weight is zero."""
    scores = torch.full((CHUNK,), torch.nan)
    scores[low:high] = random(low + high, torch.float32, high - low) * 40 - 100
    weights, largest, total = weighed(scores, low, high, dtype)
    assert largest == scores[low:high].max()
    exact = (scores[low:high].double() * SCALE - BEST).exp()
    expected = torch.zeros(CHUNK, dtype=torch.float64)
    expected[low:high] = exact
    # Half a unit in the last place of an exponent as large as 60 is 2e-6.
    torch.testing.assert_close(weights.double(), expected, rtol=1 / 256 if dtype == torch.bfloat16 else 5e-6, atol=0)
    assert total == pytest.approx(exact.sum().item(), rel=5e-6)


@pytest.mark.parametrize("high", [CHUNK, 100])
def test_the_ends_of_the_range(high: int) -> None:
    """The largest score has weight 1, the smallest a number that is not denormal; NaN is seen."""
    scores = torch.full((CHUNK,), BEST / SCALE)
    scores[1], scores[2], scores[3] = float(MASKED), -87.5 / SCALE, torch.nan
    weights, largest, total = weighed(scores, 0, high, torch.float32)
    assert weights[0] == 1.0
    assert largest == BEST / SCALE
    assert weights[1] == weights[2] == pytest.approx(np.exp(-87.0), rel=1e-5)
    assert torch.isnan(weights[3])
    assert np.isnan(total)
