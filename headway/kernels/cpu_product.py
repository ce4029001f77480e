"""The compiled code of linear layers on CPU: tokens made ready, panels multiplied, sums turned into results.

A thread takes some panels and reads each straight through while it is multiplied with the tokens: with vectors
TILE_TOKENS at a time and a block of inputs at a time, so that what several groups of tokens need comes from memory
once; or, in bfloat16 where there are any, on matrix tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu_arithmetic import GROUPED, INT4, INT8, PANEL, TILE_TOKENS, arithmetic_of
from headway.kernels.cpu_compile import compiled, give_back, take_memory
from headway.kernels.cpu_groups import PASSES_AHEAD, multiply_grouped
from headway.kernels.cpu_ir import VECTOR_BYTES
from headway.kernels.cpu_matrix import (
    STEP_BYTES,
    STEP_WORDS,
    TILE_ROWS,
    configure,
    multiply_one,
    multiply_two,
    release,
)
from headway.kernels.cpu_panels import TOTALS_BYTES, multiply_panel, unpack_panel
from headway.kernels.cpu_rows import REORDER, exp_of_negative
from headway.kernels.cpu_simd import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    copy_element,
    larger,
    load,
    nearest,
    pause,
    read_int32,
    read_shared,
    store,
    take_ticket,
    write_integer,
    write_rounded,
)
from headway.kernels.cpu_team import arg, job, once_per_kind, take_share, tickets

_ZERO, _ONE = np.float32(0), np.float32(1)
# Up to so many tokens, 4-bit weights are unpacked in registers by every tile, with more once for all tiles.
_MOST_FROM_NIBBLES = 8
_GROUPED = -1


@compiled()
def _copy_token(source_kind, kind, x, inputs, width, row):
    """A token as numbers of `kind`, with zeros up to the width."""
    for i in range(inputs):
        store(row, i, load(x, i, source_kind), kind)
    for i in range(inputs, width):
        store(row, i, _ZERO, kind)


@compiled(fastmath=REORDER)
def _largest_magnitude(source_kind, x, first, last):
    """The greatest |x| among first .. last - 1; NaN if one of them is not a finite number."""
    best, check = _ZERO, _ZERO
    for i in range(first, last):
        value = load(x, i, source_kind)
        best = larger(best, abs(value))
        check += value * _ZERO
    return best + check


@compiled()
def _round_block(source_kind, integer, x, first, last, inverse, row):
    """Elements first .. last - 1 times inverse, as whole numbers of the type of `integer`; returns their sum."""
    total = np.int32(0)
    for i in range(first, last):
        total += write_rounded(row, i, nearest(load(x, i, source_kind) * inverse), integer)
    return total


@compiled()
def _prepare_integers(source_kind, integer, largest, offset, x, inputs, width, block, row, scales):
    """A token as integers, and for each block a float32 scale and the int32 that undoes the weights' offset.

    With an offset of _GROUPED, the latter is a float32, the sum of the block's numbers with the opposite sign.
    """
    for number in range((width + block - 1) // block):
        first, last = number * block, min(width, (number + 1) * block)
        inside = max(first, min(last, inputs))
        best = _largest_magnitude(source_kind, x, first, inside)
        inverse = largest / best if best > _ZERO and best < np.inf else _ZERO
        total = _round_block(source_kind, integer, x, first, inside, inverse, row)
        for i in range(inside, last):
            write_rounded(row, i, _ZERO, integer)
        store(scales, 2 * number, best / largest, FLOAT32)
        if offset == _GROUPED:
            store(scales, 2 * number + 1, -np.float32(total) * (best / largest), FLOAT32)
        else:
            write_integer(scales, 2 * number + 1, -np.int64(total) * offset, 32)


@compiled()
def _tiles(kind, tokens, x, x_stride, packed, words, totals, scales, stride, ahead):
    """A block of a panel with the tokens, as many at a time as a tile has."""
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for index in range(passes):
        token = index * tokens // passes
        count = (index + 1) * tokens // passes - token
        to, scale = totals + token * TOTALS_BYTES, scales + token * stride
        multiply_panel(kind, count, x + token * x_stride, x_stride, packed, words, to, scale, stride, ahead)


@compiled()
def _multiply(
    kind, tokens, x, x_stride, packed, words, block, step_bytes, totals, scales, stride, unpacked_kind, unpacked, more
):
    """A panel with the tokens, block after block of its words; scales has stride bytes between tokens.

    Where `unpacked` is not 0, each block is put there first, as what its weights are multiplied as.
    """
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    fetches = 1 < passes <= PASSES_AHEAD
    for i in range(tokens * PANEL):
        store(totals, i, _ZERO, FLOAT32)
    for number in range((words + block - 1) // block):
        first = number * block
        inputs, at, count = x + first * 4, packed + first * step_bytes, min(block, words - first)
        following, of_block = at + block * step_bytes, scales + number * 8
        if unpacked != 0:
            unpack_panel(kind, at, count, unpacked)
            ahead = following - unpacked if fetches else 0
            _tiles(unpacked_kind, tokens, inputs, x_stride, unpacked, count, totals, of_block, stride, ahead)
        else:
            ahead = following - at if fetches else 0
            _tiles(kind, tokens, inputs, x_stride, at, count, totals, of_block, stride, ahead)


@compiled()
def _first_of(group, groups, tokens, rows):
    """The first token of a group of `rows`: groups overlap where tokens are not a multiple of their size."""
    return group * (tokens - rows) // max(1, groups - 1)


@compiled()
def _multiply_on_tiles(kind, tokens, rows, x, x_stride, packed, steps, block, totals):
    """A panel with the tokens on matrix tiles, in groups of `rows` tokens, whose sums follow each other in totals.

    A block of steps is multiplied with all groups before the next, so that its weights come from a near cache.
    """
    groups = (tokens + rows - 1) // rows
    of_group = rows * TOTALS_BYTES
    for first in range(0, steps, block):
        count, fresh = min(block, steps - first), 1 if first == 0 else 0
        inputs, at = x + first * VECTOR_BYTES, packed + first * STEP_BYTES
        for group in range(0, groups - 1, 2):
            one = inputs + _first_of(group, groups, tokens, rows) * x_stride
            two = inputs + _first_of(group + 1, groups, tokens, rows) * x_stride
            sums = totals + group * of_group
            for half in range(0, TOTALS_BYTES, TOTALS_BYTES // 2):
                multiply_two(kind, one, two, x_stride, at + half, count, sums + half, sums + of_group + half, fresh)
        if groups % 2:
            last = inputs + (tokens - rows) * x_stride
            multiply_one(kind, last, x_stride, at, count, totals + (groups - 1) * of_group, fresh)


@compiled(fastmath={"contract"})
def _finish(out_kind, tokens, count, totals, scales, bias, out, stride):
    """Sums, scaled and with the bias, to `count` outputs of each token, stride elements between tokens."""
    for token in range(tokens):
        for i in range(count):
            value = load(totals, token * PANEL + i, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            store(out, token * stride + i, value, out_kind)


@compiled(fastmath={"contract", "arcp"})
def _finish_gated(out_kind, tokens, count, totals, scales, bias, out, stride):
    """silu of the first half of a panel's sums, scaled and with the bias, times the second half."""
    half = PANEL // 2
    for token in range(tokens):
        for i in range(count):
            at = token * PANEL + i
            gate = load(totals, at, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            up = load(totals, at + half, FLOAT32) * load(scales, i + half, FLOAT32) + load(bias, i + half, FLOAT32)
            decay = exp_of_negative(-abs(gate))
            numerator = _ONE if gate >= _ZERO else decay
            store(out, token * stride + i, gate * numerator / (_ONE + decay) * up, out_kind)


@compiled()
def _reorder(x, order, inputs, size, out):
    for i in range(inputs):
        copy_element(x, read_int32(order, i), out, i, size)


PRODUCT = struct.Struct("31q")


@once_per_kind
def product_job(x_kind: Any, kind: Any) -> int:
    """x [tokens, inputs] of x_kind times packed weights of `kind`, to the same kind as x.

    Where they have groups, a word is a group of inputs, a step its bytes, and more arguments say where scales are.
    """
    layout, is_grouped = arithmetic_of(kind), type(kind) in map(type, GROUPED)
    multiply = multiply_grouped if is_grouped else _multiply
    prepared = layout.integer or kind is not x_kind or kind is FLOAT16
    integer = np.int8(0) if layout.inputs == 4 else np.int16(0)
    largest, is_integer = np.float32(np.iinfo(integer.dtype).max), layout.integer
    offset = _GROUPED if is_grouped else layout.offset
    word_bytes = 4 // layout.inputs  # of an input that is made ready
    unpacks, unpacked_kind = kind is INT4, INT8 if kind is INT4 else kind

    def product(a: int) -> None:
        threads, panels, tokens, chunks = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3)
        x, x_stride, x_size, inputs = arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7)
        rows, row_bytes, row_stride, width, block_inputs = arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12)
        packed, words, block, step_bytes, panel_bytes = arg(a, 13), arg(a, 14), arg(a, 15), arg(a, 16), arg(a, 17)
        row_scales, bias, out, features, gated = arg(a, 18), arg(a, 19), arg(a, 20), arg(a, 21), arg(a, 22)
        order = arg(a, 23)
        if prepared:
            ordered = take_memory(inputs * x_size) if order != 0 else 0
            token = take_ticket(tickets(a, 0))
            while token < tokens:
                source, row = x + token * x_stride * x_size, rows + token * row_stride
                if order != 0:
                    _reorder(source, order, inputs, x_size, ordered)
                    source = ordered
                if is_integer:
                    _prepare_integers(
                        x_kind, integer, largest, offset, source, inputs, width, block_inputs, row, row + row_bytes
                    )
                else:
                    _copy_token(x_kind, FLOAT32, source, inputs, width, row)
                take_ticket(tickets(a, 1))
                token = take_ticket(tickets(a, 0))
            if order != 0:
                give_back(ordered)
            while read_shared(tickets(a, 1)) < tokens:
                pause()
            source, source_stride = rows, row_stride
        else:
            source, source_stride = x, x_stride * x_size
        most = (tokens + chunks - 1) // chunks
        totals = take_memory(most * TOTALS_BYTES)
        each = PANEL // 2 if gated else PANEL
        unpacked = take_memory(block * PANEL * 4) if unpacks and most > _MOST_FROM_NIBBLES else 0
        item, end = take_share(tickets(a, 2), panels * chunks, threads)
        while item < panels * chunks:
            for number in range(item, end):
                panel, chunk = number // chunks, number % chunks
                first, last = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
                at = source + first * source_stride
                more = (
                    arg(a, 24), arg(a, 25), block_inputs * word_bytes, arg(a, 26) + panel * arg(a, 27),
                    arg(a, 28) + panel * arg(a, 29), arg(a, 30),
                )  # fmt: skip
                multiply(
                    kind, last - first, at, source_stride, packed + panel * panel_bytes, words, block, step_bytes,
                    totals, at + row_bytes, row_stride, unpacked_kind, unpacked, more,
                )  # fmt: skip
                to = out + (first * features + panel * each) * x_size
                count = min(each, features - panel * each)
                scales, addends = row_scales + panel * PANEL * 4, bias + panel * PANEL * 4
                if gated:
                    _finish_gated(x_kind, last - first, count, totals, scales, addends, to, features)
                else:
                    _finish(x_kind, last - first, count, totals, scales, addends, to, features)
            item, end = take_share(tickets(a, 2), panels * chunks, threads)
        give_back(totals)
        if unpacked != 0:
            give_back(unpacked)

    return job(product)


ON_TILES = struct.Struct("20q")


@once_per_kind
def tile_product_job() -> int:
    """As product_job of bfloat16, on matrix tiles, which are laid out for `rows` tokens; strides are in bytes."""
    kind = BFLOAT16

    def product(a: int) -> None:
        threads, panels, tokens, chunks = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3)
        x, x_stride, inputs, padded, row_stride = arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8)
        packed, steps, block, panel_bytes = arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12)
        row_scales, bias, out, features, gated = arg(a, 13), arg(a, 14), arg(a, 15), arg(a, 16), arg(a, 17)
        rows, layout = arg(a, 18), arg(a, 19)
        if padded != 0:
            token = take_ticket(tickets(a, 0))
            while token < tokens:
                _copy_token(
                    kind, kind, x + token * x_stride, inputs, steps * STEP_WORDS * 2, padded + token * row_stride
                )
                take_ticket(tickets(a, 1))
                token = take_ticket(tickets(a, 0))
            while read_shared(tickets(a, 1)) < tokens:
                pause()
            x, x_stride = padded, row_stride
        totals = take_memory(((tokens + chunks - 1) // chunks + TILE_ROWS) * TOTALS_BYTES)
        each = PANEL // 2 if gated else PANEL
        configure(layout)
        item, end = take_share(tickets(a, 2), panels * chunks, threads)
        while item < panels * chunks:
            for number in range(item, end):
                panel, chunk = number // chunks, number % chunks
                first, last = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
                of_panel = packed + panel * panel_bytes
                _multiply_on_tiles(
                    kind, last - first, rows, x + first * x_stride, x_stride, of_panel, steps, block, totals
                )
                count, groups = min(each, features - panel * each), (last - first + rows - 1) // rows
                scales, addends = row_scales + panel * PANEL * 4, bias + panel * PANEL * 4
                for group in range(groups):
                    token = first + _first_of(group, groups, last - first, rows)
                    sums, to = totals + group * rows * TOTALS_BYTES, out + (token * features + panel * each) * 2
                    if gated:
                        _finish_gated(kind, rows, count, sums, scales, addends, to, features)
                    else:
                        _finish(kind, rows, count, sums, scales, addends, to, features)
            item, end = take_share(tickets(a, 2), panels * chunks, threads)
        release()
        give_back(totals)

    return job(product)
