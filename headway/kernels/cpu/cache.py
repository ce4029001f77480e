"""How keys and values lie in a block of the cache on CPU, and how they get there.

A cache tensor is [N, G, B, D] by its size; what one block holds for one head is arranged for the products of attention
where block size and head dimension are multiples of sixteen. Keys: panels of sixteen tokens, [panel, word, token]; a
word is one element of a key, or two where the kind's words are pairs. Values: [word, element]; a word is one token, or
two.
Elsewhere a block is plainly [token, element], and attention arranges what it needs as it goes.

An int8 cache has a float32 scale for each token and head beside it; one of FLOAT8 has none.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headway.kernels.cpu.arithmetic import FLOAT8, WIDE_INT8, arithmetic_of
from headway.kernels.cpu.compile import compiled
from headway.kernels.cpu.ir import LANES
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_rows
from headway.kernels.cpu.simd import FLOAT32, larger, load, nearest, read_int64, store, store_float8, write_rounded

_ZERO, _LARGEST = np.float32(0), np.float32(127)


def is_arranged(block_size: int, width: int) -> bool:
    """Whether blocks of this size are arranged for products."""
    return block_size % LANES == 0 and width % LANES == 0


@compiled(inline="always")
def key_place(arranged, inputs, width, offset, element):
    """Where an element of the key of token `offset` stands in a block's part for one head, in elements."""
    if arranged == 0:
        return offset * width + element
    panel, lane = offset // LANES, offset % LANES
    return panel * LANES * width + (element // inputs * LANES + lane) * inputs + element % inputs


@compiled(inline="always")
def value_place(arranged, inputs, width, offset, element):
    """The place of an element of a value, as key_place has that of a key."""
    if arranged == 0:
        return offset * width + element
    return (offset // inputs * width + element) * inputs + offset % inputs


@compiled()
def _largest(source, first, width, kind):
    best = _ZERO
    for d in range(width):
        best = larger(best, abs(load(source, first + d, kind)))
    return best


STORE = struct.Struct("16q")


@once_per_kind
def store_job(kind: Any, cache_kind: Any) -> int:
    """Write keys and values of tokens to their slots. An int8 cache rounds them, by a scale for each token and head."""
    inputs = arithmetic_of(cache_kind).inputs
    is_integer, is_float8 = cache_kind is WIDE_INT8, cache_kind is FLOAT8
    byte = np.int8(0)

    def rows(a: int) -> None:
        step, count = arg(a, 0), arg(a, 1)
        key, key_stride, value, value_stride = arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        keys, values, slots, kv_heads, block_size = arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10)
        width, arranged, size = arg(a, 11), arg(a, 12), arg(a, 13)
        key_scales, value_scales = arg(a, 14), arg(a, 15)
        first = take_rows(a, step)
        while first < count:
            for token in range(first, min(first + step, count)):
                slot = read_int64(slots, token)
                block, offset = slot // block_size, slot % block_size
                for head in range(kv_heads):
                    part = block * kv_heads + head
                    at = part * block_size * width * size
                    source_key = token * key_stride + head * width
                    source_value = token * value_stride + head * width
                    if is_integer:
                        place = part * block_size + offset
                        best = _largest(key, source_key, width, kind)
                        factor = _LARGEST / best if best > _ZERO else _ZERO
                        store(key_scales, place, best / _LARGEST, FLOAT32)
                        for d in range(width):
                            to = key_place(arranged, inputs, width, offset, d)
                            write_rounded(keys + at, to, nearest(load(key, source_key + d, kind) * factor), byte)
                        best = _largest(value, source_value, width, kind)
                        factor = _LARGEST / best if best > _ZERO else _ZERO
                        store(value_scales, place, best / _LARGEST, FLOAT32)
                        for d in range(width):
                            to = value_place(arranged, inputs, width, offset, d)
                            write_rounded(values + at, to, nearest(load(value, source_value + d, kind) * factor), byte)
                    elif is_float8:
                        for d in range(width):
                            to = key_place(arranged, inputs, width, offset, d)
                            store_float8(keys + at, to, load(key, source_key + d, kind))
                        for d in range(width):
                            to = value_place(arranged, inputs, width, offset, d)
                            store_float8(values + at, to, load(value, source_value + d, kind))
                    else:
                        for d in range(width):
                            to = key_place(arranged, inputs, width, offset, d)
                            store(keys + at, to, load(key, source_key + d, kind), kind)
                        for d in range(width):
                            to = value_place(arranged, inputs, width, offset, d)
                            store(values + at, to, load(value, source_value + d, kind), kind)
            first = take_rows(a, step)

    return job(rows)
