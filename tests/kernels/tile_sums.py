"""What products on matrix tiles come to, bit for bit, in numpy: the instruction's order of sums."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

INPUTS = 32  # of a tile


def sums_of_tiles(x: Tensor, weight: Tensor, inputs: int = INPUTS, start: np.ndarray | float = 0.0) -> np.ndarray:
    """x [T, in] times weight [out, in], bfloat16, in float32 [T, out], as tdpbf16ps adds to `start`.

    The even and the odd inputs of a tile apart, one rounding for each product and sum; then both; then to the sum so
    far. A product of two bfloat16 and a float32 added to it are exact in float64 unless they are too far apart for a
    second rounding to matter.
    """
    padding = (0, -x.shape[1] % inputs)
    tokens, rows = (torch.nn.functional.pad(each, padding).double().numpy() for each in (x, weight))
    total = np.full((len(tokens), len(rows)), start, np.float32)
    for first in range(0, tokens.shape[1], inputs):
        parts = []
        for half in range(2):
            part = np.zeros_like(total)
            for i in range(first + half, first + inputs, 2):
                part = (part.astype(np.float64) + np.outer(tokens[:, i], rows[:, i])).astype(np.float32)
            parts.append(part)
        total += parts[0] + parts[1]
    return total


def products_of_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The same with a bias, rounded to bfloat16."""
    total = torch.from_numpy(sums_of_tiles(x, weight))
    return (total if bias is None else total + bias.float()).bfloat16()
