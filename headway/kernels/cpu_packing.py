"""Weights on their way into panels, once at load, and single rows on their way out again.

A panel holds PANEL weight rows; see cpu_panels. Integer kinds have a float32 scale for each row, and INT4 one in
float16 for each row and group of inputs instead; a weight is its stored value, less the kind's offset, times its scale.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu_compile import compiled, give_back, take_memory
from headway.kernels.cpu_ir import LANES
from headway.kernels.cpu_panels import PANEL, PANEL_VECTORS
from headway.kernels.cpu_simd import (
    FLOAT16,
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
_LARGEST_INT8, _LOWEST_INT4 = np.float32(127), np.float32(-8)
# The scale of a group of 4-bit weights is the one of these fractions of the plain choice that loses least.
_FRACTIONS = 9
_LARGEST_FRACTION, _FRACTION_STEP = np.float32(1.1), np.float32(0.05)


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
    return min(np.float32(7), max(_LOWEST_INT4, nearest(value * inverse)))


@compiled()
def _choose_scale(source, source_kind, first, last, scales, place):
    """Write the float16 scale of a group of 4-bit weights: the largest becomes -8, or is clipped if that loses less."""
    plain = _largest(source, source_kind, first, last) / _LOWEST_INT4
    if plain == _ZERO:
        plain = _ONE
    best, least = plain, np.float32(np.inf)
    for number in range(_FRACTIONS):
        store(scales, place, plain * (_LARGEST_FRACTION - _FRACTION_STEP * np.float32(number)), FLOAT16)
        scale = load(scales, place, FLOAT16)
        inverse, error = _ONE / scale, _ZERO
        for i in range(first, last):
            value = load(source, i, source_kind)
            lost = value - _four_bits(value, inverse) * scale
            error += lost * lost
        if error < least:
            best, least = scale, error
    store(scales, place, best, FLOAT16)


@compiled()
def _row_to_nibbles(source, source_kind, width, padded, group, row, scales, place):
    """A row as words of eight 4-bit weights: byte b of a word has weights b and 4 + b. Scales are PANEL apart."""
    for first in range(0, padded, group):
        last = max(first, min(first + group, width))
        at = place + first // group * PANEL
        _choose_scale(source, source_kind, first, last, scales, at)
        inverse = _ONE / load(scales, at, FLOAT16)
        for word in range(first, first + group, 8):
            for byte in range(4):
                low, high = word + byte, word + 4 + byte
                a = np.int64(_four_bits(load(source, low, source_kind), inverse)) if low < width else 0
                b = np.int64(_four_bits(load(source, high, source_kind), inverse)) if high < width else 0
                write_integer(row, word // 2 + byte, (a + 8) | ((b + 8) << 4), 8)


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


PACK = struct.Struct("14q")


@once_per_kind
def pack_job(source_kind: Any, kind: Any) -> int:
    """Every panel of a dense weight [features, width]; padded is the width as stored, and rows are row_bytes long."""
    offset = 128 if isinstance(kind, np.uint8) else 0
    is_int8, is_int4, is_float = isinstance(kind, np.uint8 | np.int8), isinstance(kind, np.uint32), kind is source_kind

    def pack(a: int) -> None:
        panels, weight, features, width, size = arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        padded, group, row_bytes, lane_bytes, packed = arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10)
        row_scales, group_scales, gated = arg(a, 11), arg(a, 12), arg(a, 13)
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
                place = panel * (padded // group) * PANEL + lane
                if is_int8:
                    scale = _row_to_bytes(source, source_kind, width if number >= 0 else 0, row, offset)
                    store(row_scales, panel * PANEL + lane, scale, FLOAT32)
                    for i in range(width if number >= 0 else 0, row_bytes):
                        write_integer(row, i, offset, 8)
                if is_int4:
                    inside = width if number >= 0 else 0
                    _row_to_nibbles(source, source_kind, inside, padded, group, row, group_scales, place)
            _interleave(addresses, row_bytes, lane_bytes, packed + panel * PANEL * row_bytes)
            panel = take_rows(a, 1)
        give_back(rows)
        give_back(addresses)

    return job(pack)


@compiled()
def _stored(packed, lane_at, step_bytes, lane_bytes, input_, kind_code):
    """The stored value of one input of a row of integers."""
    if kind_code == 4:
        byte = read_byte(packed, input_ // 8 * step_bytes + lane_at + input_ % 4)
        return (byte >> 4 if input_ % 8 >= 4 else byte & 15) - 8
    byte = read_byte(packed, input_ // lane_bytes * step_bytes + lane_at + input_ % lane_bytes)
    if kind_code == 8:
        return byte - 128
    return byte - 256 if byte >= 128 else byte


ROWS = struct.Struct("14q")


@once_per_kind
def rows_job(out_kind: Any, kind: Any) -> int:
    """Rows of an ungated weight, as numbers of out_kind, dense; integer kinds times their scales."""
    code = 4 if isinstance(kind, np.uint32) else 8 if isinstance(kind, np.uint8) else 0
    is_float = kind is out_kind

    def rows(a: int) -> None:
        step, count, numbers, packed, width = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        padded, group, row_bytes, lane_bytes, size = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        row_scales, group_scales, out, group_scaled = arg(a, 10), arg(a, 11), arg(a, 12), arg(a, 13)
        step_bytes = PANEL * lane_bytes
        first = take_rows(a, step)
        while first < count:
            for index in range(first, min(first + step, count)):
                number = read_int64(numbers, index)
                panel, lane = number // PANEL, number % PANEL
                base, to = packed + panel * PANEL * row_bytes, out + index * width * size
                lane_at = lane * lane_bytes
                if is_float:
                    for place in range(row_bytes // lane_bytes):
                        copy_element(base, place * PANEL + lane, to, place, lane_bytes)
                else:
                    scale = _ONE if group_scaled else load(row_scales, number, FLOAT32)
                    for i in range(width):
                        if group_scaled:
                            place = (panel * (padded // group) + i // group) * PANEL + lane
                            scale = load(group_scales, place, FLOAT16)
                        value = np.float32(_stored(base, lane_at, step_bytes, lane_bytes, i, code))
                        store(to, i, value * scale, out_kind)
            first = take_rows(a, step)

    return job(rows)
