"""The operations on CPU that go over rows once: norms, RoPE, the cache's writes.

At a few tokens these take less than a microsecond of work each, so they run on the calling thread; from
some thousands of elements on, the team shares the rows. Each job's arguments begin with the rows that are
taken at a time and the number of rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.jobs import arg, job, once_per_kind, real_arg, take_rows
from headway.kernels.cpu.simd import FLOAT32, copy_element, exponential_of_two, load, read_int64, store

# Sums may be reordered into vectors; NaN and infinity keep their meaning.
REORDER = {"reassoc", "contract", "nsz", "arcp"}

_LOG2_E = np.float32(1.4426950408889634)
_LN2_HIGH = np.float32(0.693359375)
_LN2_LOW = np.float32(-2.12194440e-4)
_ONE, _TWO, _HALF = np.float32(1.0), np.float32(2.0), np.float32(0.5)
_LOWEST = np.float32(-87.0)
# Minimax coefficients of (exp(r) - 1 - r) / r^2 on |r| <= ln(2) / 2, from Moshier's Cephes library (expf).
_C0, _C1, _C2 = np.float32(1.9875691500e-4), np.float32(1.3981999507e-3), np.float32(8.3334519073e-3)
_C3, _C4, _C5 = np.float32(4.1665795894e-2), np.float32(1.6666665459e-1), np.float32(5.0000001201e-1)


@compiled(fastmath=REORDER, inline="always")
def exp_of_negative(x):
    """exp(x) for x <= 0 in float32, within 2 units in the last place; below -87 it is exp(-87), about 1e-38."""
    x = max(x, _LOWEST)
    power = np.int32(x * _LOG2_E - _HALF)
    whole = np.float32(power)
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    tail = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    return (tail * r * r + r + _ONE) * exponential_of_two(power)


@compiled(fastmath=REORDER)
def rms_norm_rows(kind, first, last, x, outer_stride, inner, inner_stride, width, weight, eps, out):
    """Row i of x starts at (i // inner) * outer_stride + (i % inner) * inner_stride elements; out is dense."""
    for i in range(first, last):
        at = (i // inner) * outer_stride + (i % inner) * inner_stride
        total = np.float32(0)
        for d in range(width):
            value = load(x, at + d, kind)
            total += value * value
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            store(out, i * width + d, load(x, at + d, kind) * scale * load(weight, d, kind), kind)


RMS_NORM = struct.Struct("9qd")


@once_per_kind
def rms_norm_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        first = take_rows(a, step)
        while first < count:
            rms_norm_rows(
                kind, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), arg(a, 6),
                arg(a, 7), np.float32(real_arg(a, 9)), arg(a, 8),
            )  # fmt: skip
            first = take_rows(a, step)

    return job(rows)


@compiled(fastmath=REORDER)
def add_rms_norm_rows(kind, first, last, x, residual, width, weight, eps):
    """residual += x, x = rms_norm(residual), both dense."""
    for i in range(first, last):
        at = i * width
        total = np.float32(0)
        for d in range(width):
            store(residual, at + d, load(x, at + d, kind) + load(residual, at + d, kind), kind)
        for d in range(width):
            value = load(residual, at + d, kind)
            total += value * value
        scale = _ONE / np.sqrt(total / np.float32(width) + eps)
        for d in range(width):
            store(x, at + d, load(residual, at + d, kind) * scale * load(weight, d, kind), kind)


ADD_RMS_NORM = struct.Struct("6qd")


@once_per_kind
def add_rms_norm_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        first = take_rows(a, step)
        while first < count:
            add_rms_norm_rows(
                kind, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5),
                np.float32(real_arg(a, 6)),
            )  # fmt: skip
            first = take_rows(a, step)

    return job(rows)


ADD = struct.Struct("4qd")


@once_per_kind
def add_job(kind: Any) -> int:
    """residual = (residual + x) * factor, both dense."""

    def elements(a: int) -> None:
        step, count, x, residual, factor = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), np.float32(real_arg(a, 4))
        first = take_rows(a, step)
        while first < count:
            for i in range(first, min(first + step, count)):
                store(residual, i, (load(x, i, kind) + load(residual, i, kind)) * factor, kind)
            first = take_rows(a, step)

    return job(elements)


@compiled(fastmath=REORDER, inline="always")
def soft_cap(x, cap):
    """cap * tanh(x / cap), as (1 - e) / (1 + e) with e = exp(-2 |x| / cap)."""
    small = exp_of_negative(-abs(x) * (_TWO / cap))
    size = cap * (_ONE - small) / (_ONE + small)
    return size if x >= np.float32(0) else -size


@compiled(fastmath=REORDER)
def _soft_cap_elements(kind, first, last, x, cap):
    for i in range(first, last):
        value = load(x, i, kind)
        store(x, i, soft_cap(value, cap) if value == value else value, kind)


SOFT_CAP = struct.Struct("3qd")


@once_per_kind
def soft_cap_job(kind: Any) -> int:
    """The job that applies a soft cap in place. NaN stays NaN."""

    def elements(a: int) -> None:
        step, count, x, cap = arg(a, 0), arg(a, 1), arg(a, 2), np.float32(real_arg(a, 3))
        first = take_rows(a, step)
        while first < count:
            _soft_cap_elements(kind, first, min(first + step, count), x, cap)
            first = take_rows(a, step)

    return job(elements)


@compiled(fastmath=REORDER)
def rotate_rows(kind, first, last, x, stride, heads, width, half, cos, sin, positions, most):
    """RoPE in place on tokens first .. last - 1 of x, `stride` elements between tokens."""
    for token in range(first, last):
        table = min(read_int64(positions, token), most) * half
        for head in range(heads):
            at = token * stride + head * width
            for d in range(half):
                low, high = load(x, at + d, kind), load(x, at + half + d, kind)
                c, s = load(cos, table + d, FLOAT32), load(sin, table + d, FLOAT32)
                store(x, at + d, low * c - high * s, kind)
                store(x, at + half + d, high * c + low * s, kind)


@compiled()
def rotate_both_rows(
    kind, first, last, query, query_stride, heads, key, key_stride, kv_heads, width, half, cos, sin, positions, most
):
    rotate_rows(kind, first, last, query, query_stride, heads, width, half, cos, sin, positions, most)
    rotate_rows(kind, first, last, key, key_stride, kv_heads, width, half, cos, sin, positions, most)


ROTATE = struct.Struct("14q")


@once_per_kind
def rotate_both_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        first = take_rows(a, step)
        while first < count:
            rotate_both_rows(
                kind, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), arg(a, 6),
                arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12), arg(a, 13),
            )  # fmt: skip
            first = take_rows(a, step)

    return job(rows)


@compiled()
def _copy(source, target, elements, size):
    for element in range(elements):
        copy_element(source, element, target, element, size)


JOIN = struct.Struct("13q")


@once_per_kind
def join_job() -> int:
    """Rows of two tensors [T, H, width] of elements of `size` bytes side by side; strides are of tokens and heads."""

    def rows(a: int) -> None:
        step, count, out, heads, size = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        width, other_width = arg(a, 8), arg(a, 12)
        first = take_rows(a, step)
        while first < count:
            for row in range(first, min(first + step, count)):
                to, token, head = out + row * (width + other_width) * size, row // heads, row % heads
                source = arg(a, 5) + (token * arg(a, 6) + head * arg(a, 7)) * size
                _copy(source, to, width, size)
                source = arg(a, 9) + (token * arg(a, 10) + head * arg(a, 11)) * size
                _copy(source, to + width * size, other_width, size)
            first = take_rows(a, step)

    return job(rows)


TAKE = struct.Struct("7q")


@once_per_kind
def take_job() -> int:
    """Copies of rows of so many elements of `size` bytes."""

    def rows(a: int) -> None:
        step, count, table, numbers, out = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        elements, size = arg(a, 5), arg(a, 6)
        first = take_rows(a, step)
        while first < count:
            for index in range(first, min(first + step, count)):
                source, target = table + read_int64(numbers, index) * elements * size, out + index * elements * size
                _copy(source, target, elements, size)
            first = take_rows(a, step)

    return job(rows)
