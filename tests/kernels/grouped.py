"""Random weights in groups, and what they stand for by the definition."""

from __future__ import annotations

import torch
from torch import Tensor

from headway.kernels.weights import NF4, Groups, Weight

# Scheme, rows, inputs, inputs of a group, groups of a run: every size, runs of a row, rows that are no whole panels.
CASES = [
    ("int4-weight-only", 70, 256, 32, 8),
    ("int4-weight-only", 33, 384, 128, 1),
    ("int4-weight-only", 64, 24, 8, 3),
    ("int8-weight-only", 160, 512, 16, 16),
    ("int8-weight-only", 70, 320, 64, 1),
    ("float8-weight-only", 70, 384, 128, 1),
    ("float8-weight-only", 33, 48, 16, 3),
    ("float4-weight-only", 70, 96, 32, 1),
    ("float4-weight-only", 33, 48, 16, 3),
    ("normal4-weight-only", 70, 192, 64, 1),
    ("normal4-weight-only", 33, 48, 8, 1),
]
# Whose activations are not rounded: their numbers are none of integers, and there are no offsets.
UNROUNDED = ("float8-weight-only", "normal4-weight-only")


def random_weight(
    scheme: str, out: int, width: int, size: int, run: int, ordered: bool = False, dtype: torch.dtype = torch.float32
) -> Weight:
    """Scales as float16 has them, and for whole numbers minima and offsets of their own."""
    generator = torch.Generator().manual_seed(out + width)

    def whole(low: int, high: int, columns: int) -> Tensor:
        return torch.randint(low, high, (out, columns), generator=generator)

    count = width // size
    runs = count // run
    scales, minima = ((torch.randn(out, runs, generator=generator) * 0.01).half().float() for _ in range(2))
    order = torch.randperm(width, generator=generator).int() if ordered else None
    if scheme in UNROUNDED:
        values = torch.randn(out, width, generator=generator).to(torch.float8_e4m3fn)
        if scheme == "normal4-weight-only":
            values = whole(0, 16, width).to(torch.uint8)
        ones, zeros = torch.ones(out, count, dtype=torch.int8), torch.zeros(out, count, dtype=torch.int8)
        return Weight(values, scheme, groups=Groups(size, ones, zeros, scales, run), dtype=dtype)
    if scheme in ("int4-weight-only", "float4-weight-only"):
        values = whole(0, 16, width).to(torch.uint8)
    else:
        values = whole(-128, 128, width).to(torch.int8)
    factors, offsets = whole(-128, 128, count).to(torch.int8), whole(-128, 128, count).to(torch.int8)
    return Weight(values, scheme, groups=Groups(size, factors, offsets, scales, run, minima, order), dtype=dtype)


def multiplied_out(weight: Weight) -> Tensor:
    """scale * factor * number - minimum * offset, number by number."""
    groups, values = weight.groups, weight.values
    assert groups is not None and isinstance(values, Tensor)
    dense = torch.empty(values.shape)
    minima = groups.scales if groups.minima is None else groups.minima
    for column in range(values.shape[1]):
        group = column // groups.size
        run = group // groups.run
        scale = groups.scales[:, run] * groups.factors[:, group].float()
        minimum = minima[:, run] * groups.offsets[:, group].float()
        numbers = values[:, column].float()
        if weight.scheme == "float4-weight-only":  # e2m1: sign, two bits of exponent, one of fraction
            code = values[:, column].int()
            exponent, fraction = (code >> 1 & 3).float(), (code & 1).float()
            numbers = torch.where(exponent > 0, (1 + fraction / 2) * 2 ** (exponent - 1), fraction / 2)
            numbers = torch.where(code >= 8, -numbers, numbers)
        if weight.scheme == "normal4-weight-only":
            numbers = torch.tensor(NF4)[values[:, column].int()]
        to = column if groups.order is None else int(groups.order[column])
        dense[:, to] = scale * numbers - minimum
    return dense


def rounded_by_group(x: Tensor, size: int) -> Tensor:
    """Activations in 16 bits with a scale for each group, in float64; with `order` they are to be permuted before."""
    parts = x.float().unflatten(1, (-1, size))
    best = parts.abs().amax(2, keepdim=True).clamp_min(1e-30)
    whole = (parts * (torch.full_like(best, 32767) / best)).round().double()
    return (whole * (best.double() / 32767)).flatten(1)
