"""Weights on their way into panels, once at load, and single rows on their way out again.

A panel holds PANEL weight rows; see cpu_panels. Integer kinds have a float32 scale for each row, and INT4 a whole
number besides for each row and GROUP inputs, which the row's scale is multiplied with.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu_arithmetic import PANEL, PANEL_VECTORS
from headway.kernels.cpu_compile import compiled, give_back, take_memory
from headway.kernels.cpu_ir import LANES
from headway.kernels.cpu_simd import (
    FLOAT32,
    copy_element,
    load,
    nearest,
    read_byte,
    read_int64,
    store,
    write_integer,
)
from headway.kernels.cpu_team import arg, job, once_per_kind, take_rows
from headway.kernels.cpu_tiles import transpose_words

_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST_INT8, _LOWEST_INT4, _HIGHEST_INT4 = np.float32(127), np.float32(-8), np.float32(7)
# INT4: inputs that share a scale, the largest scale in units of the row's, and what a row's largest weight becomes.
GROUP, LARGEST_SCALE, _LARGEST_INT4 = 32, 16, np.float32(7.5)
# Of the scales between these fractions of the one that keeps a group's largest weight, the one that loses least.
_LEAST_FRACTION, _MOST_FRACTION = np.float32(0.65), np.float32(1.1)


@compiled()
def _largest(source, kind, first, last):
    """The element of the greatest magnitude among first .. last - 1, with its sign."""
    best = _ZERO
    for i in range(first, last):
        value = load(source, i, kind)
        if abs(value) > abs(best):
            best = value
    return best


@compiled()
def _row_to_bytes(source, source_kind, width, row, offset):
    """A row as int8 plus offset; returns its scale."""
    largest = abs(_largest(source, source_kind, 0, width))
    if largest == _ZERO:
        largest = _ONE
    inverse = _LARGEST_INT8 / largest
    for i in range(width):
        write_integer(row, i, np.int64(nearest(load(source, i, source_kind) * inverse)) + offset, 8)
    return largest / _LARGEST_INT8


@compiled(inline="always")
def _four_bits(value, inverse):
    return min(_HIGHEST_INT4, max(_LOWEST_INT4, nearest(value * inverse)))


@compiled()
def _lost(source, source_kind, first, last, scale):
    """The sum of the squares of what rounding a group to four bits loses."""
    inverse, error = _ONE / scale, _ZERO
    for i in range(first, last):
        value = load(source, i, source_kind)
        lost = value - _four_bits(value, inverse) * scale
        error += lost * lost
    return error


@compiled()
def _choose_scale(source, source_kind, first, last, unit):
    """The scale of a group of 4-bit weights, in units of the row's."""
    plain = abs(_largest(source, source_kind, first, last)) / (_LARGEST_INT4 * unit)
    lowest = max(1, int(plain * _LEAST_FRACTION))
    best, least = lowest, np.float32(np.inf)
    for scale in range(lowest, min(LARGEST_SCALE, int(plain * _MOST_FRACTION) + 1) + 1):
        error = _lost(source, source_kind, first, last, np.float32(scale) * unit)
        if error < least:
            best, least = scale, error
    return best


@compiled()
def _row_to_nibbles(source, source_kind, width, padded, row):
    """A row as words of eight weights, byte b of which has weights b and 4 + b, then a byte of scale for each group.

    Returns the row's scale.
    """
    largest = abs(_largest(source, source_kind, 0, width))
    unit = (largest if largest > _ZERO else _ONE) / (_LARGEST_INT4 * np.float32(LARGEST_SCALE))
    for first in range(0, padded, GROUP):
        scale = _choose_scale(source, source_kind, first, max(first, min(first + GROUP, width)), unit)
        inverse = _ONE / (np.float32(scale) * unit)
        write_integer(row, padded // 2 + first // GROUP, scale, 8)
        for word in range(first, first + GROUP, 8):
            for byte in range(4):
                low, high = word + byte, word + 4 + byte
                a = np.int64(_four_bits(load(source, low, source_kind), inverse)) if low < width else 0
                b = np.int64(_four_bits(load(source, high, source_kind), inverse)) if high < width else 0
                write_integer(row, word // 2 + byte, (a + 8) | ((b + 8) << 4), 8)
    return unit


@compiled()
def _interleave(addresses, row_bytes, lane_bytes, packed):
    """The PANEL rows at addresses to [step, vector, lane], lane_bytes of a row in each lane."""
    steps = row_bytes // lane_bytes
    for vector in range(PANEL_VECTORS):
        done = steps // LANES * LANES if lane_bytes == 4 else 0
        for step in range(0, done, LANES):
            to = packed + (step * PANEL_VECTORS + vector) * LANES * 4
            transpose_words(addresses + vector * LANES * 8, step * 4, to, PANEL_VECTORS * LANES * 4)
        for lane in range(LANES):
            row = read_int64(addresses, vector * LANES + lane)
            for step in range(done, steps):
                to = (step * PANEL_VECTORS + vector) * LANES + lane
                copy_element(row, step, packed, to, lane_bytes)


@compiled()
def _interleave_groups(addresses, row_bytes, packed):
    """The PANEL rows of 4-bit weights at addresses to [group, PANEL scales, then [word, row] weights]."""
    words = GROUP // 8
    groups = row_bytes // (4 * words + 1)
    for group in range(groups):
        to = packed + group * PANEL * (4 * words + 1)
        for lane in range(PANEL):
            row = read_int64(addresses, lane)
            copy_element(row, groups * 4 * words + group, to, lane, 1)
            for word in range(words):
                copy_element(row, group * words + word, to + PANEL, word * PANEL + lane, 4)


@compiled()
def source_row(panel, lane, features, gated):
    """The weight row in a lane of a panel, or -1; gated, half of the lanes are gate rows, half the up rows of them."""
    if gated == 0:
        row = panel * PANEL + lane
        return row if row < features else -1
    half = PANEL // 2
    row = panel * half + lane % half
    if row >= features // 2:
        return -1
    return row if lane < half else features // 2 + row


PACK = struct.Struct("12q")


@once_per_kind
def pack_job(source_kind: Any, kind: Any) -> int:
    """Every panel of a dense weight [features, width]; padded is the width as stored, and rows are row_bytes long."""
    offset = 128 if isinstance(kind, np.uint8) else 0
    is_int8, is_int4, is_float = isinstance(kind, np.uint8 | np.int8), isinstance(kind, np.uint32), kind is source_kind

    def pack(a: int) -> None:
        panels, weight, features, width, size = arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        padded, row_bytes, lane_bytes, packed = arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        row_scales, gated = arg(a, 10), arg(a, 11)
        # What is stored as it comes is read where it lies; there is one row of zeros for lanes without a row.
        rows, addresses = take_memory(row_bytes if is_float else PANEL * row_bytes), take_memory(8 * PANEL)
        if is_float:
            for i in range(row_bytes):
                write_integer(rows, i, 0, 8)
        panel = take_rows(a, 1)
        while panel < panels:
            for lane in range(PANEL):
                number = source_row(panel, lane, features, gated)
                row, source = rows + (0 if is_float else lane * row_bytes), weight + number * width * size
                write_integer(addresses, lane, source if is_float and number >= 0 else row, 64)
                inside = width if number >= 0 else 0
                if is_int8:
                    scale = _row_to_bytes(source, source_kind, inside, row, offset)
                    store(row_scales, panel * PANEL + lane, scale, FLOAT32)
                    for i in range(inside, row_bytes):
                        write_integer(row, i, offset, 8)
                if is_int4:
                    scale = _row_to_nibbles(source, source_kind, inside, padded, row)
                    store(row_scales, panel * PANEL + lane, scale, FLOAT32)
            if is_int4:
                _interleave_groups(addresses, row_bytes, packed + panel * PANEL * row_bytes)
            else:
                _interleave(addresses, row_bytes, lane_bytes, packed + panel * PANEL * row_bytes)
            panel = take_rows(a, 1)
        give_back(rows)
        give_back(addresses)

    return job(pack)


@compiled()
def _stored(panel, lane, lane_bytes, input_, kind_code):
    """One input of a row of integers, in units of the row's scale."""
    if kind_code == 4:
        group, place = panel + input_ // GROUP * PANEL * lane_bytes, input_ % GROUP
        byte = read_byte(group, PANEL + (place // 8 * PANEL + lane) * 4 + place % 4)
        return ((byte >> 4 if place % 8 >= 4 else byte & 15) - 8) * read_byte(group, lane)
    byte = read_byte(panel, (input_ // lane_bytes * PANEL + lane) * lane_bytes + input_ % lane_bytes)
    if kind_code == 8:
        return byte - 128
    return byte - 256 if byte >= 128 else byte


ROWS = struct.Struct("10q")


@once_per_kind
def rows_job(out_kind: Any, kind: Any) -> int:
    """Rows of an ungated weight, as numbers of out_kind, dense; integer kinds times their scales."""
    code = 4 if isinstance(kind, np.uint32) else 8 if isinstance(kind, np.uint8) else 0
    is_float = kind is out_kind

    def rows(a: int) -> None:
        step, count, numbers, packed, width = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        row_bytes, lane_bytes, size, row_scales, out = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        first = take_rows(a, step)
        while first < count:
            for index in range(first, min(first + step, count)):
                number = read_int64(numbers, index)
                panel, lane = number // PANEL, number % PANEL
                base, to = packed + panel * PANEL * row_bytes, out + index * width * size
                if is_float:
                    for place in range(row_bytes // lane_bytes):
                        copy_element(base, place * PANEL + lane, to, place, lane_bytes)
                else:
                    scale = load(row_scales, number, FLOAT32)
                    for i in range(width):
                        store(to, i, np.float32(_stored(base, lane, lane_bytes, i, code)) * scale, out_kind)
            first = take_rows(a, step)

    return job(rows)
