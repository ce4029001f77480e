"""Paged attention on CPU, straight from the cache's blocks.

The unit of work is a tile: some query tokens of one sequence with all the query heads of one key/value head, so that
grouped-query attention reads each key once. A tile goes over its context in chunks of keys, keeping a running maximum
and sum (the online softmax of Milakov and Gimelshein, 2018). A long context with few query tokens is split, and its
parts merged by their maxima and sums, so that one sequence can occupy every thread. A part that several sequences have
in common is a tile with the queries of all (cascade attention; Ye et al., 2024).

Splits and chunks start at fixed positions of the context, and a tile that is not split joins the same parts in the same
order, so a result depends neither on what else is in the step nor on how many of a sequence's tokens are.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu.arithmetic import FLOAT8, FLOAT8_UNIT, TILE_TOKENS, WIDE_INT8, arithmetic_of
from headway.kernels.cpu.attention_plan import HEADER_WORDS, ITEM_WORDS, MERGE_WORDS, SPLIT
from headway.kernels.cpu.chunks import (
    ARRANGED,
    AT_ONCE,
    CHUNK,
    LATENT,
    PANELS,
    arrange,
    arrange_latent,
    ask_for_all,
    close_line,
    copy_scales,
    cut_room,
    find,
    join_lines,
    room_bytes,
)
from headway.kernels.cpu.compile import compiled, give_back, take_memory
from headway.kernels.cpu.ir import LANES, VECTOR_BYTES
from headway.kernels.cpu.jobs import arg, job, once_per_kind, real_arg, tickets
from headway.kernels.cpu.matrix import STEP_WORDS, TILE_ROWS, configure, release
from headway.kernels.cpu.rows import REORDER, exp_of_negative
from headway.kernels.cpu.simd import (
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
from headway.kernels.cpu.softmax import MASKED, cap_scores, largest_score, round_weights, scale_scores, weigh
from headway.kernels.cpu.tiles import PANELS_AT_ONCE, keys_on_tiles, multiply_keys, multiply_values, values_on_tiles

_ZERO, _ONE = np.float32(0), np.float32(1)
_LARGEST = np.float32(32767)
_WIDE = np.int16(0)


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
    for group in range((count + AT_ONCE - 1) // AT_ONCE):
        for index in range(passes):
            row = index * rows // passes
            multiply_keys(
                cache_kind, (index + 1) * rows // passes - row, queries + row * query_bytes, query_bytes,
                panels + group * PANELS_AT_ONCE * 8, following + group * PANELS_AT_ONCE * 8, words,
                scores + (row * CHUNK + group * AT_ONCE) * 4, CHUNK * 4,
            )  # fmt: skip


@compiled()
def _products_of_values(
    cache_kind, rows, weights, weight_bytes, lines, following, lane_bytes, count, width, out, out_stride
):
    passes = (rows + TILE_TOKENS - 1) // TILE_TOKENS
    for element in range(0, width, AT_ONCE):
        for index in range(passes):
            row = index * rows // passes
            multiply_values(
                cache_kind, (index + 1) * rows // passes - row, weights + row * weight_bytes, weight_bytes, lines,
                following, element * lane_bytes, (width - element + LANES - 1) // LANES - 1, count,
                out + (row * out_stride + element) * 4, out_stride * 4,
            )  # fmt: skip


@compiled()
def _keys_on_tiles(
    cache_kind, rows, of_tile, queries, query_bytes, panels, following, count, words, step_words, scores
):
    for group in range((count + AT_ONCE - 1) // AT_ONCE):
        table = group * PANELS_AT_ONCE * 8
        for row in range(0, rows, of_tile):
            keys_on_tiles(
                cache_kind, queries + row * query_bytes, query_bytes, panels + table,
                following + table if row == 0 else 0, step_words, words // step_words,
                scores + (row * CHUNK + group * AT_ONCE) * 4, CHUNK * 4,
            )  # fmt: skip


@compiled()
def _values_on_tiles(
    cache_kind, rows, of_tile, weights, weight_bytes, lines, line_bytes, steps, width, out, out_stride
):
    for element in range(0, width, AT_ONCE):
        for row in range(0, rows, of_tile):
            values_on_tiles(
                cache_kind, weights + row * weight_bytes, weight_bytes, lines + element * 4, line_bytes, steps,
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
        store(room.maxima, row, MASKED, FLOAT32)
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
def _prepare_queries(kind, x_kind, integer, group, width, item, head, query, query_stride, rows, row_bytes, factors):
    """Lay out a tile's queries, and their scales."""
    for row in range(item[2] * group):
        token = read_int64(item[7], row // group) if item[7] != 0 else item[1] + row // group
        source = token * query_stride + (head * group + row % group) * width
        factor = _prepare_query(kind, x_kind, integer, query, source, width, rows + row * row_bytes)
        store(factors, row, factor, FLOAT32)


@compiled()
def _begin(geometry, out_width, item, head, sinks, room):
    """Clear a tile's results; a sink is a key without a value, before all others."""
    group = geometry[0] // geometry[1]
    for row in range(item[2] * group):
        has_sink = sinks != 0 and item[4] == 0
        sink = load(sinks, head * group + row % group, FLOAT32) if has_sink else MASKED
        store(room.maxima, row, sink, FLOAT32)
        store(room.sums, row, _ONE if has_sink else _ZERO, FLOAT32)
        for d in range(out_width):
            store(room.out, row * out_width + d, _ZERO, FLOAT32)


@compiled()
def _softmax(
    x_kind, integer, item, group, window, least, key, count, padded, scale, cap, width, out_width, scales, factors, room
):
    """Turn the scores of one chunk into weights, and rescale what the earlier chunks have left in out.

    No key before `least` counts.
    """
    for row in range(item[2] * group):
        own = item[3] + row // group
        high = min(count, own + 1 - key)
        low = max(0, max(least, own - window + 1 if window > 0 else 0) - key)
        scores, weights = room.scores + row * CHUNK * 4, room.weights + row * room.weight_bytes
        if high <= low:
            low = high = 0
            for j in range(padded):
                store(weights, j, _ZERO, x_kind)
        else:
            if integer:
                scale_scores(scores, count, load(factors, row, FLOAT32), scales)
            if cap > _ZERO:
                cap_scores(scores, count, scale, cap)
            factor = _ONE if cap > _ZERO else scale
            before = load(room.maxima, row, FLOAT32)
            best = larger(before, largest_score(scores, low, high) * factor)
            total = weigh(x_kind, scores, low, high, padded, factor, best, scores if integer else weights)
            if best > before:
                decay = exp_of_negative(before - best)
                store(room.sums, row, load(room.sums, row, FLOAT32) * decay + total, FLOAT32)
                store(room.maxima, row, best, FLOAT32)
                _rescale(room.out + row * out_width * 4, width, decay)
            else:
                store(room.sums, row, load(room.sums, row, FLOAT32) + total, FLOAT32)
        if integer:
            factor = round_weights(scores, scales + CHUNK * 4, low, high, padded, weights)
            store(room.weight_factors, row, factor, FLOAT32)


@compiled()
def _chunk_at(at, first, ahead, sunk, end):
    """The first key of a chunk, and how many it has: those of sink queries come before the `first` of others."""
    if at < first:
        key = at - first + ahead
        return key, min(CHUNK, sunk - key)
    return at, min(CHUNK, end - at)


@compiled()
def _rows_of_tile(rows):
    """The rows of each matrix tile, where as few as there may be have as many each."""
    tiles = (rows + TILE_ROWS - 1) // TILE_ROWS
    return (rows + tiles - 1) // tiles


@compiled()
def _attend(
    kind, x_kind, cache_kind, integer, geometry, layout, item, head, query, sinks, of_first, cache, tables, scale, cap,
    tiles, room,
):  # fmt: skip
    """Leave the unnormalised result of one tile in the room's out, and its maxima and sums.

    `tiles` says how matrix tiles are laid out, and the words of a step of keys; or it is None. Rows are cut evenly
    among these, and the last may be of no query.
    """
    heads, kv_heads, query_stride, table_stride, window = geometry
    arranged, inputs, width, _, size, value_width = layout
    group, table = heads // kv_heads, tables + item[0] * table_stride * 4
    rows, words = item[2] * group, (width + inputs - 1) // inputs
    out_width = (value_width + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    _begin(geometry, out_width, item, head, sinks, room)
    _prepare_queries(
        kind, x_kind, integer, group, width, item, head, query, query_stride, room.queries, room.query_bytes,
        room.factors,
    )  # fmt: skip
    first, end = item[4], min(item[5], item[3] + item[2])
    if window > 0:
        first = max(first, (item[3] - window + 1) // CHUNK * CHUNK)
    sunk = ahead = 0
    if of_first[2] > 0:
        first = min(end, max(first, of_first[2] // CHUNK * CHUNK))
        if item[4] == 0:
            sunk = min(of_first[2], end)
            ahead = (sunk + CHUNK - 1) // CHUNK * CHUNK
            _prepare_queries(
                kind, x_kind, integer, group, width, item, head, of_first[0], of_first[1], room.first_queries,
                room.query_bytes, room.first_factors,
            )  # fmt: skip
    if tiles is not None:
        of_tile = _rows_of_tile(rows)
        configure(tiles[0] + of_tile * VECTOR_BYTES)
    panels, lines, scales = room.panels, room.lines, room.scales
    next_key, next_count = _chunk_at(first - ahead, first, ahead, sunk, end)
    if arranged == ARRANGED:
        find(layout, table, next_key, next_count, kv_heads, head, cache, panels, lines)
        ask_for_all(layout, next_count, panels, lines)
    part = opened = item[4] // SPLIT
    for at in range(first - ahead, end, CHUNK):
        key, count = next_key, next_count
        next_key, next_count = _chunk_at(at + CHUNK, first, ahead, sunk, end)
        is_first = at < first
        queries = room.first_queries if is_first else room.queries
        factors = room.first_factors if is_first else room.factors
        if key // SPLIT != part:
            _close_part(rows, value_width, out_width, part == opened, room)
            part = key // SPLIT
        next_panels, next_lines = panels, lines
        if arranged == LATENT:
            arrange_latent(layout, table, key, count, cache[0], room)
        elif arranged != ARRANGED:
            arrange(layout, table, key, count, kv_heads, head, cache, room)
        else:
            if integer:
                copy_scales(layout[3], table, key, count, kv_heads, head, cache, scales)
            if at + CHUNK < end:
                next_panels = 2 * room.panels + 8 * PANELS - panels
                next_lines = 2 * room.lines + 8 * CHUNK - lines
                find(layout, table, next_key, next_count, kv_heads, head, cache, next_panels, next_lines)
        if count % inputs:
            close_line(lines, count, inputs, value_width, size, room.line_room)
        used = (count + inputs - 1) // inputs
        padded = used * inputs
        if tiles is not None:
            _keys_on_tiles(
                cache_kind, rows, of_tile, queries, room.query_bytes, panels, next_panels, count, words, tiles[1],
                room.scores,
            )  # fmt: skip
            padded = (used + STEP_WORDS - 1) // STEP_WORDS * STEP_WORDS * inputs
        else:
            _products_of_keys(
                cache_kind, rows, queries, room.query_bytes, panels, next_panels, count, words, room.scores
            )
        _softmax(
            x_kind, integer, item, group, 0 if is_first else window, 0 if is_first else of_first[2], key, count,
            padded, scale, cap, value_width, out_width, scales, factors, room,
        )  # fmt: skip
        target = room.chunk_out if integer else room.out
        following = next_lines if next_count == CHUNK else lines
        if tiles is not None:
            line_bytes = (value_width + LANES - 1) // LANES * VECTOR_BYTES
            join_lines(lines, following, used, padded // inputs, line_bytes, room.value_room)
            _values_on_tiles(
                cache_kind, rows, of_tile, room.weights, room.weight_bytes, room.value_room, line_bytes,
                padded // (STEP_WORDS * inputs), value_width, target, out_width,
            )  # fmt: skip
        else:
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
def _finish(kind, geometry, width, item, head, room, unit, out, partial_out, partial_sums):
    """Write a tile's result, or, if it is a part of a split, its unnormalised values, maximum and sum."""
    heads, partial = geometry[0], item[6]
    group = heads // geometry[1]
    out_width = (width + AT_ONCE - 1) // AT_ONCE * AT_ONCE
    for row in range(item[2] * group):
        query_head = head * group + row % group
        source = room.out + row * out_width * 4
        if partial < 0:
            target = ((item[1] + row // group) * heads + query_head) * width
            factor = unit / load(room.sums, row, FLOAT32)
            for d in range(width):
                store(out, target + d, load(source, d, FLOAT32) * factor, kind)
        else:
            place = (partial + row // group) * heads + query_head
            for d in range(width):
                store(partial_out, place * width + d, load(source, d, FLOAT32), FLOAT32)
            store(partial_sums, 2 * place, load(room.maxima, row, FLOAT32), FLOAT32)
            store(partial_sums, 2 * place + 1, load(room.sums, row, FLOAT32), FLOAT32)


@compiled()
def _merge(kind, merge, head, heads, width, unit, out, partial_out, partial_sums):
    """Join the parts of a split context, in the order in which a tile that is not split does."""
    token, shared, first, stride, own, own_first, own_stride = merge
    into = (first if shared > 0 else own_first) * heads + head
    best, total = load(partial_sums, 2 * into, FLOAT32), load(partial_sums, 2 * into + 1, FLOAT32)
    for part in range(1, shared + own):
        row = first + part * stride if part < shared else own_first + (part - shared) * own_stride
        place = row * heads + head
        best, total = _join_row(
            partial_out + into * width * 4, partial_out + place * width * 4, width, best, total,
            load(partial_sums, 2 * place, FLOAT32), load(partial_sums, 2 * place + 1, FLOAT32),
        )  # fmt: skip
    factor = unit / total
    for d in range(width):
        store(out, (token * heads + head) * width + d, load(partial_out, into * width + d, FLOAT32) * factor, kind)


# The plan, eleven numbers of the geometry, ten addresses, three numbers of sink queries, two of matrix tiles; the
# scale, the soft cap or 0.
ATTEND = struct.Struct("27q2d")


@once_per_kind
def attend_job(kind: Any, cache_kind: Any, on_tiles: bool) -> int:
    """Every tile of a plan, then its merges; queries and results of `kind` over a cache of cache_kind."""
    integer = cache_kind is WIDE_INT8
    x_kind = kind if arithmetic_of(cache_kind).inputs == 2 and not integer else FLOAT32
    unit = FLOAT8_UNIT if cache_kind is FLOAT8 else _ONE  # of values, as they are multiplied

    def attend(a: int) -> None:
        plan = arg(a, 0)
        geometry = (arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5))
        layout = (arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11))
        query, tables = arg(a, 12), arg(a, 13)
        cache = (arg(a, 14), arg(a, 15), arg(a, 16), arg(a, 17))
        out, partial_out, partial_sums, sinks = arg(a, 18), arg(a, 19), arg(a, 20), arg(a, 21)
        of_first = (arg(a, 22), arg(a, 23), arg(a, 24))
        tiles = (arg(a, 25), arg(a, 26)) if on_tiles else None
        scale, cap = np.float32(real_arg(a, 27)), np.float32(real_arg(a, 28))
        count, most_rows, merges = read_int64(plan, 0), read_int64(plan, 1), read_int64(plan, 2)
        kv_heads, width, value_width = geometry[1], layout[2], layout[5]
        all_items, items = count * kv_heads, plan + HEADER_WORDS * 8
        ticket = take_ticket(tickets(a, 0))
        if ticket < all_items:
            if on_tiles:
                most_rows = (most_rows + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
            memory = take_memory(room_bytes(most_rows, width))
            room = cut_room(memory, most_rows, width, value_width, layout[1], layout[4])
            while ticket < all_items:
                row, head = items + ticket // kv_heads * ITEM_WORDS * 8, ticket % kv_heads
                listed = read_int64(row, 7)
                item = (
                    read_int64(row, 0), read_int64(row, 1), read_int64(row, 2), read_int64(row, 3),
                    read_int64(row, 4), read_int64(row, 5), read_int64(row, 6), plan + listed * 8 if listed > 0 else 0,
                )  # fmt: skip
                _attend(
                    kind, x_kind, cache_kind, integer, geometry, layout, item, head, query, sinks, of_first, cache,
                    tables, scale, cap, tiles, room,
                )  # fmt: skip
                _finish(kind, geometry, value_width, item, head, room, unit, out, partial_out, partial_sums)
                take_ticket(tickets(a, 1))
                ticket = take_ticket(tickets(a, 0))
            give_back(memory)
            if on_tiles:
                release()
        if merges > 0:
            while read_shared(tickets(a, 1)) < all_items:
                pause()
            heads, joins = geometry[0], items + count * ITEM_WORDS * 8
            ticket = take_ticket(tickets(a, 2))
            while ticket < merges * kv_heads:
                row = joins + ticket // kv_heads * MERGE_WORDS * 8
                merge = (
                    read_int64(row, 0), read_int64(row, 1), read_int64(row, 2), read_int64(row, 3),
                    read_int64(row, 4), read_int64(row, 5), read_int64(row, 6),
                )  # fmt: skip
                first = ticket % kv_heads * (heads // kv_heads)
                for head in range(first, first + heads // kv_heads):
                    _merge(kind, merge, head, heads, value_width, unit, out, partial_out, partial_sums)
                ticket = take_ticket(tickets(a, 2))

    return job(attend)
