"""The compiled code of linear layers on CPU: tokens made ready, panels multiplied, sums turned into results.

A thread takes some panels and reads each straight through while it is multiplied with the tokens: with vectors
TILE_TOKENS at a time and a block of inputs at a time, so that what several groups of tokens need comes from memory
once; or, where there are any, on matrix tiles.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu.arithmetic import (
    GROUPED,
    INT4,
    INT8,
    MOST_STRAIGHT,
    PANEL,
    TILE_TOKENS,
    WIDENED,
    arithmetic_of,
)
from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.expert_plan import item_of, pieces_of, row_of, rows_of
from headway.kernels.cpu.groups import HEADER_BYTES, PASSES_AHEAD, multiply_grouped
from headway.kernels.cpu.ir import VECTOR_BYTES
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_share, tickets
from headway.kernels.cpu.matrix import (
    SPLIT,
    STEP_WORDS,
    TILE_ROWS,
    configure,
    first_of,
    multiply_one,
    multiply_two,
    release,
)
from headway.kernels.cpu.panels import TOTALS_BYTES, add_scaled, multiply_panel, unpack_panel
from headway.kernels.cpu.planes import multiply_planes, plane_bytes, split_token
from headway.kernels.cpu.rows import REORDER, exp_of_negative
from headway.kernels.cpu.simd import (
    BFLOAT16,
    FLOAT32,
    call_address,
    call_with,
    copy_element,
    larger,
    load,
    nearest,
    pause,
    read_int32,
    read_int64,
    read_shared,
    store,
    take_ticket,
    write_integer,
    write_rounded,
)

_ZERO, _ONE = np.float32(0), np.float32(1)
# For up to so many tokens, every tile unpacks 4-bit weights in registers; for more, they are unpacked once for all.
MOST_FROM_NIBBLES = 8
_GROUPED, _NEVER = -1, 1 << 62
# A value in place of a gate's address. It says that there is no gate, and that results are float32.
WIDE = 1
# What stands first at the address of a product's adapters: code that makes A's products, and that finishes with B's.
LOWER, RAISE = range(2)
FEATURE_BITS = 32  # of the number of outputs; above them stands how far apart rows of outputs are


@compiled()
def copy_token(source_kind, kind, x, inputs, width, row):
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
    """A block of a panel with the tokens, as many at a time as a tile has; the next is `ahead` bytes on, 0 for none."""
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for index in range(passes):
        token = index * tokens // passes
        count = (index + 1) * tokens // passes - token
        to, scale = totals + token * TOTALS_BYTES, scales + token * stride
        fetched = ahead if index < PASSES_AHEAD else 0
        multiply_panel(kind, count, x + token * x_stride, x_stride, packed, words, to, scale, stride, fetched)


@compiled()
def multiply(
    kind, tokens, x, x_stride, packed, words, block, step_bytes, totals, scales, stride, unpacked_kind, unpacked
):
    """A panel with the tokens, block after block of its words; scales has stride bytes between tokens.

    Where `unpacked` is not 0, each block is put there first, as what its weights are multiplied as.
    """
    fetches = tokens > MOST_STRAIGHT
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
def _add_block(rows, sums, totals, scales, stride):
    for row in range(rows):
        add_scaled(sums + row * TOTALS_BYTES, totals + row * TOTALS_BYTES, scales + row * stride)


@compiled()
def multiply_on_tiles(
    kind, tile_kind, tokens, rows, x, x_stride, packed, words, block, step_bytes, totals, scales, stride, unpacked, sums
):
    """Multiply on matrix tiles, in groups of `rows` tokens, whose sums follow each other in totals.

    A block of words is multiplied with all groups before the next, so that its weights come from a near cache. Where
    `sums` is not 0, it is room for those of two groups, int32, which are scaled block by block.
    """
    groups = (tokens + rows - 1) // rows
    of_group = rows * TOTALS_BYTES
    if sums != 0:
        for i in range(groups * rows * PANEL):
            store(totals, i, _ZERO, FLOAT32)
    for first in range(0, words, block):
        inputs, at, steps = x + first * 4, packed + first * step_bytes, min(block, words - first) // STEP_WORDS
        of_block, fresh = scales + first // block * 8, 1 if sums != 0 or first == 0 else 0
        if unpacked != 0:
            unpack_panel(kind, at, steps * STEP_WORDS, unpacked)
            at = unpacked
        for group in range(0, groups - 1, 2):
            one, two = first_of(group, groups, tokens, rows), first_of(group + 1, groups, tokens, rows)
            to = totals + group * of_group
            out = to if sums == 0 else sums
            for half in range(0, TOTALS_BYTES, TOTALS_BYTES // 2):
                multiply_two(
                    tile_kind, inputs + one * x_stride, inputs + two * x_stride, x_stride, at + half, steps, out + half,
                    out + of_group + half, fresh,
                )  # fmt: skip
            if sums != 0:
                _add_block(rows, sums, to, of_block + one * stride, stride)
                _add_block(rows, sums + of_group, to + of_group, of_block + two * stride, stride)
        if groups % 2:
            last, to = tokens - rows, totals + (groups - 1) * of_group
            multiply_one(tile_kind, inputs + last * x_stride, x_stride, at, steps, to if sums == 0 else sums, fresh)
            if sums != 0:
                _add_block(rows, sums, to, of_block + last * stride, stride)


@compiled(fastmath={"contract"})
def finish_plain(out_kind, tokens, count, totals, scales, bias, out, stride):
    """Sums, scaled and with the bias, to `count` outputs of each token, stride elements between tokens."""
    for token in range(tokens):
        for i in range(count):
            value = load(totals, token * PANEL + i, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            store(out, token * stride + i, value, out_kind)


@compiled(fastmath={"contract", "arcp"})
def finish_gated(out_kind, tokens, count, totals, scales, bias, out, stride, gate_numbers):
    """The first half of a panel's sums, scaled and with the bias, as the gate of the second half; see Gate."""
    half = PANEL // 2
    slope, cubic = load(gate_numbers, 0, FLOAT32), load(gate_numbers, 1, FLOAT32)
    limit, shift = load(gate_numbers, 2, FLOAT32), load(gate_numbers, 3, FLOAT32)
    for token in range(tokens):
        for i in range(count):
            at = token * PANEL + i
            gate = load(totals, at, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            up = load(totals, at + half, FLOAT32) * load(scales, i + half, FLOAT32) + load(bias, i + half, FLOAT32)
            gate = limit if gate > limit else gate  # a NaN stays one
            up = limit if up > limit else -limit if up < -limit else up
            bent = gate * (slope + cubic * gate * gate)
            decay = exp_of_negative(-abs(bent))
            numerator = _ONE if bent >= _ZERO else decay
            store(out, token * stride + i, gate * numerator / (_ONE + decay) * (up + shift), out_kind)


@compiled()
def finish(a, out_kind, size, tokens, totals, panel, row, scales, bias):
    """A panel's sums of some tokens, scaled and with the bias, to its columns of out, in the rows from `row` on.

    A number of out [rows, features] has `size` bytes, or 4 where it is WIDE.
    """
    out, gate = arg(a, 19), arg(a, 21)
    features, stride = arg(a, 20) & (1 << FEATURE_BITS) - 1, arg(a, 20) >> FEATURE_BITS
    is_wide = gate == WIDE
    each = PANEL // 2 if gate != 0 and not is_wide else PANEL
    to = out + (row * stride + panel * each) * (4 if is_wide else size)
    count = min(each, features - panel * each)
    if is_wide:
        finish_plain(FLOAT32, tokens, count, totals, scales, bias, to, stride)
    elif gate != 0:
        finish_gated(out_kind, tokens, count, totals, scales, bias, to, stride, gate)
    else:
        finish_plain(out_kind, tokens, count, totals, scales, bias, to, stride)


@compiled()
def _finish(a, out_kind, size, tokens, totals, panel, of_all, row):
    """Do so with the panel's own scales, or leave it to adapters; of_all is its number among those of all experts."""
    beside, of_panel = arg(a, 32), of_all * PANEL * 4
    if beside != 0:
        call_with(read_int64(beside, RAISE), a, tokens, totals, of_all, row)
    else:
        finish(a, out_kind, size, tokens, totals, panel, row, arg(a, 17) + of_panel, arg(a, 18) + of_panel)


@compiled()
def _reorder(x, order, inputs, size, out):
    for i in range(inputs):
        copy_element(x, read_int32(order, i), out, i, size)


@compiled()
def _make_ready(a, x_kind, x_size, copied, is_integer, integer, largest, offset, split_kind):
    """The rows of a plan as what panels are multiplied with, by all threads; returns when the last one is there."""
    tokens, x, x_stride, inputs, order = arg(a, 2), arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7)
    rows, row_bytes, row_stride, width, block_inputs = arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12)
    plan, gathers = arg(a, 22), arg(a, 23)
    tokens = rows_of(plan, tokens)
    ordered = take_memory(inputs * x_size) if order != 0 else 0
    row = take_ticket(tickets(a, 0))
    while row < tokens:
        number, expert = row_of(plan, gathers, row)
        source, to = x + number * x_stride * x_size, rows + row * row_stride
        if order != 0:
            _reorder(source, order + expert * inputs * 4, inputs, x_size, ordered)
            source = ordered
        if is_integer:
            _prepare_integers(x_kind, integer, largest, offset, source, inputs, width, block_inputs, to, to + row_bytes)
            split_token(split_kind, to, width, row_stride)
        else:
            copy_token(x_kind, copied, source, inputs, width, to)
        take_ticket(tickets(a, 1))
        row = take_ticket(tickets(a, 0))
    if order != 0:
        give_back(ordered)
    while read_shared(tickets(a, 1)) < tokens:
        pause()


@compiled()
def _on_tiles(a, kind, tile_kind, of_all, count, rows, x, x_stride, totals, room, sums):
    """The sums of a panel with `count` rows, in groups of `rows`, for which tiles are laid out."""
    words, block, step_bytes = arg(a, 14), arg(a, 15), arg(a, 16)
    multiply_on_tiles(
        kind, tile_kind, count, rows, x, x_stride, arg(a, 13) + of_all * words * step_bytes, words, block, step_bytes,
        totals, x + arg(a, 9), arg(a, 10), room, sums,
    )  # fmt: skip


@compiled()
def _planes_on_tiles(a, kind, header, of_all, count, rows, x, totals, room, sums):
    """Do as _on_tiles for kinds of SPLIT. Without headers, blocks that share an activation scale are the groups."""
    inputs, size, step_bytes, stride = arg(a, 11), arg(a, 12), arg(a, 16), arg(a, 10)
    together, group_bytes = (arg(a, 15), step_bytes) if header != 0 else (1, size * PANEL)
    more = arg(a, 25), arg(a, 26) + of_all * arg(a, 27), arg(a, 28) + of_all * arg(a, 29), arg(a, 30)
    plane = plane_bytes(inputs)
    multiply_planes(
        kind, count, rows, x + stride - 2 * plane, stride, plane,
        arg(a, 13) + of_all * arg(a, 14) * step_bytes, inputs, size, together, group_bytes, header, totals,
        x + arg(a, 9), stride, room, sums, more,
    )  # fmt: skip


@compiled()
def _on_vectors(a, kind, unpacked_kind, of_all, count, x, x_stride, totals, room):
    """The sums of a panel with `count` rows."""
    words, block, step_bytes = arg(a, 14), arg(a, 15), arg(a, 16)
    packed, unpacked = arg(a, 13) + of_all * words * step_bytes, room if count > MOST_FROM_NIBBLES else 0
    multiply(
        kind, count, x, x_stride, packed, words, block, step_bytes, totals, x + arg(a, 9), arg(a, 10), unpacked_kind,
        unpacked,
    )  # fmt: skip


@compiled()
def _groups_on_vectors(a, kind, word_bytes, of_all, count, x, x_stride, totals):
    """Do the same as _on_vectors for a weight with groups of inputs. A prepared input has word_bytes."""
    words, block, step_bytes = arg(a, 14), arg(a, 15), arg(a, 16)
    more = (
        arg(a, 24), arg(a, 25), arg(a, 12) * word_bytes, arg(a, 26) + of_all * arg(a, 27),
        arg(a, 28) + of_all * arg(a, 29), arg(a, 30),
    )  # fmt: skip
    multiply_grouped(
        kind, count, x, x_stride, arg(a, 13) + of_all * words * step_bytes, words, block, step_bytes, totals,
        x + arg(a, 9), arg(a, 10), more,
    )  # fmt: skip


PRODUCT = struct.Struct("34q")


@once_per_kind
def product_job(x_kind: Any, kind: Any, on_tiles: bool = False) -> int:
    """x [tokens, inputs] of x_kind times packed weights of `kind`, to the same kind as x; or wide, to float32.

    Where they have groups, a word is a group of inputs, a step its bytes, and more arguments say where scales are. On
    tiles are pieces of as many tokens and more as cpu_matrix's configurations say, whose address is an argument:
    their rows are cut evenly into as few groups as there may be, all of one size, for which tiles are laid out. A plan
    says which rows of x go to which expert, whose panels follow each other; with `rows` they are made ready there. The
    last two arguments are the address of adapters, or 0, and that of room for them; see cpu.adapters.
    """
    layout, is_grouped = arithmetic_of(kind), type(kind) in map(type, GROUPED)
    copied = BFLOAT16 if kind is WIDENED or kind is BFLOAT16 else FLOAT32
    x_size = 4 if x_kind is FLOAT32 else 2
    integer = np.int8(0) if layout.inputs == 4 else np.int16(0)
    largest, is_integer = np.float32(np.iinfo(integer.dtype).max), layout.integer
    offset = _GROUPED if is_grouped else layout.offset
    word_bytes = 4 // layout.inputs  # bytes of a prepared input
    unpacks, unpacked_kind = kind is INT4, INT8 if kind is INT4 else kind
    on_vectors = is_integer or not on_tiles  # sums of floats differ there, so that they never are on both
    splits = on_tiles and type(kind) in map(type, SPLIT)
    split_kind, header = (kind if splits else FLOAT32), (HEADER_BYTES * PANEL if is_grouped else 0)

    def product(a: int) -> None:
        threads, panels, tokens, block, plan = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 15), arg(a, 22)
        x, x_stride = arg(a, 4), arg(a, 5) * x_size
        if arg(a, 32) != 0:
            call_address(read_int64(arg(a, 32), LOWER), a)
        if arg(a, 8) != 0:
            _make_ready(a, x_kind, x_size, copied, is_integer, integer, largest, offset, split_kind)
            x, x_stride = arg(a, 8), arg(a, 10)
        pieces, most = pieces_of(plan, arg(a, 3), tokens)
        totals = take_memory((most + TILE_ROWS) * TOTALS_BYTES)
        room = take_memory(block * PANEL * 4) if unpacks and (on_tiles or most > MOST_FROM_NIBBLES) else 0
        if splits:
            room = take_memory((block * arg(a, 12) if is_grouped else arg(a, 12)) * PANEL)
        sums = take_memory(2 * TILE_ROWS * TOTALS_BYTES) if on_tiles and is_integer else 0
        least, laid_out = read_int64(arg(a, 31), 0) if on_tiles else _NEVER, 0
        item, end = take_share(tickets(a, 2), panels * pieces, threads)
        while item < panels * pieces:
            for number in range(item, end):
                panel, of_all, first, last = item_of(plan, number, panels, pieces, tokens)
                at, count = x + first * x_stride, last - first
                if on_tiles:  # noqa: SIM102  Numba leaves out what a constant alone guards
                    if count >= least:
                        groups = (count + TILE_ROWS - 1) // TILE_ROWS
                        rows = (count + groups - 1) // groups
                        if rows != laid_out:
                            configure(arg(a, 31) + rows * VECTOR_BYTES)
                            laid_out = rows
                        if splits:
                            _planes_on_tiles(a, kind, header, of_all, count, rows, at, totals, room, sums)
                        else:
                            _on_tiles(a, kind, unpacked_kind, of_all, count, rows, at, x_stride, totals, room, sums)
                        for group in range(groups):
                            row, to = first + first_of(group, groups, count, rows), totals + group * rows * TOTALS_BYTES
                            _finish(a, x_kind, x_size, rows, to, panel, of_all, row)
                if on_vectors:  # noqa: SIM102
                    if count < least:
                        if is_grouped:  # a choice made outside would be another function for Numba in every process
                            _groups_on_vectors(a, kind, word_bytes, of_all, count, at, x_stride, totals)
                        else:
                            _on_vectors(
                                a, kind, unpacked_kind, of_all, count, at, x_stride, totals, room if unpacks else 0
                            )
                        _finish(a, x_kind, x_size, count, totals, panel, of_all, first)
            item, end = take_share(tickets(a, 2), panels * pieces, threads)
        if on_tiles:
            release()
        give_back(totals)
        if room != 0:
            give_back(room)
        if sums != 0:
            give_back(sums)

    return job(product)
