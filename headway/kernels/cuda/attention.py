"""Paged attention on CUDA in Triton: one kernel for prefill, decode and mixtures of both.

A program takes one tile of query tokens of one sequence with all the query heads of one key/value head, so
that the rows of its matrix products are tokens times heads and tensor cores have work even in decode. It
goes over the keys with a running maximum and sum. Where there are too few programs for the device, the
context is split and a second kernel merges the parts. What sequences have in common is read once for all of them
(cascade attention; Ye et al., 2024): by programs whose rows are queries of several sequences, with parts of their own.

Grids follow from sizes the host already knows; nothing here waits for the device.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from headway.kernels.interface import LayerCache, SinkQueries, StepGeometry

_MOST_SPLITS = 32
_LEAST_SPLIT_KEYS = 256
# The most heads of a program over latents.
_LATENT_HEADS = 16


@triton.jit
def _attend(scores, v, v_scale, seen, softcap, best, total, result, CAPPED: tl.constexpr):
    """The running maximum, sum and result with some keys more, of which each row has seen some.

    v_scale is what 1 stands for in each row of v, or None.
    """
    if CAPPED:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    scores = tl.where(seen, scores, -1.0e30)
    better = tl.maximum(best, tl.max(scores, axis=1))
    weights = tl.where(seen, tl.exp(scores - better[:, None]), 0.0)
    decay = tl.exp(best - better)
    total = total * decay + tl.sum(weights, axis=1)
    if v_scale is not None:
        weights = weights * v_scale[None, :]
    result = result * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return better, total, result


@triton.jit
def _load(at, mask, WIDEN: tl.constexpr):
    numbers = tl.load(at, mask=mask, other=0.0)
    if WIDEN:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def _from_cache(at, mask, like, CACHE: tl.constexpr, WIDEN: tl.constexpr):
    """Numbers of the cache in the type of `like`; of an int8 cache without their scales."""
    numbers = tl.load(at, mask=mask, other=0)
    if CACHE == "fp8":  # as float16 with the same bits, which is 256 times less
        bits = ((numbers.to(tl.int16) << 8) >> 1) & -16385
        numbers = (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(like.dtype)
    elif CACHE == "int8":
        numbers = numbers.to(like.dtype)
    elif WIDEN:
        numbers = numbers.to(tl.float32)
    return numbers


@triton.jit
def _rows_of(tile, kv_head, queries, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr):
    """(token of its sequence, head, whether there is such a token) of each row of a tile."""
    row = tl.arange(0, ROWS)
    token = tile * TOKENS + row // GROUP
    head = kv_head * GROUP + row % GROUP
    return token, head, (row // GROUP < TOKENS) & (token < queries)


@triton.jit
def _keys_of(
    begin, first_position, context, window, split,
    TOKENS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr, WINDOWED: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """The first key that a tile looks at in its split, the end of them, and places for the first keys before them.

    It leaves out the keys before `begin`. The splits of a tile share the keys that the tile sees, whatever other
    sequences see: one launch fits any contexts.
    """
    end = tl.minimum(first_position + TOKENS, context)
    if WINDOWED:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS * KEYS
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end - begin, SPLITS), KEYS) * KEYS
        begin += split * share
        end = tl.minimum(end, begin + share)
    ahead = 0
    if FIRST > 0:
        # The first keys come before others, in the first split.
        ahead = tl.where(split == 0, (FIRST + KEYS - 1) // KEYS * KEYS, 0)
        end = tl.maximum(begin, end)
    return begin, end, ahead


@triton.jit
def _positions_of(key, begin, end, ahead, context, KEYS: tl.constexpr, FIRST: tl.constexpr):
    """Positions of the next keys, which of them there are, and whether they are the first ones of the context."""
    at = key + tl.arange(0, KEYS)
    there = at < end
    is_first = False
    if FIRST > 0:
        is_first = key < begin
        at = tl.where(is_first, at - begin + ahead, at)
        there = tl.where(is_first, at < tl.minimum(FIRST, context), (at < end) & (at >= FIRST))
    return at, there, is_first


@triton.jit
def _place_of(table, at, there, kv_head, CACHE_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the cache has the keys of these positions, in rows of one head."""
    block = tl.load(table + at // BLOCK_SIZE, mask=there, other=0)
    in_block = kv_head % CACHE_HEADS * BLOCK_SIZE + at % BLOCK_SIZE
    return block.to(tl.int64) * CACHE_HEADS * BLOCK_SIZE + in_block


@triton.jit
def _for_keys(q, first_at, mask, is_first, FIRST: tl.constexpr, WIDEN: tl.constexpr):
    """The queries that these keys are multiplied with: those at first_at for the first ones."""
    if FIRST > 0:  # noqa: SIM102 - FIRST is known to the compiler
        if is_first:  # where it is needed, as both in registers are too many
            q = _load(first_at, mask, WIDEN)
    return q


@triton.jit
def _store(
    best, total, result, at, part, live, dim, out, partial_out, partial_max, partial_sum,
    WIDTH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Results of a tile's rows, [ROWS, WIDTH], or those of one of several parts, which are still to be merged."""
    mask = live[:, None] & (dim < WIDTH)[None, :]
    if PARTS > 1:
        part = at * PARTS + part
        tl.store(partial_max + part, best, mask=live)
        tl.store(partial_sum + part, total, mask=live)
        tl.store(partial_out + part[:, None] * WIDTH + dim[None, :], result, mask=mask)
    else:
        result = result / tl.where(live, total, 1.0)[:, None]
        tl.store(out + at[:, None] * WIDTH + dim[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _attention_kernel(
    query, keys, values, key_scales, value_scales, tables, query_start, context_lens, sinks,
    out, partial_out, partial_max, partial_sum,
    common_parts, common_queries, common_tokens,
    scale, softcap, query_stride, table_stride, window, of_first, of_first_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, CACHE_HEADS: tl.constexpr, GROUP: tl.constexpr,
    WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, REST: tl.constexpr, REST_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, KEYS: tl.constexpr, SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr, CAPPED: tl.constexpr, WIDEN: tl.constexpr, FIRST: tl.constexpr,
    COMMON: tl.constexpr, PARTS: tl.constexpr, CACHE: tl.constexpr,
):  # fmt: skip
    """Attention of a tile to its split of a context.

    With COMMON "own", what its sequence has in common with others is left out; with "all", the second number of a
    program is that of a common part, and a tile has queries of any sequences that it concerns.
    """
    tile = tl.program_id(0)
    sequence = tl.program_id(1)
    kv_head = tl.program_id(2) % KV_HEADS
    split = tl.program_id(2) // KV_HEADS
    before = 0
    if COMMON == "all":
        part_at = common_parts + sequence * 4
        sequence = tl.load(part_at)
        context = tl.load(part_at + 1)
        start = tl.load(part_at + 2)
        queries = tl.load(part_at + 3)
    else:
        start = tl.load(query_start + sequence)
        queries = tl.load(query_start + sequence + 1) - start
        context = tl.load(context_lens + sequence)
    if tile * TOKENS >= queries:
        return
    token, head, live = _rows_of(tile, kv_head, queries, GROUP, ROWS, TOKENS)
    if COMMON == "all":
        position = context + token
        first_position = context
        token_index = tl.load(common_queries + start + token, mask=live, other=0).to(tl.int64)
    else:
        position = context - queries + token
        first_position = context - queries + tile * TOKENS
        token_index = (start + token).to(tl.int64)
    if COMMON == "own":
        before = tl.load(common_tokens + start)
    whole = WIDTH + REST
    dim, rest = tl.arange(0, WIDTH_PADDED), tl.arange(0, REST_PADDED)
    has_dim, has_rest = dim < WIDTH, rest < REST
    row_dims, row_rests = live[:, None] & has_dim[None, :], live[:, None] & has_rest[None, :]
    queries_at = query + token_index[:, None] * query_stride + head[:, None] * whole
    q = _load(queries_at + dim[None, :], row_dims, WIDEN)
    if REST > 0:
        q_rest = _load(queries_at + WIDTH + rest[None, :], row_rests, WIDEN)
    first_at = of_first + token_index[:, None] * of_first_stride + head[:, None] * whole
    begin, end, ahead = _keys_of(before, first_position, context, window, split, TOKENS, KEYS, SPLITS, WINDOWED, FIRST)
    best = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sinks is not None:
        # A key without a value, before all others.
        best = tl.where(split == 0, tl.load(sinks + head), best)
        total = tl.where(split == 0, total + 1.0, total)
    result = tl.zeros([ROWS, WIDTH_PADDED], tl.float32)
    for key in range(begin - ahead, end, KEYS):
        at, there, is_first = _positions_of(key, begin, end, ahead, context, KEYS, FIRST)
        of_query = _for_keys(q, first_at + dim[None, :], row_dims, is_first, FIRST, WIDEN)
        of_sequence = tables + sequence.to(tl.int64) * table_stride
        row = _place_of(of_sequence, at, there, kv_head, CACHE_HEADS, BLOCK_SIZE)
        place = row * whole
        k = _from_cache(keys + place[None, :] + dim[:, None], there[None, :] & has_dim[:, None], q, CACHE, WIDEN)
        scores = tl.dot(of_query, k, input_precision="ieee")
        v_scale = None
        if CACHE == "int8":
            scores = scores * tl.load(key_scales + row, mask=there, other=0.0)[None, :]
            v_scale = tl.load(value_scales + row, mask=there, other=0.0)
        if REST > 0:
            # A latent, whose first part is the values too.
            v = tl.trans(k)
            rest_mask = there[None, :] & has_rest[:, None]
            k_rest = _load(keys + place[None, :] + WIDTH + rest[:, None], rest_mask, WIDEN)
            of_rest = _for_keys(q_rest, first_at + WIDTH + rest[None, :], row_rests, is_first, FIRST, WIDEN)
            scores += tl.dot(of_rest, k_rest, input_precision="ieee")
        else:
            v = _from_cache(values + place[:, None] + dim[None, :], there[:, None] & has_dim[None, :], q, CACHE, WIDEN)
        seen = there[None, :] & (at[None, :] <= position[:, None])
        if WINDOWED:
            seen = seen & ((at[None, :] > position[:, None] - window) | is_first)
        best, total, result = _attend(scores * scale, v, v_scale, seen, softcap, best, total, result, CAPPED)
    of_rows = token_index * HEADS + head
    part = split
    if COMMON == "all":
        part = PARTS - 1 - split
    _store(best, total, result, of_rows, part, live, dim, out, partial_out, partial_max, partial_sum, WIDTH, PARTS)


@triton.jit
def _merge_kernel(
    out, partial_out, partial_max, partial_sum, common_tokens,
    HEADS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_PADDED: tl.constexpr, PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr, OWN: tl.constexpr,
):  # fmt: skip
    """Join the parts of a row, of which those behind OWN are there if its sequence has something in common."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS_PADDED)
    dim = tl.arange(0, WIDTH_PADDED)
    there = part < PARTS
    if OWN < PARTS:
        there = there & ((part < OWN) | (tl.load(common_tokens + row // HEADS) > 0))
    maxima = tl.load(partial_max + row * PARTS + part, mask=there, other=-1.0e30)
    weights = tl.exp(maxima - tl.max(maxima, axis=0))
    sums = tl.load(partial_sum + row * PARTS + part, mask=there, other=0.0)
    parts = tl.load(
        partial_out + (row * PARTS + part)[:, None] * WIDTH + dim[None, :],
        mask=there[:, None] & (dim < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    result = tl.sum(parts * weights[:, None], axis=0) / tl.sum(sums * weights, axis=0)
    tl.store(out + row * WIDTH + dim, result.to(out.dtype.element_ty), mask=dim < WIDTH)


def numbers_of(cache: LayerCache) -> tuple[str, Tensor, Tensor, Tensor, Tensor]:
    """What kernels call the kind of a cache's numbers; keys, values and their scales, or any tensor for these."""
    if cache.key_scales is not None and cache.value_scales is not None:
        return "int8", cache.keys, cache.values, cache.key_scales, cache.value_scales
    if cache.keys.dtype == torch.float8_e4m3fn:
        keys, values = cache.keys.view(torch.uint8), cache.values.view(torch.uint8)
        return "fp8", keys, values, keys, values
    return "plain", cache.keys, cache.values, cache.keys, cache.values


def count_splits(
    step: StepGeometry, window: int | None, kv_heads: int, tiles: int, multiprocessors: int, sequences: int = 0
) -> int:
    """Into how many parts to cut what is seen of a context, so that each multiprocessor has about two programs.

    Args:
        tiles: of each sequence; or of so many `sequences`, if it is above 0.
    """
    programs = (sequences or step.num_sequences) * tiles * kv_heads
    wanted = triton.cdiv(2 * multiprocessors, programs)
    seen = step.max_context_len if window is None else min(step.max_context_len, window + step.max_query_len)
    most = max(1, min(wanted, seen // _LEAST_SPLIT_KEYS, _MOST_SPLITS))
    return 1 << (most.bit_length() - 1)  # each number is compiled for itself


def tile_sizes(
    group: int, width: int, max_query_len: int, itemsize: int, rounded: bool = False
) -> tuple[int, int, int]:
    """(rows of a tile, keys at a time, warps of a program); an element has itemsize bytes.

    tl.dot wants at least 16 rows; more pay only where queries are many. float32 is multiplied without tensor cores, its
    operands in registers: a larger tile spills kilobytes a thread, memory for which the pool has left no room. Numbers
    of a rounded cache need registers to be widened.
    """
    is_half = itemsize == 2
    rows = max(16, triton.next_power_of_2(group))
    rows = max(rows, min(64 if is_half else 16 if rounded else 32, triton.next_power_of_2(group * max_query_len)))
    if not is_half:
        return rows, 16, 8
    return (rows, 64, 8 if rounded and rows > 16 else 4) if width <= 128 else (rows, 32, 8)


def attention(
    query: Tensor, cache: LayerCache, step: StepGeometry, scale: float, sliding_window: int | None,
    sinks: Tensor | None, softcap: float | None, first: SinkQueries | None, multiprocessors: int,
) -> Tensor:  # fmt: skip
    """Causal paged attention of query [T, H, D], strided along T or not -> dense, as wide as values are."""
    tokens, heads, width = query.shape
    cache_heads, block_size = cache.keys.shape[1:3]
    rest = 0
    group = heads // cache_heads
    if cache.is_latent:  # which all heads share: a program takes some of them
        width, rest = cache.values.shape[3], width - cache.values.shape[3]
        group = next(each for each in range(min(_LATENT_HEADS, heads), 0, -1) if heads % each == 0)
    kv_heads = heads // group
    out = torch.empty((tokens, heads, width), dtype=query.dtype, device=query.device)
    if tokens == 0:
        return out
    longest = 1 if cache.is_latent else step.max_query_len  # rows of a latent are long, and registers few
    kind, *numbers = numbers_of(cache)
    of_dtype = query.element_size(), kind != "plain"
    rows, keys, warps = tile_sizes(group, width, longest, *of_dtype)
    tiles = triton.cdiv(step.max_query_len, rows // group)
    splits = count_splits(step, sliding_window, kv_heads, tiles, multiprocessors)
    # A program over latents has one token. A window has left most of what is common.
    common = None if cache.is_latent or sliding_window is not None or first is not None else step.common
    shared = 0
    if common is not None:
        of_all = tile_sizes(group, width, tokens, *of_dtype)
        all_tiles = triton.cdiv(len(common.queries), of_all[0] // group)
        shared = count_splits(step, None, kv_heads, all_tiles, multiprocessors, sequences=1)
    parts = splits + shared
    kept = parts if parts > 1 else 0
    float32 = {"dtype": torch.float32, "device": query.device}
    partial_out = torch.empty((tokens, heads, kept, width), **float32)  # type: ignore[call-overload]
    partial_max = torch.empty((tokens, heads, kept), **float32)  # type: ignore[call-overload]
    partial_sum = torch.empty((tokens, heads, kept), **float32)  # type: ignore[call-overload]
    # Triton's interpreter cannot multiply bfloat16: there, widen first.
    widen = not isinstance(_attention_kernel, triton.JITFunction)
    width_padded = max(16, triton.next_power_of_2(width))

    def launch(tiles: int, count: int, splits: int, sizes: tuple[int, int, int], of_common: str) -> None:
        # Only the first number of a grid may exceed 65,535.
        _attention_kernel[(tiles, count, kv_heads * splits)](
            query, *numbers, step.block_tables, step.query_start, step.context_lens,
            None if of_common == "all" else sinks, out, partial_out, partial_max, partial_sum,
            *((None, None, None) if common is None else (common.parts, common.queries, common.tokens)),
            scale, softcap or 0.0, query.stride(0), step.block_tables.stride(0),
            sliding_window or 0, *((query, 0) if first is None else (first.rows, first.rows.stride(0))),
            HEADS=heads, KV_HEADS=kv_heads, CACHE_HEADS=cache_heads, GROUP=group,
            WIDTH=width, WIDTH_PADDED=width_padded, REST=rest, REST_PADDED=max(16, triton.next_power_of_2(rest)),
            BLOCK_SIZE=block_size, ROWS=sizes[0], TOKENS=sizes[0] // group, KEYS=sizes[1], SPLITS=splits,
            WINDOWED=sliding_window is not None, CAPPED=softcap is not None, WIDEN=widen,
            FIRST=0 if first is None else first.num_keys, COMMON=of_common, PARTS=parts, CACHE=kind,
            num_warps=sizes[2],
        )  # fmt: skip

    launch(tiles, step.num_sequences, splits, (rows, keys, warps), "no" if common is None else "own")
    if common is not None:
        launch(all_tiles, len(common.parts), shared, of_all, "all")
    if parts > 1:
        _merge_kernel[(tokens * heads,)](
            out, partial_out, partial_max, partial_sum, None if common is None else common.tokens, HEADS=heads,
            WIDTH=width, WIDTH_PADDED=width_padded, PARTS=parts, PARTS_PADDED=triton.next_power_of_2(parts),
            OWN=splits,
        )  # fmt: skip
    return out
