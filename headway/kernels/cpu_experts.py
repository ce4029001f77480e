"""Mixtures of experts on CPU: which experts a token goes to, and the sum of what they make of it.

Each job's arguments begin with the rows that are taken at a time and the number of rows.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from headway.kernels.cpu_compile import compiled
from headway.kernels.cpu_rows import REORDER, exp_of_negative
from headway.kernels.cpu_simd import FLOAT32, load, read_int64, store, write_integer
from headway.kernels.cpu_team import arg, job, once_per_kind, take_rows

_ZERO, _ONE, _NAN, _LOWEST = np.float32(0), np.float32(1), np.float32(np.nan), -np.float32(np.inf)


def by_expert(chosen: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Each expert that is chosen at all, and the places at which it stands in chosen [T, k], laid end to end."""
    flat = chosen.ravel()
    order = np.argsort(flat, kind="stable")
    numbers, starts = np.unique(flat[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(order, starts[1:]), strict=True)


@compiled()
def _total(kind, logits, count):
    """(the greatest, the sum of exp(each - greatest)); NaN as the sum if one is, or if the greatest is not finite."""
    greatest = _LOWEST
    for e in range(count):
        value = load(logits, e, kind)
        if value != value:
            return greatest, _NAN
        greatest = max(greatest, value)
    if np.isinf(greatest):
        return greatest, _NAN
    total = _ZERO
    for e in range(count):
        total += exp_of_negative(load(logits, e, kind) - greatest)
    return greatest, total


@compiled()
def _next(kind, logits, count, last, value):
    """The greatest of the logits that come after number `last`, of this value: less, or as much and further on."""
    place, best = -1, _LOWEST
    for e in range(count):
        found = load(logits, e, kind)
        if (found < value or (found == value and e > last)) and (place < 0 or found > best):
            place, best = e, found
    return place, best


@compiled()
def _sigmoid(value):
    if value != value:
        return value
    small = exp_of_negative(-abs(value))
    return (_ONE if value >= _ZERO else small) / (_ONE + small)


@compiled()
def _route_row(kind, logits, count, per_token, normalized, shared, chosen, weights):
    greatest, total = _total(kind, logits, count)
    known = total == total
    last, value, of_chosen = -1, np.float32(np.inf), _ZERO
    for k in range(per_token):
        if known:
            last, value = _next(kind, logits, count, last, value)
            weight = exp_of_negative(value - greatest)
        else:
            last, weight = k, _NAN
        of_chosen += weight
        write_integer(chosen, k, np.int64(last), 64)
        store(weights, k, weight, FLOAT32)
    for k in range(per_token):
        store(weights, k, load(weights, k, FLOAT32) / (of_chosen if normalized else total), FLOAT32)
    if shared:
        write_integer(chosen, per_token, np.int64(count), 64)
        store(weights, per_token, _sigmoid(load(logits, count, kind)), FLOAT32)


ROUTE = struct.Struct("10q")


@once_per_kind
def route_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, rows, count, per_token, shared = arg(a, 0), arg(a, 1), arg(a, 4), arg(a, 5), arg(a, 7)
        stride, width = (count + shared) * arg(a, 3), per_token + shared
        first = take_rows(a, step)
        while first < rows:
            for row in range(first, min(first + step, rows)):
                _route_row(
                    kind, arg(a, 2) + row * stride, count, per_token, arg(a, 6), shared,
                    arg(a, 8) + row * width * 8, arg(a, 9) + row * width * 4,
                )  # fmt: skip
            first = take_rows(a, step)

    return job(rows)


@compiled(fastmath=REORDER)
def mix_rows(kind, first, last, addresses, weights, per_token, width, sums, out):
    """Row i of out is the sum of weights[i, k] times the row at addresses[i, k], in the order of k."""
    for i in range(first, last):
        at = i * width
        for d in range(width):
            store(sums, at + d, _ZERO, FLOAT32)
        for k in range(i * per_token, (i + 1) * per_token):
            source, weight = read_int64(addresses, k), load(weights, k, FLOAT32)
            for d in range(width):
                store(sums, at + d, load(sums, at + d, FLOAT32) + weight * load(source, d, kind), FLOAT32)
        for d in range(width):
            store(out, at + d, load(sums, at + d, FLOAT32), kind)


MIX = struct.Struct("8q")


@once_per_kind
def mix_job(kind: Any) -> int:
    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        first = take_rows(a, step)
        while first < count:
            mix_rows(
                kind, first, min(first + step, count), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7)
            )
            first = take_rows(a, step)

    return job(rows)
