"""Paged attention on CPU, straight from the cache's blocks.

The unit of work is a tile: some query tokens of one sequence with all the query heads of one key/value
head, so that grouped-query attention reads each key once. A tile goes over its context in chunks of keys,
keeping a running maximum and sum (the online softmax of Milakov and Gimelshein, 2018), and both products
of a chunk are tiles of `product_tile`. A long context with few query tokens is split, and its parts merged
by their maxima and sums, so that one sequence can occupy every thread.

Splits and chunks start at fixed positions of the context, so a sequence's result does not depend on what
else is in the step.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from headway.kernels.cpu_compile import compiled
from headway.kernels.cpu_ir import LANES
from headway.kernels.cpu_rows import REORDER, exp_of_negative
from headway.kernels.cpu_simd import (
    BFLOAT16,
    FLOAT32,
    larger,
    load,
    read_int32,
    read_int64,
    store,
    take_ticket,
)
from headway.kernels.cpu_team import arg, job, once_per_kind, real_arg, tickets
from headway.kernels.cpu_tiles import pair_rows, product_tile, transpose_words
from headway.kernels.interface import StepGeometry

CHUNK = 128
SPLIT = 512
_TILE_QUERIES = 112
_MASKED = np.float32(-1e30)
_ZERO, _ONE = np.float32(0), np.float32(1)
_ITEM_BYTES = 7 * 8


@dataclass(slots=True)
class AttentionPlan:
    """The tiles of one step, the same for all its layers.

    items int64 [n, 7]: sequence, first query token in the step, number of query tokens, position of the
    first, first key, end of keys, row of the partial results or -1 where the tile writes its result.
    merges int64 [m, 4]: query token, its first partial row, number of parts, rows from one part to the next.
    """

    step: StepGeometry
    group: int
    most_rows: int
    items: np.ndarray
    merges: np.ndarray
    partial_rows: int


def plan_attention(step: StepGeometry, group: int) -> AttentionPlan:
    """Cut a step into tiles for `group` query heads per key/value head, costliest first."""
    tile_tokens = max(1, _TILE_QUERIES // group)
    items: list[tuple[int, ...]] = []
    merges: list[tuple[int, ...]] = []
    start = rows = 0
    for sequence, (queries, context) in enumerate(zip(step.query_lens_host, step.context_lens_host, strict=True)):
        first_position = context - queries
        parts = -(-context // SPLIT) if queries <= tile_tokens else 1
        if parts > 1:
            for part in range(parts):
                end = min((part + 1) * SPLIT, context)
                items.append((sequence, start, queries, first_position, part * SPLIT, end, rows + part * queries))
            merges.extend((start + token, rows + token, parts, queries) for token in range(queries))
            rows += parts * queries
        else:
            for token in range(0, queries, tile_tokens):
                count = min(tile_tokens, queries - token)
                position = first_position + token
                items.append((sequence, start + token, count, position, 0, position + count, -1))
        start += queries
    items.sort(key=lambda item: item[2] * (item[5] - item[4]), reverse=True)
    most_rows = group * max((item[2] for item in items), default=0)
    tiles, joins = (np.array(table, np.int64).reshape(-1, width) for table, width in ((items, 7), (merges, 4)))
    return AttentionPlan(step, group, most_rows, tiles, joins, rows)


@compiled()
def _rows_of_tiles(compute, rows, panels, left, left_stride, packed, panel_stride, words, out, out_stride, accumulate):
    """product_tile over all rows and panels; left and out have room for rows up to a multiple of eight."""
    row = 0
    while row < rows:
        at, to, rest = left + row * left_stride, out + row * out_stride, rows - row
        step = 8 if rest > 4 else 4 if rest > 2 else rest
        for panel in range(0, panels - 1, 2):
            source, target = packed + panel * panel_stride, to + panel * 64
            if step == 8:
                product_tile(
                    compute, 8, 2, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                )  # fmt: skip
            elif step == 4:
                product_tile(
                    compute, 4, 2, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                )  # fmt: skip
            elif step == 2:
                product_tile(
                    compute, 2, 2, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                )  # fmt: skip
            else:
                product_tile(
                    compute, 1, 2, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                )  # fmt: skip
        if panels % 2:
            source, target = packed + (panels - 1) * panel_stride, to + (panels - 1) * 64
            for single in range(0, step, 4 if step > 2 else step):
                at_single, to_single = at + single * left_stride, target + single * out_stride
                if step > 2:
                    product_tile(
                        compute, 4, 1, at_single, left_stride, source, panel_stride, words, to_single, out_stride,
                        accumulate,
                    )  # fmt: skip
                elif step == 2:
                    product_tile(
                        compute, 2, 1, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                    )  # fmt: skip
                else:
                    product_tile(
                        compute, 1, 1, at, left_stride, source, panel_stride, words, target, out_stride, accumulate
                    )  # fmt: skip
        row += step


@compiled()
def _pack_keys(kind, compute, direct, addresses, count, width, words, packed):
    """Keys at addresses[:count] to packed[panel, word, lane]; addresses are filled to whole panels."""
    for panel in range((count + LANES - 1) // LANES):
        base = packed + panel * words * 64
        whole = words // LANES * LANES if direct else 0
        for word in range(0, whole, LANES):
            transpose_words(addresses.ctypes.data + panel * LANES * 8, word * 4, base + word * 64)
        for lane in range(LANES):
            address = addresses[panel * LANES + lane]
            if direct:
                for word in range(whole, words):
                    store(base, word * LANES + lane, load(address, word, FLOAT32), FLOAT32)
            else:
                for word in range(words):
                    store(base, word * LANES + lane, load(address, word, kind), FLOAT32)


@compiled()
def _pack_values(kind, paired, addresses, distance, width, words, packed):
    """Values, `distance` bytes from the keys at addresses, to packed[panel, word, lane]; paired, a word has two."""
    panels = (width + LANES - 1) // LANES
    for word in range(words):
        for panel in range(panels):
            target = packed + (panel * words + word) * 64
            offset = panel * LANES
            if paired:
                first = addresses[2 * word] + distance + offset * 2
                second = addresses[2 * word + 1] + distance + offset * 2
                if width - offset >= LANES:
                    pair_rows(16, first, second, target)
                elif width - offset == LANES // 2:
                    pair_rows(8, first, second, target)
                else:
                    for lane in range(LANES):
                        inside = offset + lane < width
                        store(target, 2 * lane, load(first, lane, kind) if inside else _ZERO, BFLOAT16)
                        store(target, 2 * lane + 1, load(second, lane, kind) if inside else _ZERO, BFLOAT16)
            else:
                address = addresses[word] + distance
                for lane in range(LANES):
                    value = load(address, offset + lane, kind) if offset + lane < width else _ZERO
                    store(target, lane, value, FLOAT32)


@compiled(fastmath=True)
def _softmax_row(compute, scores, low, high, padded, scale, weights, maximum):
    """exp(score * scale - maximum) of keys low .. high - 1 to weights, 0 elsewhere; (new maximum, sum)."""
    best = _MASKED
    for j in range(low, high):
        best = larger(best, load(scores, j, FLOAT32))
    best = larger(maximum, best * scale)
    total = _ZERO
    for j in range(low):
        store(weights, j, _ZERO, compute)
    for j in range(low, high):
        weight = exp_of_negative(load(scores, j, FLOAT32) * scale - best)
        total += weight
        store(weights, j, weight, compute)
    for j in range(high, padded):
        store(weights, j, _ZERO, compute)
    return best, total


@compiled(fastmath=REORDER)
def _softmax(
    compute, rows, group, position, window, key, count, padded, scale, scores, weights, weight_size, out, out_width,
    maxima, sums,
):  # fmt: skip
    """Turn the scores of one chunk into weights, and rescale what the earlier chunks have left in out."""
    for row in range(rows):
        own = position + row // group
        high = min(count, own + 1 - key)
        low = max(0, own - window + 1 - key) if window > 0 else 0
        score_row, weight_row = scores + row * CHUNK * 4, weights + row * CHUNK * weight_size
        if high <= low:
            for j in range(padded):
                store(weight_row, j, _ZERO, compute)
            continue
        best, total = _softmax_row(compute, score_row, low, high, padded, scale, weight_row, maxima[row])
        decay = exp_of_negative(maxima[row] - best)
        sums[row] = sums[row] * decay + total
        maxima[row] = best
        if decay != _ONE:
            for d in range(out_width):
                store(out, row * out_width + d, load(out, row * out_width + d, FLOAT32) * decay, FLOAT32)


@compiled()
def _find(table, first, count, head, kv_heads, block_size, row_bytes, cache, addresses):
    """Where `count` keys from number `first` on start in a cache [N, G, B, D]; the last fills its panel."""
    block, offset, index = first // block_size, first % block_size, 0
    while index < count:
        run = min(block_size - offset, count - index)
        start = cache + ((read_int32(table, block) * kv_heads + head) * block_size + offset) * row_bytes
        for step in range(run):
            addresses[index + step] = start + step * row_bytes
        index, block, offset = index + run, block + 1, 0
    for rest in range(count, (count + LANES - 1) // LANES * LANES):
        addresses[rest] = addresses[count - 1]


@compiled()
def _attend(
    kind, compute, geometry, item, head, query, keys, values, tables, scale, scratch, maxima, sums, addresses
):  # fmt: skip
    """Leave the unnormalised result of one tile in scratch's out, and its maxima and sums."""
    heads, kv_heads, width, block_size, size, query_stride, table_stride, window, compute_size, direct = geometry
    sequence, token, tokens, position, first, end = item
    queries, packed_keys, packed_values, scores, weights, out = scratch
    group = heads // kv_heads
    rows, words = tokens * group, width * compute_size // 4
    out_width = (width + LANES - 1) // LANES * LANES
    table = tables + sequence * table_stride * 4
    for row in range(rows):
        source = (token + row // group) * query_stride + (head * group + row % group) * width
        for d in range(width):
            store(queries, row * width + d, load(query, source + d, kind), compute)
        for d in range(out_width):
            store(out, row * out_width + d, _ZERO, FLOAT32)
        maxima[row], sums[row] = _MASKED, _ZERO
    if window > 0:
        first = max(first, (position - window + 1) // CHUNK * CHUNK)
    end = min(end, position + tokens)
    for key in range(first, end, CHUNK):
        count = min(CHUNK, end - key)
        panels = (count + LANES - 1) // LANES
        pairs = (count + 1) // 2 if compute_size == 2 else count
        _find(table, key, count, head, kv_heads, block_size, width * size, keys, addresses)
        _pack_keys(kind, compute, direct, addresses, count, width, words, packed_keys)
        _pack_values(kind, compute_size == 2, addresses, values - keys, width, pairs, packed_values)
        _rows_of_tiles(
            compute, rows, panels, queries, width * compute_size, packed_keys, words * 64, words, scores, CHUNK * 4, 0
        )  # fmt: skip
        _softmax(
            compute, rows, group, position, window, key, count, panels * LANES, scale, scores, weights, compute_size,
            out, out_width, maxima, sums,
        )  # fmt: skip
        _rows_of_tiles(
            compute, rows, out_width // LANES, weights, CHUNK * compute_size, packed_values, pairs * 64, pairs, out,
            out_width * 4, 1,
        )  # fmt: skip


@compiled()
def _finish(kind, geometry, head, token, tokens, partial, scratch_out, maxima, sums, out, partial_out, partial_sums):
    """Write a tile's result, or, if it is a part of a split, its unnormalised values, maximum and sum."""
    heads, kv_heads, width = geometry[:3]
    group = heads // kv_heads
    out_width = (width + LANES - 1) // LANES * LANES
    for row in range(tokens * group):
        query_head = head * group + row % group
        source = row * out_width
        if partial < 0:
            target = ((token + row // group) * heads + query_head) * width
            factor = _ONE / sums[row]
            for d in range(width):
                store(out, target + d, load(scratch_out, source + d, FLOAT32) * factor, kind)
        else:
            place = (partial + row // group) * heads + query_head
            for d in range(width):
                store(partial_out, place * width + d, load(scratch_out, source + d, FLOAT32), FLOAT32)
            store(partial_sums, 2 * place, maxima[row], FLOAT32)
            store(partial_sums, 2 * place + 1, sums[row], FLOAT32)


@compiled()
def _attend_tiles(
    kind, compute, tickets, geometry, most_rows, items, count, query, keys, values, tables, scale, out, partial_out,
    partial_sums,
):  # fmt: skip
    """Take tiles until none is left, in scratch memory of one thread."""
    kv_heads, width, compute_size = geometry[1], geometry[2], geometry[8]
    rows = (most_rows + 7) // 8 * 8
    out_width = (width + LANES - 1) // LANES * LANES
    queries = np.zeros(rows * width * compute_size // 4 + LANES, np.float32)
    packed_keys = np.empty(CHUNK * width * compute_size // 4, np.float32)
    packed_values = np.empty(CHUNK * out_width * compute_size // 4, np.float32)
    scores = np.empty(rows * CHUNK, np.float32)
    weights = np.zeros(rows * CHUNK * compute_size // 4, np.float32)
    results = np.zeros(rows * out_width, np.float32)
    maxima, sums = np.empty(rows, np.float32), np.empty(rows, np.float32)
    addresses = np.empty(CHUNK, np.int64)
    scratch = (
        queries.ctypes.data, packed_keys.ctypes.data, packed_values.ctypes.data, scores.ctypes.data,
        weights.ctypes.data, results.ctypes.data,
    )  # fmt: skip
    while True:
        ticket = take_ticket(tickets)
        if ticket >= count * kv_heads:
            break
        row, head = items + ticket // kv_heads * _ITEM_BYTES, ticket % kv_heads
        item = (
            read_int64(row, 0), read_int64(row, 1), read_int64(row, 2), read_int64(row, 3), read_int64(row, 4),
            read_int64(row, 5),
        )  # fmt: skip
        _attend(
            kind, compute, geometry, item, head, query, keys, values, tables, scale, scratch, maxima, sums, addresses
        )  # fmt: skip
        _finish(
            kind, geometry, head, item[1], item[2], read_int64(row, 6), scratch[5], maxima, sums, out, partial_out,
            partial_sums,
        )  # fmt: skip


# The ten numbers of the geometry, the rows of the largest tile, the items and how many, eight addresses, the scale.
ATTEND = struct.Struct("20qd")


@once_per_kind
def attend_job(kind: Any, compute: Any) -> int:
    """Every tile of items [count, 7]; a kind for memory and one to compute in."""

    def attend(a: int) -> None:
        geometry = (
            arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5),
            arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9),
        )  # fmt: skip
        _attend_tiles(
            kind, compute, tickets(a, 0), geometry, arg(a, 10), arg(a, 11), arg(a, 12),
            arg(a, 13), arg(a, 14), arg(a, 15), arg(a, 16), real_arg(a, 20),
            arg(a, 17), arg(a, 18), arg(a, 19),
        )  # fmt: skip

    return job(attend)


@compiled(fastmath=REORDER)
def merge_parts(kind, merges, heads, width, out, partial_out, partial_sums):
    """Combine the parts of split contexts: each weighs exp(its maximum - the greatest) in sum and values."""
    for index in range(merges.shape[0]):
        token, first, parts, stride = merges[index]
        for head in range(heads):
            best = _MASKED
            for part in range(parts):
                best = larger(best, load(partial_sums, 2 * ((first + part * stride) * heads + head), FLOAT32))
            total = _ZERO
            for part in range(parts):
                place = (first + part * stride) * heads + head
                decay = exp_of_negative(load(partial_sums, 2 * place, FLOAT32) - best)
                total += load(partial_sums, 2 * place + 1, FLOAT32) * decay
                for d in range(width):
                    value = load(partial_out, place * width + d, FLOAT32) * decay
                    if part > 0:
                        value += load(partial_out, first * heads * width + head * width + d, FLOAT32)
                    store(partial_out, first * heads * width + head * width + d, value, FLOAT32)
            factor = _ONE / total
            for d in range(width):
                value = load(partial_out, (first * heads + head) * width + d, FLOAT32) * factor
                store(out, (token * heads + head) * width + d, value, kind)
