"""Scores of one query and a chunk of keys become weights of values, sixteen at a time, written as LLVM IR for Numba.

Scores have room for a whole chunk. Those from `low` to `high` - 1 count, and most often these are all: then there are
no masks, and no loop.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from headway.kernels.cpu.arithmetic import fused
from headway.kernels.cpu.chunks import CHUNK
from headway.kernels.cpu.compile import Kind, compiled, emitted, float32, int64, types
from headway.kernels.cpu.ir import (
    F32,
    FLOATS,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    WORDS,
    declare,
    index,
    loop,
    read,
    splat,
    word_constant,
    write,
)
from headway.kernels.cpu.rows import REORDER, soft_cap
from headway.kernels.cpu.simd import FLOAT32, larger, load, nearest, read_int32, round_to_bfloat16, store, write_rounded

MASKED = np.float32(-1e30)
_ZERO = np.float32(0)
_LARGEST = np.float32(32767)
_WIDE = np.int16(0)
_LOWEST, _LOG2_E = -87.0, 1.4426950408889634
# A number whose last bit counts ones, and to which float32 of a size below 2 ** 22 can be added.
_ROUNDING = 1.5 * 2.0**23
# (2 ** f - 1) / f on |f| <= 1/2, the highest power first: the relative error of 2 ** f is at most 1e-7. They were found
# by least squares with Lawson's weights.
_POWERS = (1.326472731307149e-3, 9.671512991189957e-3, 5.550733581185341e-2, 2.402224242687225e-1, 6.931470036506653e-1)


@compiled(fastmath=REORDER)
def scale_scores(scores, count, factor, scales):
    """int32 scores of quantised queries and keys to float32, in place."""
    for j in range(count):
        value = np.float32(read_int32(scores, j)) * factor
        store(scores, j, value * load(scales, j, FLOAT32), FLOAT32)


@compiled(fastmath=REORDER)
def cap_scores(scores, count, scale, cap):
    """Scores times the scale with a soft cap, in place."""
    for j in range(count):
        store(scores, j, soft_cap(load(scores, j, FLOAT32) * scale, cap), FLOAT32)


@compiled(fastmath=REORDER)
def round_weights(weights, scales, low, high, padded, target):
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


@emitted
def largest_score(builder: Any, scores: int64, low: int64, high: int64) -> float32:
    """The largest of the scores that count."""
    lowest = _floats(MASKED)

    def larger_of(best: Any, scored: Any) -> Any:
        function = declare(builder, "llvm.maxnum.v16f32", FLOATS, [FLOATS, FLOATS])
        return builder.call(function, [best, scored], fastmath=("nnan", "nsz"))

    def all_of() -> Any:
        return _joined(
            larger_of, [read(builder, _vector_at(builder, scores, index(v)), FLOATS) for v in range(CHUNK // LANES)]
        )

    def some_of(mask: Callable[[Any], Any]) -> Any:
        def body(vector: Any, totals: list[Any]) -> tuple[list[Any], int]:
            scored = read(builder, _vector_at(builder, scores, vector), FLOATS)
            return [larger_of(totals[0], builder.select(mask(vector), scored, lowest))], 1

        return loop(builder, _vectors(builder, high), [lowest], body)[0]

    best = _whole_or_not(builder, low, high, all_of, some_of)
    reduce = declare(builder, "llvm.vector.reduce.fmax.v16f32", F32, [FLOATS])
    return builder.call(reduce, [best], fastmath=("nnan", "nsz"))


@emitted
def weigh(
    builder: Any, kind: Kind, scores: int64, low: int64, high: int64, padded: int64, scale: float32, best: float32,
    weights: int64,
) -> float32:  # fmt: skip
    """Write weights exp(score * scale - best), as float32 or bfloat16, and return their sum before rounding.

    What does not count is zero up to `padded`, and to whole vectors. Weights may replace scores. A score that is NaN
    has a weight that is.
    """
    nothing = _floats(0.0)
    factor, less = splat(builder, scale, FLOATS), splat(builder, builder.fneg(best), FLOATS)
    size = 2 if kind == types.uint16 else 4

    def weight_of(vector: Any) -> Any:
        scored = read(builder, _vector_at(builder, scores, vector), FLOATS)
        return _exp_of_negative(builder, fused(builder, less, scored, factor))

    def put(weight: Any, vector: Any) -> None:
        rounded = round_to_bfloat16(builder, weight) if size == 2 else weight
        write(builder, rounded, builder.add(weights, builder.mul(vector, index(size * LANES))))

    def all_of() -> Any:
        made = []
        for vector in map(index, range(CHUNK // LANES)):
            made.append(weight_of(vector))
            put(made[-1], vector)
        return _joined(builder.fadd, made)

    def some_of(mask: Callable[[Any], Any]) -> Any:
        def body(vector: Any, totals: list[Any]) -> tuple[list[Any], int]:
            weight = builder.select(mask(vector), weight_of(vector), nothing)
            put(weight, vector)
            return [builder.fadd(totals[0], weight)], 1

        return loop(builder, _vectors(builder, padded), [nothing], body)[0]

    total = _whole_or_not(builder, low, high, all_of, some_of)
    reduce = declare(builder, "llvm.vector.reduce.fadd.v16f32", F32, [F32, FLOATS])
    return builder.call(reduce, [ir.Constant(F32, 0.0), total], fastmath=("reassoc",))


def _joined(join: Callable[[Any, Any], Any], vectors: list[Any]) -> Any:
    """All vectors, whose number is a power of two, in pairs and pairs of these, so that none waits for long."""
    while len(vectors) > 1:
        vectors = [join(*pair) for pair in zip(vectors[::2], vectors[1::2], strict=True)]
    return vectors[0]


def _whole_or_not(
    builder: Any, low: Any, high: Any, all_of: Callable[[], Any], some_of: Callable[[Callable[[Any], Any]], Any]
) -> Any:
    """What all_of gives where a whole chunk counts, or else some_of with the masks of vectors by their number."""
    first, end = (splat(builder, builder.trunc(each, I32), WORDS) for each in (low, high))
    of_lanes = ir.Constant(WORDS, list(range(LANES)))

    def mask(vector: Any) -> Any:
        start = splat(builder, builder.trunc(builder.mul(vector, index(LANES)), I32), WORDS)
        keys = builder.add(start, of_lanes)
        return builder.and_(builder.icmp_signed(">=", keys, first), builder.icmp_signed("<", keys, end))

    is_whole = builder.and_(builder.icmp_signed("==", low, index(0)), builder.icmp_signed("==", high, index(CHUNK)))
    results = []
    with builder.if_else(is_whole) as (whole, otherwise):
        with whole:
            results.append((all_of(), builder.block))
        with otherwise:
            results.append((some_of(mask), builder.block))
    chosen = builder.phi(FLOATS)
    for result, block in results:
        chosen.add_incoming(result, block)
    return chosen


def _exp_of_negative(builder: Any, x: Any) -> Any:
    """exp(x) for x <= 0, within (2 + |x| / 10) * 1e-7 of it; exp(-87) below that; 1 for 0, and NaN for NaN."""
    is_low = builder.fcmp_ordered("<", x, _floats(_LOWEST))
    x = builder.select(is_low, _floats(_LOWEST), x)
    shifted = fused(builder, _floats(_ROUNDING), x, _floats(_LOG2_E))
    power = builder.fsub(shifted, _floats(_ROUNDING))
    part = fused(builder, builder.fneg(power), x, _floats(_LOG2_E))
    result = _floats(_POWERS[0])
    for coefficient in (*_POWERS[1:], 1.0):
        result = fused(builder, _floats(coefficient), result, part)
    exponent = builder.shl(builder.bitcast(shifted, WORDS), word_constant(23))
    return builder.bitcast(builder.add(builder.bitcast(result, WORDS), exponent), FLOATS)


def _floats(value: Any) -> ir.Constant:
    return ir.Constant(FLOATS, [float(np.float32(value))] * LANES)


def _vector_at(builder: Any, scores: Any, vector: Any) -> Any:
    return builder.add(scores, builder.mul(vector, index(VECTOR_BYTES)))


def _vectors(builder: Any, count: Any) -> Any:
    """Vectors that have the first `count` scores."""
    return builder.lshr(builder.add(count, index(LANES - 1)), ir.Constant(I64, 4))
