"""Paged attention on CPU, straight from the cache's blocks.

The unit of work is a tile: some query tokens of one sequence with all the query heads of one key/value head, so that
grouped-query attention reads each key once. A tile goes over its context in chunks of keys, keeping a running maximum
and sum (the online softmax of Milakov and Gimelshein, 2018). A long context with few query tokens is split, and its
parts merged by their maxima and sums, so that one sequence can occupy every thread.

Splits and chunks start at fixed positions of the context, and a tile that is not split joins the same parts in the same
order, so a result depends neither on what else is in the step nor on how many of a sequence's tokens are.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections import namedtuple
from typing import Any

import numpy as np

from headway.kernels.cpu_arithmetic import TILE_TOKENS, WIDE_INT8, arithmetic_of
from headway.kernels.cpu_attention_plan import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS, SPLIT
from headway.kernels.cpu_chunks import (
    ARRANGED,
    CHUNK,
    LATENT,
    arrange,
    arrange_latent,
    ask_for_all,
    close_line,
    copy_scales,
    find,
)
from headway.kernels.cpu_compile import compiled, give_back, take_memory
from headway.kernels.cpu_ir import LANES
from headway.kernels.cpu_rows import REORDER, exp_of_negative, soft_cap
from headway.kernels.cpu_simd import (
    FLOAT32,
    larger,
    load,
    nearest,
    pause,
    read_int32,
    read_int64,
    read_shared,
    store,
    take_ticket,
    write_rounded,
)
from headway.kernels.cpu_team import arg, job, once_per_kind, real_arg, tickets
from headway.kernels.cpu_tiles import PANELS_AT_ONCE, multiply_keys, multiply_values

_GROUP = PANELS_AT_ONCE * LANES  # keys of one call for scores, elements of one call for values
_PANELS = CHUNK // LANES
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(32767)
_WIDE = np.int16(0)


@compiled(fastmath=REORDER)
def _softmax_row(scores, low, high, scale, maximum):
    """Turn scores low .. high - 1 into exp(score * scale - maximum); (new maximum, sum)."""
    best = _MASKED
    for j in range(low, high):
        best = larger(best, load(scores, j, FLOAT32))
    best = larger(maximum, best * scale)
    total = _ZERO
    for j in range(low, high):
        weight = exp_of_negative(load(scores, j, FLOAT32) * scale - best)
        total += weight
        store(scores, j, weight, FLOAT32)
    return best, total


@compiled(fastmath=REORDER)
def _scale_row(scores, count, factor, scales):
    """int32 scores of quantised queries and keys to float32, in place."""
    for j in range(count):
        value = np.float32(read_int32(scores, j)) * factor
        store(scores, j, value * load(scales, j, FLOAT32), FLOAT32)


@compiled(fastmath=REORDER)
def _cap_row(scores, count, scale, cap):
    """Scores times the scale with a soft cap, in place."""
    for j in range(count):
        store(scores, j, soft_cap(load(scores, j, FLOAT32) * scale, cap), FLOAT32)


@compiled(fastmath=REORDER)
def _round_weights(weights, scales, low, high, padded, target):
    """Weights times the scales of their values, as int16; returns the scale of the result."""
    best = _ZERO
    for j in range(low, high):
        best = larger(best, load(weights, j, FLOAT32) * load(scales, j, FLOAT32))
    factor = _LARGEST / best if best > _ZERO else _ZERO
    for j in range(low):
        write_rounded(target, j, _ZERO, _WIDE)
    for j in range(low, high):
        write_rounded(target, j, nearest(load(weights, j, FLOAT32) * load(scales, j, FLOAT32) * factor), _WIDE)
    for j in range(high, padded):
        write_rounded(target, j, _ZERO, _WIDE)
    return best / _LARGEST


@compiled()
def _copy_weights(weights, low, high, padded, target, kind):
    for j in range(low):
        store(target, j, _ZERO, kind)
    for j in range(low, high):
        store(target, j, load(weights, j, FLOAT32), kind)
    for j in range(high, padded):
        store(target, j, _ZERO, kind)


@compiled()
def _prepare_query(kind, x_kind, integer, query, source, width, row):
    """A query as it is multiplied with keys; returns its scale."""
    if not integer:
        for d in range(width):
            store(row, d, load(query, source + d, kind), x_kind)
        return _ONE
    best = _ZERO
    for d in range(width):
        best = larger(best, abs(load(query, source + d, kind)))
    factor = _LARGEST / best if best > _ZERO else _ZERO
    for d in range(width):
        write_rounded(row, d, nearest(load(query, source + d, kind) * factor), _WIDE)
    return best / _LARGEST


@compiled()
def _products_of_keys(cache_kind, rows, queries, query_bytes, panels, following, count, words, scores):
    passes = (rows + TILE_TOKENS - 1) // TILE_TOKENS
    for group in range((count + _GROUP - 1) // _GROUP):
        for index in range(passes):
            row = index * rows // passes
            multiply_keys(
                cache_kind, (index + 1) * rows // passes - row, queries + row * query_bytes, query_bytes,
                panels + group * PANELS_AT_ONCE * 8, following + group * PANELS_AT_ONCE * 8, words,
                scores + (row * CHUNK + group * _GROUP) * 4, CHUNK * 4,
            )  # fmt: skip


@compiled()
def _products_of_values(
    cache_kind, rows, weights, weight_bytes, lines, following, lane_bytes, count, width, out, out_stride
):
    passes = (rows + TILE_TOKENS - 1) // TILE_TOKENS
    for element in range(0, width, _GROUP):
        for index in range(passes):
            row = index * rows // passes
            multiply_values(
                cache_kind, (index + 1) * rows // passes - row, weights + row * weight_bytes, weight_bytes, lines,
                following, element * lane_bytes, (width - element + LANES - 1) // LANES - 1, count,
                out + (row * out_stride + element) * 4, out_stride * 4,
            )  # fmt: skip


@compiled(fastmath=REORDER)
def _rescale(out, width, factor):
    for d in range(width):
        store(out, d, load(out, d, FLOAT32) * factor, FLOAT32)


@compiled(fastmath=REORDER)
def _add_scaled(out, sums, width, factor):
    """out += int32 sums times a factor."""
    for d in range(width):
        store(out, d, load(out, d, FLOAT32) + np.float32(read_int32(sums, d)) * factor, FLOAT32)


@compiled(fastmath=REORDER)
def _join(out, part, width, decay, part_decay):
    """out = out times its decay + a part's times its own."""
    for d in range(width):
        value = load(out, d, FLOAT32) * decay + load(part, d, FLOAT32) * part_decay
        store(out, d, value, FLOAT32)


@compiled()
def _join_row(out, part, width, maximum, total, part_maximum, part_total):
    """The result of a row with one more part of its context; (maximum, sum) of both."""
    best = larger(maximum, part_maximum)
    decay, part_decay = exp_of_negative(maximum - best), exp_of_negative(part_maximum - best)
    _join(out, part, width, decay, part_decay)
    return best, total * decay + part_total * part_decay


@compiled()
def _close_part(rows, width, out_width, is_first, room):
    """Add what a tile has of a part of its context to what it has of those before, and begin the next."""
    for row in range(rows):
        whole, part = room.whole + row * out_width * 4, room.out + row * out_width * 4
        maximum, total = load(room.maxima, row, FLOAT32), load(room.sums, row, FLOAT32)
        if is_first:
            for d in range(width):
                store(whole, d, load(part, d, FLOAT32), FLOAT32)
        else:
            maximum, total = _join_row(
                whole, part, width, load(room.whole_maxima, row, FLOAT32), load(room.whole_sums, row, FLOAT32),
                maximum, total,
            )  # fmt: skip
        store(room.whole_maxima, row, maximum, FLOAT32)
        store(room.whole_sums, row, total, FLOAT32)
        store(room.maxima, row, _MASKED, FLOAT32)
        store(room.sums, row, _ZERO, FLOAT32)
        for d in range(out_width):
            store(part, d, _ZERO, FLOAT32)


@compiled()
def _take_whole(rows, width, out_width, room):
    """All parts together as the tile's result."""
    for row in range(rows):
        whole, out = room.whole + row * out_width * 4, room.out + row * out_width * 4
        for d in range(width):
            store(out, d, load(whole, d, FLOAT32), FLOAT32)
        store(room.maxima, row, load(room.whole_maxima, row, FLOAT32), FLOAT32)
        store(room.sums, row, load(room.whole_sums, row, FLOAT32), FLOAT32)


@compiled()
def _begin(kind, x_kind, integer, geometry, width, out_width, item, head, query, sinks, room):
    """Lay out a tile's queries and clear its results; a sink is a key without a value, before all others."""
    heads, kv_heads, query_stride, _, _ = geometry
    group = heads // kv_heads
    for row in range(item[2] * group):
        source = (item[1] + row // group) * query_stride + (head * group + row % group) * width
        to = room.queries + row * room.query_bytes
        store(room.factors, row, _prepare_query(kind, x_kind, integer, query, source, width, to), FLOAT32)
        has_sink = sinks != 0 and item[4] == 0
        sink = load(sinks, head * group + row % group, FLOAT32) if has_sink else _MASKED
        store(room.maxima, row, sink, FLOAT32)
        store(room.sums, row, _ONE if has_sink else _ZERO, FLOAT32)
        for d in range(out_width):
            store(room.out, row * out_width + d, _ZERO, FLOAT32)


@compiled()
def _softmax(x_kind, integer, item, group, window, key, count, padded, scale, cap, width, out_width, scales, room):
    """Turn the scores of one chunk into weights, and rescale what the earlier chunks have left in out."""
    for row in range(item[2] * group):
        own = item[3] + row // group
        high = min(count, own + 1 - key)
        low = max(0, own - window + 1 - key) if window > 0 else 0
        scores, weights = room.scores + row * CHUNK * 4, room.weights + row * room.weight_bytes
        if high <= low:
            low = high = 0
        else:
            if integer:
                _scale_row(scores, count, load(room.factors, row, FLOAT32), scales)
            before = load(room.maxima, row, FLOAT32)
            if cap > _ZERO:
                _cap_row(scores, count, scale, cap)
            best, total = _softmax_row(scores, low, high, _ONE if cap > _ZERO else scale, before)
            decay = exp_of_negative(before - best)
            store(room.sums, row, load(room.sums, row, FLOAT32) * decay + total, FLOAT32)
            store(room.maxima, row, best, FLOAT32)
            if decay != _ONE:
                _rescale(room.out + row * out_width * 4, width, decay)
        if integer:
            factor = _round_weights(scores, scales + CHUNK * 4, low, high, padded, weights)
            store(room.weight_factors, row, factor, FLOAT32)
        else:
            _copy_weights(scores, low, high, padded, weights, x_kind)


@compiled()
def _attend(
    kind, x_kind, cache_kind, integer, geometry, layout, item, head, query, sinks, cache, tables, scale, cap, room
):
    """Leave the unnormalised result of one tile in the room's out, and its maxima and sums."""
    heads, kv_heads, _, table_stride, window = geometry
    arranged, inputs, width, _, size, value_width = layout
    group, table = heads // kv_heads, tables + item[0] * table_stride * 4
    rows, words = item[2] * group, (width + inputs - 1) // inputs
    out_width = (value_width + _GROUP - 1) // _GROUP * _GROUP
    _begin(kind, x_kind, integer, geometry, width, out_width, item, head, query, sinks, room)
    first, end = item[4], min(item[5], item[3] + item[2])
    if window > 0:
        first = max(first, (item[3] - window + 1) // CHUNK * CHUNK)
    panels, lines, scales = room.panels, room.lines, room.scales
    if arranged == ARRANGED:
        find(layout, table, first, min(CHUNK, end - first), kv_heads, head, cache, panels, lines)
        ask_for_all(layout, min(CHUNK, end - first), panels, lines)
    part = opened = item[4] // SPLIT
    for key in range(first, end, CHUNK):
        if key // SPLIT != part:
            _close_part(rows, value_width, out_width, part == opened, room)
            part = key // SPLIT
        count = min(CHUNK, end - key)
        next_panels, next_lines = panels, lines
        if arranged == LATENT:
            arrange_latent(layout, table, key, count, cache[0], room)
        elif arranged != ARRANGED:
            arrange(layout, table, key, count, kv_heads, head, cache, room)
        else:
            if integer:
                copy_scales(layout[3], table, key, count, kv_heads, head, cache, scales)
            if key + CHUNK < end:
                next_panels = 2 * room.panels + 8 * _PANELS - panels
                next_lines = 2 * room.lines + 8 * CHUNK - lines
                left = min(CHUNK, end - key - CHUNK)
                find(layout, table, key + CHUNK, left, kv_heads, head, cache, next_panels, next_lines)
        if count % inputs:
            close_line(lines, count, inputs, value_width, size, room.line_room)
        _products_of_keys(
            cache_kind, rows, room.queries, room.query_bytes, panels, next_panels, count, words, room.scores
        )
        used = (count + inputs - 1) // inputs
        _softmax(
            x_kind, integer, item, group, window, key, count, used * inputs, scale, cap, value_width, out_width, scales,
            room,
        )  # fmt: skip
        target = room.chunk_out if integer else room.out
        following = next_lines if key + 2 * CHUNK <= end else lines
        _products_of_values(
            cache_kind, rows, room.weights, room.weight_bytes, lines, following, inputs * size, used, value_width,
            target, out_width,
        )  # fmt: skip
        if integer:
            for row in range(rows):
                place = row * out_width * 4
                _add_scaled(room.out + place, target + place, value_width, load(room.weight_factors, row, FLOAT32))
        panels, lines = next_panels, next_lines
    if part != opened:
        _close_part(rows, value_width, out_width, False, room)
        _take_whole(rows, value_width, out_width, room)


@compiled()
def _finish(kind, geometry, width, item, head, room, out, partial_out, partial_sums):
    """Write a tile's result, or, if it is a part of a split, its unnormalised values, maximum and sum."""
    heads, partial = geometry[0], item[6]
    group = heads // geometry[1]
    out_width = (width + _GROUP - 1) // _GROUP * _GROUP
    for row in range(item[2] * group):
        query_head = head * group + row % group
        source = room.out + row * out_width * 4
        if partial < 0:
            target = ((item[1] + row // group) * heads + query_head) * width
            factor = _ONE / load(room.sums, row, FLOAT32)
            for d in range(width):
                store(out, target + d, load(source, d, FLOAT32) * factor, kind)
        else:
            place = (partial + row // group) * heads + query_head
            for d in range(width):
                store(partial_out, place * width + d, load(source, d, FLOAT32), FLOAT32)
            store(partial_sums, 2 * place, load(room.maxima, row, FLOAT32), FLOAT32)
            store(partial_sums, 2 * place + 1, load(room.sums, row, FLOAT32), FLOAT32)


@compiled()
def _merge(kind, merge, head, heads, width, out, partial_out, partial_sums):
    """Join the parts of a split context, in the order in which a tile that is not split does."""
    token, first, parts, stride = merge
    into = first * heads + head
    best, total = load(partial_sums, 2 * into, FLOAT32), load(partial_sums, 2 * into + 1, FLOAT32)
    for part in range(1, parts):
        place = (first + part * stride) * heads + head
        best, total = _join_row(
            partial_out + into * width * 4, partial_out + place * width * 4, width, best, total,
            load(partial_sums, 2 * place, FLOAT32), load(partial_sums, 2 * place + 1, FLOAT32),
        )  # fmt: skip
    factor = _ONE / total
    for d in range(width):
        store(out, (token * heads + head) * width + d, load(partial_out, into * width + d, FLOAT32) * factor, kind)


# The thread's own memory: addresses, and the bytes of a row of queries and of weights.
_Room = namedtuple(
    "_Room",
    "queries query_bytes scores weights weight_bytes weight_factors out chunk_out maxima sums factors scales key_room"
    " value_room line_room panels lines whole whole_maxima whole_sums",
)


@compiled()
def _room(memory, rows, width, value_width, inputs, size):
    """Cut a thread's memory, whose size _room_bytes tells, into the parts of a _Room."""
    out_width = (value_width + _GROUP - 1) // _GROUP * _GROUP
    line = out_width * inputs * size
    query_bytes, weight_bytes = (width + inputs - 1) // inputs * 4, CHUNK // inputs * 4
    scores = memory
    weights = scores + rows * CHUNK * 4
    out = weights + rows * weight_bytes
    chunk_out = out + rows * out_width * 4
    key_room = chunk_out + rows * out_width * 4
    value_room = key_room + CHUNK * width * size
    line_room = value_room + CHUNK * out_width * size
    panels = line_room + line
    lines = panels + 2 * 8 * _PANELS
    scales = lines + 2 * 8 * CHUNK
    weight_factors = scales + 2 * 4 * CHUNK
    maxima = weight_factors + 4 * rows
    sums = maxima + 4 * rows
    factors = sums + 4 * rows
    whole_maxima = factors + 4 * rows
    whole_sums = whole_maxima + 4 * rows
    whole = whole_sums + 4 * rows
    queries = whole + rows * out_width * 4
    return _Room(
        queries, query_bytes, scores, weights, weight_bytes, weight_factors, out, chunk_out, maxima, sums, factors,
        scales, key_room, value_room, line_room, panels, lines, whole, whole_maxima, whole_sums,
    )  # fmt: skip


@compiled()
def _room_bytes(rows, width):
    """Enough for the parts of a _Room of any kind."""
    out_width = (width + _GROUP - 1) // _GROUP * _GROUP
    of_row = CHUNK * 8 + out_width * 12 + width * 4 + 40
    return rows * of_row + CHUNK * (width + out_width + 8) * 4 + out_width * 4 + CHUNK * 32 + 1024


# The plan, eleven numbers of the geometry, ten addresses, then the scale and the soft cap, 0 for none.
ATTEND = struct.Struct("22q2d")


@once_per_kind
def attend_job(kind: Any, cache_kind: Any) -> int:
    """Every tile of a plan, then its merges; queries and results of `kind` over a cache of cache_kind."""
    integer = cache_kind is WIDE_INT8
    x_kind = kind if arithmetic_of(cache_kind).inputs == 2 and not integer else FLOAT32

    def attend(a: int) -> None:
        plan = arg(a, 0)
        geometry = (arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5))
        layout = (arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11))
        query, tables = arg(a, 12), arg(a, 13)
        cache = (arg(a, 14), arg(a, 15), arg(a, 16), arg(a, 17))
        out, partial_out, partial_sums, sinks = arg(a, 18), arg(a, 19), arg(a, 20), arg(a, 21)
        scale, cap = np.float32(real_arg(a, 22)), np.float32(real_arg(a, 23))
        count, most_rows, merges = read_int64(plan, 0), read_int64(plan, 1), read_int64(plan, 2)
        kv_heads, width, value_width = geometry[1], layout[2], layout[5]
        tiles, items = count * kv_heads, plan + HEADER_WORDS * 8
        ticket = take_ticket(tickets(a, 0))
        if ticket < tiles:
            memory = take_memory(_room_bytes(most_rows, width))
            room = _room(memory, most_rows, width, value_width, layout[1], layout[4])
            while ticket < tiles:
                row, head = items + ticket // kv_heads * ITEM_WORDS * 8, ticket % kv_heads
                item = (
                    read_int64(row, 0), read_int64(row, 1), read_int64(row, 2), read_int64(row, 3),
                    read_int64(row, 4), read_int64(row, 5), read_int64(row, 6),
                )  # fmt: skip
                _attend(
                    kind, x_kind, cache_kind, integer, geometry, layout, item, head, query, sinks, cache, tables, scale,
                    cap, room,
                )  # fmt: skip
                _finish(kind, geometry, value_width, item, head, room, out, partial_out, partial_sums)
                take_ticket(tickets(a, 1))
                ticket = take_ticket(tickets(a, 0))
            give_back(memory)
        if merges > 0:
            while read_shared(tickets(a, 1)) < tiles:
                pause()
            heads, joins = geometry[0], items + count * ITEM_WORDS * 8
            ticket = take_ticket(tickets(a, 2))
            while ticket < merges * kv_heads:
                row = joins + ticket // kv_heads * MERGE_WORDS * 8
                merge = (read_int64(row, 0), read_int64(row, 1), read_int64(row, 2), read_int64(row, 3))
                first = ticket % kv_heads * (heads // kv_heads)
                for head in range(first, first + heads // kv_heads):
                    _merge(kind, merge, head, heads, value_width, out, partial_out, partial_sums)
                ticket = take_ticket(tickets(a, 2))

    return job(attend)
