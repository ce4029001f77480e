"""A matrix on the grid of a scheme: to the nearest, or such that its products with known inputs change least.

Matrices are [out, in]. What is known of the inputs x of a product is the sum of x x^T over tokens, [in, in] float32,
here called the moments: the squared error of all products of a matrix that is off by D is the trace of D moments D^T.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from headway.models.quantization import MOST_STEPS
from headway.quantize.schemes import Scheme

_POWERS = tuple(step / 20 for step in range(1, 20))  # powers of the size of inputs that AWQ tries
_MOST_ROWS = 512  # rows that AWQ tries them on
_DAMPING, _DAMPINGS = 0.01, 5  # share of the mean of the moments' diagonal; tenfold where that does not suffice
_BLOCK = 128  # columns that GPTQ corrects one by one, before it corrects all that follow


@dataclass(slots=True)
class Rounded:
    """A matrix as it is stored: scale * (code - zero point)."""

    codes: Tensor  # [out, in]: int8, float8_e4m3fn, or the numbers of e2m1 as float32
    scales: Tensor  # [out, groups], in the dtype of the checkpoint; of e2m1 as float32
    zeros: Tensor | None  # int8, the same; None where all are 0
    # What scales were multiplied with to be stored as e4m3 [1]; None where they are stored as they are.
    of_all: Tensor | None = None

    @property
    def dense(self) -> Tensor:
        """The numbers that it stands for, float32."""
        return (self.codes.float() - _per_input(self.zeros, self.codes)) * _per_input(self.scales, self.codes)


def _per_input(of_groups: Tensor | None, like: Tensor) -> Tensor | float:
    """Repeat the numbers of groups for each of their inputs; 0.0 for none."""
    if of_groups is None:
        return 0.0
    return of_groups.float().repeat_interleave(like.shape[1] // of_groups.shape[1], 1)


class Grid:
    """The numbers that the weights of a matrix may become.

    Args:
        weight: float32 [out, in].
        dtype: the dtype of scales.
        sizes: the size of the square of each input [in]. Large inputs count for more when the scale that errs least is
            found.
    """

    def __init__(self, weight: Tensor, scheme: Scheme, dtype: torch.dtype, sizes: Tensor | None = None) -> None:
        self._scheme = scheme
        rows, inputs = weight.shape
        self._of_all: Tensor | None = None
        if scheme.format == "nvfp4-pack-quantized":
            self._of_all = (6 * 448 / weight.abs().max().clamp(min=1e-30)).view(1)
        self._sizes = torch.ones(inputs) if sizes is None or not sizes.any() else sizes
        self.scales, self.zeros = self._fit(weight.view(rows, -1, scheme.group_size or inputs), dtype)

    def _fit(self, grouped: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Scales, as they are stored, and zero points [out, groups]."""
        low, high = self._scheme.limits
        if self._scheme.in_steps:
            return _in_steps(grouped, self._sizes.view(grouped.shape[1:]), low, high)
        if self._scheme.symmetric:
            scales = grouped.abs().amax(2) / ((high - low) / 2)
            return self._stored(scales, dtype), torch.zeros_like(scales)
        least, most = grouped.amin(2).clamp(max=0), grouped.amax(2).clamp(min=0)
        scales = self._stored((most - least) / (high - low), dtype)
        return scales, (low - least / scales).round().clamp(low, high)

    def _stored(self, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Scales as they will be read from the checkpoint. None is 0, so that one can divide by them."""
        if self._scheme.format == "mxfp4-pack-quantized":  # powers of two; the largest weights become at least 3.5
            return torch.exp2(torch.floor(torch.log2(scales.clamp(min=2.0**-120) * 6 * 8 / 7)) - 2)
        if self._of_all is not None:
            return (scales * self._of_all).clamp(2.0**-9, 448).to(torch.float8_e4m3fn).float() / self._of_all
        return scales.clamp(min=torch.finfo(torch.float16).tiny).to(dtype).float()

    def codes(self, weight: Tensor, column: int | None = None) -> Tensor:
        """The nearest codes of a matrix, or of one column [out], as float32."""
        scales, zeros = self._scales_for(weight, column)
        codes = weight / scales + zeros
        low, high = self._scheme.limits
        if self._scheme.floats:
            return codes.clamp(low, high).to(torch.float8_e4m3fn).float() if self._scheme.bits == 8 else _e2m1(codes)
        return codes.round().clamp(low, high)

    def dense(self, weight: Tensor, column: int | None = None) -> Tensor:
        """The numbers that these codes stand for."""
        scales, zeros = self._scales_for(weight, column)
        return (self.codes(weight, column) - zeros) * scales

    def _scales_for(self, weight: Tensor, column: int | None) -> tuple[Tensor, Tensor]:
        if column is not None:
            group = column // (self._scheme.group_size or column + 1)
            return self.scales[:, group], self.zeros[:, group]
        wide = weight.shape[1] // self.scales.shape[1]
        return self.scales.repeat_interleave(wide, 1), self.zeros.repeat_interleave(wide, 1)

    def rounded(self, codes: Tensor, dtype: torch.dtype) -> Rounded:
        """Codes, scales and zero points in the types in which they are stored."""
        if self._scheme.floats and self._scheme.bits == 4:
            return Rounded(codes, self.scales, None, self._of_all)
        stored = codes.to(torch.float8_e4m3fn if self._scheme.floats else torch.int8)
        return Rounded(stored, self.scales.to(dtype), None if self._scheme.symmetric else self.zeros.to(torch.int8))


def _in_steps(grouped: Tensor, sizes: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """Scales [out, groups], and zero points of 0.

    A scale is the multiple of its row's unit that errs least in the square. The unit has so few bits that float16 and
    bfloat16 hold its multiples exactly.
    """
    largest = grouped.abs().amax((1, 2)).clamp(min=torch.finfo(torch.float16).tiny * high * MOST_STEPS)
    fraction, exponent = torch.frexp(largest / ((high - low) / 2 * MOST_STEPS))
    unit = torch.ldexp((fraction * 16).ceil() / 16, exponent).view(-1, 1)
    best, least = unit.expand(grouped.shape[:2]), torch.full(grouped.shape[:2], torch.inf)
    for steps in range(1, MOST_STEPS + 1):
        scale = (unit * steps).unsqueeze(2)
        lost = ((grouped - (grouped / scale).round().clamp(low, high) * scale).square() * sizes).sum(2)
        best, least = torch.where(lost < least, unit * steps, best), torch.minimum(lost, least)
    return best, torch.zeros_like(best)


def _e2m1(numbers: Tensor) -> Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; of two as near, that with an even code."""
    sizes = numbers.abs().clamp(max=6)
    steps = torch.where(sizes < 2, 0.5, torch.where(sizes < 4, 1.0, 2.0))
    return ((sizes / steps).round() * steps).copysign(numbers)


def nearest(weight: Tensor, scheme: Scheme, dtype: torch.dtype) -> Rounded:
    """Each weight rounded by itself."""
    grid = Grid(weight, scheme, dtype)
    return grid.rounded(grid.codes(weight), dtype)


def gptq(weight: Tensor, moments: Tensor, scheme: Scheme, dtype: torch.dtype, act_order: bool) -> Rounded:
    """Round column by column, and let the columns that follow make up for the error of each (Frantar et al., 2022).

    Args:
        act_order: the inputs of the largest moments first. Groups stay as they are.
    """
    inputs = weight.shape[1]
    grid = Grid(weight, scheme, dtype, moments.diagonal())
    order = moments.diagonal().argsort(descending=True, stable=True) if act_order else torch.arange(inputs)
    factor = _inverse_factor(moments[order][:, order])
    if factor is None:
        return grid.rounded(grid.codes(weight), dtype)
    left, codes = weight[:, order], torch.empty_like(weight)
    columns = order.tolist()
    for start in range(0, inputs, _BLOCK):
        end = min(start + _BLOCK, inputs)
        block, corner = left[:, start:end].clone(), factor[start:end, start:end]
        errors = torch.zeros_like(block)
        for place in range(end - start):
            column = columns[start + place]
            now = block[:, place]
            codes[:, column] = grid.codes(now, column)
            errors[:, place] = (now - grid.dense(now, column)) / corner[place, place]
            block[:, place + 1 :] -= torch.outer(errors[:, place], corner[place, place + 1 :])
        left[:, end:] -= errors @ factor[start:end, end:]
    return grid.rounded(codes, dtype)


def _inverse_factor(moments: Tensor) -> Tensor | None:
    """The upper Cholesky factor of the inverse of the damped moments; None where they have none, or are all zero."""
    mean = moments.diagonal().mean()
    if not mean > 0:
        return None
    for power in range(_DAMPINGS):
        damped = moments + torch.eye(len(moments)) * (mean * _DAMPING * 10**power)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed.item() == 0:
            upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if failed.item() == 0:
                return upper
    return None


def awq_scales(
    weight: Tensor, moments: Tensor, scheme: Scheme, dtype: torch.dtype, alike: Callable[[Tensor], Tensor]
) -> Tensor:
    """Factors for the weights of each input before they are rounded, larger where inputs are large.

    They are a power of the inputs' size, with the exponent whose products err least (Lin et al., 2023).

    Args:
        alike: makes numbers of inputs equal that must have the same scale.
    """
    some = weight[:: -(-len(weight) // _MOST_ROWS)]
    sizes = alike(moments.diagonal()).sqrt()
    sizes = (sizes / sizes.mean().clamp(min=1e-30)).clamp(min=1e-4)
    best = torch.ones_like(sizes)
    least = _error(some, best, moments, scheme, dtype)
    for power in _POWERS:
        scales = sizes**power
        scales = scales / (scales.amax() * scales.amin()).sqrt()
        error = _error(some, scales, moments, scheme, dtype)
        if error < least:
            best, least = scales, error
    return best


def _error(weight: Tensor, scales: Tensor, moments: Tensor, scheme: Scheme, dtype: torch.dtype) -> float:
    scaled = weight * scales
    off = Grid(scaled, scheme, dtype).dense(scaled) / scales - weight
    return ((off @ moments) * off).sum().item()
