"""Weights on their way into panels, once at load, and single rows on their way out again.

A panel holds PANEL weight rows; see cpu.panels. Integer kinds have a float32 scale for each row, and INT4 a whole
number besides for each row and GROUP inputs, which the row's scale is multiplied with.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headway.kernels.cpu.arithmetic import PANEL, PANEL_VECTORS, WIDE_INT8
from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.ir import LANES, VECTOR_BYTES
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_rows
from headway.kernels.cpu.rounding import (
    GROUP,
    LARGEST_INT4,
    LARGEST_SCALE,
    largest_of_rows,
    write_bytes,
    write_groups,
    write_words,
)
from headway.kernels.cpu.simd import FLOAT32, copy_element, load, read_byte, read_int64, store, write_integer
from headway.kernels.cpu.tiles import transpose_words

# The largest weight of a row, in units of the row's scale.
_LARGEST_INT8, _LARGEST_INT4 = np.float32(127), np.float32(LARGEST_INT4 * LARGEST_SCALE)


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


@compiled()
def _fill_zeros(memory, size):
    for i in range(size):
        write_integer(memory, i, 0, 8)


@compiled()
def _row_address(parts, count, number, row_bytes):
    """Where a row lies; `parts` are pairs of int64, the number of the first row of a part and its address."""
    part = count - 1
    while number < read_int64(parts, 2 * part):
        part -= 1
    return read_int64(parts, 2 * part + 1) + (number - read_int64(parts, 2 * part)) * row_bytes


@compiled()
def _transpose_rows(rows, row_bytes, edge, out):
    """The words of the sixteen rows whose addresses stand at `rows` to [word, lane], zeros up to a whole line of words.

    edge has room for sixteen addresses and as many lines.
    """
    whole = row_bytes // VECTOR_BYTES * VECTOR_BYTES
    for first in range(0, whole, VECTOR_BYTES):
        transpose_words(rows, first, out + first * LANES, VECTOR_BYTES)
    if whole == row_bytes:
        return
    for lane in range(LANES):
        row, line = read_int64(rows, lane), edge + LANES * 8 + lane * VECTOR_BYTES
        write_integer(edge, lane, line, 64)
        for i in range(VECTOR_BYTES):
            write_integer(line, i, read_byte(row, whole + i) if whole + i < row_bytes else 0, 8)
    transpose_words(edge, 0, out + whole * LANES, VECTOR_BYTES)


PACK = struct.Struct("13q")


@once_per_kind
def pack_job(source_kind: Any, kind: Any) -> int:
    """Every panel of a weight [features, width] in parts; padded is the width as stored, and rows are row_bytes long.

    Sixteen rows at a time are transposed, so that a lane is a row, and rounded lane by lane, unless they are of int8.
    """
    rounds = source_kind is not WIDE_INT8
    is_bytes, is_nibbles = rounds and isinstance(kind, np.uint8 | np.int8), isinstance(kind, np.uint32)
    largest_integer = _LARGEST_INT4 if is_nibbles else _LARGEST_INT8
    offset = 128 if isinstance(kind, np.uint8) else 0

    def pack(a: int) -> None:
        panels, parts, count, features, width, size = arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5), arg(a, 6)
        padded, row_bytes, lane_bytes, packed = arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10)
        row_scales, gated = arg(a, 11), arg(a, 12)
        source_bytes, steps, step_bytes = width * size, row_bytes // lane_bytes, PANEL * lane_bytes
        words = (padded * size + VECTOR_BYTES - 1) // VECTOR_BYTES * LANES
        # Lanes without a row read zeros, and so do inputs beyond the width.
        nothing, turned = take_memory(source_bytes), take_memory(words * VECTOR_BYTES)
        rows, edge = take_memory(8 * LANES), take_memory(LANES * (8 + VECTOR_BYTES))
        largest = take_memory(VECTOR_BYTES)
        _fill_zeros(nothing, source_bytes)
        _fill_zeros(turned, words * VECTOR_BYTES)
        panel = take_rows(a, 1)
        while panel < panels:
            for vector in range(PANEL_VECTORS):
                for lane in range(LANES):
                    number = source_row(panel, vector * LANES + lane, features, gated)
                    address = _row_address(parts, count, number, source_bytes) if number >= 0 else nothing
                    write_integer(rows, lane, address, 64)
                _transpose_rows(rows, source_bytes, edge, turned)
                to = packed + panel * PANEL * row_bytes
                if is_bytes or is_nibbles:
                    scales = row_scales + (panel * PANEL + vector * LANES) * 4
                    largest_of_rows(source_kind, turned, words, largest)
                    for lane in range(LANES):
                        store(scales, lane, load(largest, lane, FLOAT32) / largest_integer, FLOAT32)
                if is_bytes:
                    write_bytes(
                        source_kind, kind, turned, steps, largest, offset, to + vector * LANES * lane_bytes, step_bytes
                    )
                elif is_nibbles:
                    write_groups(source_kind, turned, steps, scales, vector, to, step_bytes)
                else:
                    write_words(kind, turned, steps, to + vector * LANES * lane_bytes, step_bytes)
            panel = take_rows(a, 1)
        for memory in (nothing, turned, rows, edge, largest):
            give_back(memory)

    return job(pack)


def pack_nibbles(numbers: Tensor, factors: Tensor, out: Tensor) -> None:
    """Panels of INT4 from what has been rounded before: as write_groups leaves them, in the bytes `out`.

    Args:
        numbers: uint8 below 16 [lanes, in], 8 more than the weights.
        factors: int8 [lanes, in / GROUP], of the rows' scales.
    """
    panels, groups = len(numbers) // PANEL, factors.shape[1]
    low, high = numbers.view(panels, PANEL, groups, GROUP // 8, 2, 4).unbind(4)
    words = (low | high << 4).permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    scales = (factors.view(torch.uint8) ^ 128).view(panels, PANEL, groups).transpose(1, 2)
    out.copy_(torch.cat([scales, words], dim=2).view(-1))


@compiled()
def _stored(panel, lane, lane_bytes, input_, kind_code):
    """One input of a row of integers, in units of the row's scale."""
    if kind_code == 4:
        group, place = panel + input_ // GROUP * PANEL * lane_bytes, input_ % GROUP
        byte = read_byte(group, PANEL + (place // 8 * PANEL + lane) * 4 + place % 4)
        return ((byte >> 4 if place % 8 >= 4 else byte & 15) - 8) * (read_byte(group, lane) - 128)
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
                    in_lane = lane_bytes // size
                    for i in range(width):
                        copy_element(base, (i // in_lane * PANEL + lane) * in_lane + i % in_lane, to, i, size)
                else:
                    scale = load(row_scales, number, FLOAT32)
                    for i in range(width):
                        store(to, i, np.float32(_stored(base, lane, lane_bytes, i, code)) * scale, out_kind)
            first = take_rows(a, step)

    return job(rows)
