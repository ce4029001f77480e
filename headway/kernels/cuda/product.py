"""Products with packed matrices on CUDA in Triton, of all tokens with one matrix or of each with its experts.

Two kernels read any format (see cuda.packed). A single row is multiplied in float32, number by number; several are with
tl.dot, a chunk of inputs at a time, whose numbers are exact in half precision and whose scales are applied to the
chunk's product. So the numbers of a weight are never rounded, and never in memory but as they are packed.

Where there are too few programs for the device, inputs are split, and another kernel adds the parts in their order.
That depends on the matrix alone, for up to _FEW rows: a row's result does not depend on what the others hold.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.cuda.packed import Packed
from headway.kernels.cuda.rows import let_through
from headway.kernels.weights import Gate

# Rows of which a matrix is split among programs; with more, there are enough of them.
_FEW = 64
_PROGRAMS = 4  # for each multiprocessor
_LEAST_LANES = 256  # fewest lanes of a split
_LANES_AT_ONCE = 64  # lanes that a program reads before it goes on


@triton.jit
def _numbers(stored, table, HIGH: tl.constexpr, FORMAT: tl.constexpr):
    """The exact values of a chunk's stored numbers: plain ones as they are, others as float32."""
    if FORMAT == "plain":
        numbers = stored
    elif FORMAT == "int8":
        numbers = stored.to(tl.int8, bitcast=True).to(tl.float32)
    elif FORMAT == "float8":  # the bits of float16, whose exponents begin 8 lower
        bits = stored.to(tl.uint16)
        numbers = ((bits & 128) << 8 | (bits & 127) << 7).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    else:
        code = stored & 15
        if HIGH:
            code = stored >> 4
        if FORMAT == "int4":
            numbers = code.to(tl.float32)
        elif FORMAT == "normal4":
            numbers = tl.load(table + code.to(tl.int32))
        else:  # e2m1, the same with 14
            bits = code.to(tl.uint16)
            numbers = ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    return numbers


@triton.jit
def _stored_step(numbers, matrix, step, steps, lane, col, outputs, LANES: tl.constexpr):
    """The stored numbers of a step, [LANES, COLS]."""
    at = numbers + ((matrix * steps + step) * LANES + lane)[:, None] * outputs + col[None, :]
    return tl.load(at, mask=((col < outputs) & (step < steps))[None, :], other=0)


@triton.jit
def _inputs_of(order, matrix, chunk, lane, inputs, CHUNK: tl.constexpr):
    """Which inputs the lanes of a chunk are multiplied with, and whether there are such."""
    place = chunk * CHUNK + lane
    is_input = (lane < CHUNK) & (place < inputs)
    if order is not None:
        place = tl.load(order + matrix * inputs + place, mask=is_input, other=0)
    return place, is_input


@triton.jit
def _chunk_scales(floats, bytes_, matrix, chunk, runs, groups, col, outputs, of_run, of_group, there):
    """Scales times factors of a chunk, or minima times offsets; 1 where there are none."""
    at = (matrix * runs + tl.minimum(chunk // of_run, runs - 1)) * outputs + col
    result = tl.load(floats + at, mask=there, other=0.0).to(tl.float32)
    if bytes_ is not None:
        at = (matrix * groups + tl.minimum(chunk // of_group, groups - 1)) * outputs + col
        result *= tl.load(bytes_ + at, mask=there, other=0).to(tl.float32)
    return result


@triton.jit
def _finish(
    totals, matrix, row, live, first_col, bias, unit, out, outputs, slope, cubic, limit, shift,
    ROWS: tl.constexpr, COLS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Products [ROWS, COLS] times their unit, with the bias and through the gate, to their place in out."""
    col = first_col + tl.arange(0, COLS)
    if unit is not None:
        totals = totals * tl.load(unit + matrix)
    if bias is not None:
        totals += tl.load(bias + matrix * outputs + col, mask=col < outputs, other=0.0).to(tl.float32)[None, :]
    if GATED:
        gate, up = tl.split(tl.reshape(totals, (ROWS, COLS // 2, 2)))
        result = let_through(gate, up, slope, cubic, limit, shift)
        col = first_col // 2 + tl.arange(0, COLS // 2)
        width = outputs // 2
    else:
        result = totals
        width = outputs
    at = out + row.to(tl.int64)[:, None] * width + col[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=live[:, None] & (col < width)[None, :])


@triton.jit(do_not_specialize=["rows"])
def one_row_kernel(
    x, x_stride, share, experts, numbers, scales, factors, minima, offsets, order, bias, unit, table, out, partial,
    rows, inputs, outputs, steps, runs, groups, of_run, of_group, split_steps, slope, cubic, limit, shift,
    FORMAT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, IN_BYTE: tl.constexpr, AT_ONCE: tl.constexpr,
    COLS: tl.constexpr,
    SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Program (row, columns, split): row i of the result is row i // share of x times matrix experts[i], or the one."""
    row = tl.program_id(0)
    first_col = tl.program_id(1) * COLS
    split = tl.program_id(2)
    matrix = tl.zeros([], tl.int64)
    if experts is not None:
        matrix = tl.load(experts + row).to(tl.int64)
    col = first_col + tl.arange(0, COLS)
    there = col < outputs
    lane = tl.arange(0, LANES)
    of_row = x + (row // share).to(tl.int64) * x_stride
    totals = tl.zeros([LANES, COLS], tl.float32)
    less = tl.zeros([COLS], tl.float32)
    first = split * split_steps
    for step in range(first, tl.minimum(first + split_steps, steps), AT_ONCE):
        for number in tl.static_range(AT_ONCE * IN_BYTE):
            chunk = step * IN_BYTE + number
            if number % IN_BYTE == 0:
                own = step + number // IN_BYTE
                stored = _stored_step(numbers, matrix, own, steps, lane, col, outputs, LANES)
            place, is_input = _inputs_of(order, matrix, chunk, lane, inputs, CHUNK)
            value = tl.load(of_row + place, mask=is_input, other=0.0).to(tl.float32)
            products = _numbers(stored, table, number % IN_BYTE == 1, FORMAT).to(tl.float32) * value[:, None]
            if scales is not None:
                within = there & (chunk * CHUNK < inputs)
                scale = _chunk_scales(
                    scales, factors, matrix, chunk, runs, groups, col, outputs, of_run, of_group, within
                )  # fmt: skip
                products *= scale[None, :]
                if offsets is not None:
                    minimum = _chunk_scales(
                        minima, offsets, matrix, chunk, runs, groups, col, outputs, of_run, of_group, within
                    )  # fmt: skip
                    less += minimum * tl.sum(value, axis=0)
            totals += products
    result = (tl.sum(totals, axis=0) - less)[None, :]
    if SPLITS > 1:
        tl.store(partial + (split * rows + row).to(tl.int64) * outputs + col[None, :], result, mask=there[None, :])
    else:
        at = row + tl.zeros([1], tl.int32)
        _finish(
            result, matrix, at, at >= 0, first_col, bias, unit, out, outputs, slope, cubic, limit, shift,
            1, COLS, GATED,
        )  # fmt: skip


@triton.jit
def _tile_of_expert(tile, counts, ROWS: tl.constexpr, EXPERTS: tl.constexpr, PADDED: tl.constexpr):
    """(whose rows a tile has, EXPERTS or more for none, the first of them that it has, how many the expert has)."""
    expert = tl.arange(0, PADDED)
    has = tl.load(counts + expert, mask=expert < EXPERTS, other=0)
    tiles = (has + ROWS - 1) // ROWS
    mine = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32), axis=0)
    first = (tile - tl.sum(tl.where(expert < mine, tiles, 0), axis=0)) * ROWS
    return mine, first, tl.sum(tl.where(expert == mine, has, 0), axis=0)


@triton.jit(do_not_specialize=["rows", "places_stride"])
def rows_kernel(
    x, x_stride, share, counts, places, places_stride, numbers, scales, factors, minima, offsets, order, bias, unit,
    table, out, partial, rows, inputs, outputs, steps, runs, groups, of_run, of_group, split_steps, slope, cubic,
    limit, shift, FORMAT: tl.constexpr, CHUNK: tl.constexpr, LANES: tl.constexpr, IN_BYTE: tl.constexpr,
    AT_ONCE: tl.constexpr, COLS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Program (tile of rows, columns, split). With experts, each has tiles of its own rows, one after the other."""
    tile = tl.program_id(0)
    first_col = tl.program_id(1) * COLS
    split = tl.program_id(2)
    matrix = tl.zeros([], tl.int64)
    if EXPERTS > 0:
        mine, first_visit, visits = _tile_of_expert(tile, counts, ROWS, EXPERTS, PADDED)
        if mine >= EXPERTS:
            return
        visit = first_visit + tl.arange(0, ROWS)
        live = visit < visits
        matrix += mine
        row = tl.load(places + matrix * places_stride + visit, mask=live, other=0)
    else:
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < rows
    col = first_col + tl.arange(0, COLS)
    there = col < outputs
    lane = tl.arange(0, LANES)
    of_rows = x + (row // share).to(tl.int64) * x_stride
    totals = tl.zeros([ROWS, COLS], tl.float32)
    first = split * split_steps
    for step in range(first, tl.minimum(first + split_steps, steps), AT_ONCE):
        for number in tl.static_range(AT_ONCE * IN_BYTE):
            chunk = step * IN_BYTE + number
            if number % IN_BYTE == 0:
                own = step + number // IN_BYTE
                stored = _stored_step(numbers, matrix, own, steps, lane, col, outputs, LANES)
            place, is_input = _inputs_of(order, matrix, chunk, lane, inputs, CHUNK)
            value = tl.load(of_rows[:, None] + place[None, :], mask=live[:, None] & is_input[None, :], other=0.0)
            if WIDEN:
                value = value.to(tl.float32)
            numbers_of = _numbers(stored, table, number % IN_BYTE == 1, FORMAT).to(value.dtype)
            if scales is not None:
                within = there & (chunk * CHUNK < inputs)
                scale = _chunk_scales(
                    scales, factors, matrix, chunk, runs, groups, col, outputs, of_run, of_group, within
                )  # fmt: skip
                totals += tl.dot(value, numbers_of, input_precision="ieee") * scale[None, :]
                if offsets is not None:
                    minimum = _chunk_scales(
                        minima, offsets, matrix, chunk, runs, groups, col, outputs, of_run, of_group, within
                    )  # fmt: skip
                    totals -= tl.sum(value.to(tl.float32), axis=1)[:, None] * minimum[None, :]
            else:
                totals = tl.dot(value, numbers_of, totals, input_precision="ieee")
    if SPLITS > 1:
        at = partial + (split * rows + row).to(tl.int64)[:, None] * outputs + col[None, :]
        tl.store(at, totals, mask=live[:, None] & there[None, :])
    else:
        _finish(
            totals, matrix, row, live, first_col, bias, unit, out, outputs, slope, cubic, limit, shift,
            ROWS, COLS, GATED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_parts_kernel(
    partial, experts, bias, unit, out, rows, outputs, slope, cubic, limit, shift,
    COLS: tl.constexpr, SPLITS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Program (row, columns): the parts of a row added, and finished."""
    row = tl.program_id(0)
    first_col = tl.program_id(1) * COLS
    matrix = tl.zeros([], tl.int64)
    if experts is not None:
        matrix = tl.load(experts + row).to(tl.int64)
    col = first_col + tl.arange(0, COLS)
    totals = tl.zeros([1, COLS], tl.float32)
    for split in tl.static_range(SPLITS):
        at = partial + (split * rows + row).to(tl.int64) * outputs + col[None, :]
        totals += tl.load(at, mask=(col < outputs)[None, :], other=0.0)
    at = row + tl.zeros([1], tl.int32)
    _finish(
        totals, matrix, at, at >= 0, first_col, bias, unit, out, outputs, slope, cubic, limit, shift, 1, COLS, GATED
    )


@dataclass(frozen=True, slots=True)
class Routed:
    """Rows of a product and the matrices that they go to."""

    experts: Tensor  # int64 [rows], of each row
    counts: Tensor | None  # int32 [E], rows of each expert; None of a single token
    places: Tensor | None  # int32 [E, most], the rows of each expert
    share: int  # rows that follow each other and have the same input


def tile_sizes(rows: int, itemsize: int) -> tuple[int, int, int]:
    """(rows of a tile, columns, warps of a program) for this many rows of a matrix; see cuda.attention.tile_sizes."""
    if itemsize == 4:
        return (16, 32, 4) if rows <= 16 else (32, 32, 4)
    if rows <= 16:
        return 16, 64, 4
    return (32, 64, 4) if rows <= 32 else (64, 128, 8)


def count_splits(packed: Packed, columns: int, multiprocessors: int) -> int:
    """Into how many parts to cut the inputs, so that each multiprocessor has some programs; each has some steps."""
    wanted = triton.cdiv(_PROGRAMS * multiprocessors, triton.cdiv(packed.outputs, columns))
    return max(1, min(wanted, packed.steps * packed.lanes // _LEAST_LANES))


def multiply(
    packed: Packed,
    x: Tensor,
    multiprocessors: int,
    gate: Gate | None = None,
    routed: Routed | None = None,
    wide: bool = False,
) -> Tensor:
    """x [T, in] times the matrix -> [T, out], gated [T, out / 2]; routed, a row for each of its rows.

    A gated matrix has its gate and up rows by turns. Wide, the result is float32, as the sums are.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows = len(x) if routed is None else len(routed.experts)
    width = packed.outputs if gate is None else packed.outputs // 2
    out = torch.empty((rows, width), dtype=torch.float32 if wide else x.dtype, device=x.device)
    if rows == 0:
        return out
    is_one = rows == 1 if routed is None else routed.counts is None
    mean = rows if routed is None else triton.cdiv(rows, len(packed.numbers))
    tile_rows, columns, warps = (1, 64, 4) if is_one else tile_sizes(mean, x.element_size())
    splits = count_splits(packed, columns, multiprocessors) if rows <= _FEW else 1
    partial = torch.empty((splits if splits > 1 else 0, rows, packed.outputs), dtype=torch.float32, device=x.device)
    at_once = _LANES_AT_ONCE // packed.lanes
    sizes = [
        rows, packed.inputs, packed.outputs, packed.steps, 1 if packed.scales is None else packed.scales.shape[1],
        max([1, *(part.shape[1] for part in (packed.factors, packed.offsets) if part is not None)]),
        packed.of_run, packed.of_group, triton.cdiv(triton.cdiv(packed.steps, splits), at_once) * at_once,
    ]  # fmt: skip
    opens = gate or Gate()
    ends = [opens.slope, opens.cubic, opens.limit, opens.shift]
    matrices = [
        packed.numbers, packed.scales, packed.factors, packed.minima, packed.offsets, packed.order, packed.bias,
        packed.unit, packed.table,
    ]  # fmt: skip
    constants = {
        "FORMAT": packed.format, "CHUNK": packed.chunk, "LANES": packed.lanes, "IN_BYTE": packed.in_byte,
        "AT_ONCE": at_once, "COLS": columns, "SPLITS": splits, "GATED": gate is not None, "num_warps": warps,
    }  # fmt: skip
    share, experts = (1, None) if routed is None else (routed.share, routed.experts)
    blocks = triton.cdiv(packed.outputs, columns), splits
    if is_one:
        one_row_kernel[(rows, *blocks)](
            x, x.stride(0), share, experts, *matrices, out, partial, *sizes, *ends, **constants
        )  # fmt: skip
    else:
        counts, places = (None, None) if routed is None else (routed.counts, routed.places)
        tiles, count = triton.cdiv(rows, tile_rows), 0
        if routed is not None:  # each expert may have a tile that is not full, and each tile has a row
            count = len(packed.numbers)
            tiles = min(tiles + count - 1, rows)
        rows_kernel[(tiles, *blocks)](
            x, x.stride(0), share, counts, places, 0 if places is None else places.stride(0), *matrices, out, partial,
            *sizes, *ends, **constants, ROWS=tile_rows, EXPERTS=count, PADDED=triton.next_power_of_2(max(count, 1)),
            WIDEN=not isinstance(rows_kernel, triton.JITFunction),
        )  # fmt: skip
    if splits > 1:
        # Columns enough for a warp's reads; few programs, as there are few rows.
        add_parts_kernel[(rows, triton.cdiv(packed.outputs, 256))](
            partial, experts, packed.bias, packed.unit, out, rows, packed.outputs, *ends, COLS=256, SPLITS=splits,
            GATED=gate is not None,
        )  # fmt: skip
    return out
