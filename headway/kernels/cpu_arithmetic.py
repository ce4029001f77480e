"""How weights of each kind are multiplied with activations and summed, sixteen weight rows at a time.

The unit is the word: four bytes of one token's activations, which every lane of a vector is multiplied with. A lane
belongs to a weight row and holds the row's weights for that word.

| kind | a word of activations | a lane of weights | sum |
|---|---|---|---|
| FLOAT32 | one float32 | one float32 | float32 |
| FLOAT16 | one float32 | one float16 | float32 |
| BFLOAT16 | two bfloat16 | two bfloat16 | float32 |
| INT8 | four int8 | four uint8, 128 more than the weight | int32 |
| WIDE_INT8 | two int16 | two int8 | int32 |
| INT4 | eight words of four int8 | a scale of one byte, 32 of four bits, 8 more than the weight | int32 |

A weight of INT4 times its scale, a whole number from 1 to 16, is multiplied like one of INT8.

Where the processor has an instruction that multiplies and adds a whole word (VNNI, AVX512-BF16), it is used; elsewhere
the same sums are put together from multiplications that LLVM has for every processor.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from headway.kernels.cpu_ir import F16, FLOATS, I8, I16, LANES, PAIRS, VECTOR_BYTES, WORDS, declare, index, read
from headway.kernels.cpu_simd import BFLOAT16, FLOAT16, FLOAT32, cpu_features

INT8, WIDE_INT8, INT4 = np.uint8(0), np.int8(0), np.uint32(0)

_WIDE = platform.machine() in ("x86_64", "AMD64") and "avx512f" in cpu_features()
_HAS_BF16 = _WIDE and "avx512bf16" in cpu_features()
_HAS_VNNI = _WIDE and "avx512vnni" in cpu_features()
# Weight rows that are multiplied together: a panel.
PANEL_VECTORS = 4
PANEL = PANEL_VECTORS * LANES
# How many tokens and vectors of weight rows a tile has, so that its sums and operands fit into the registers.
TILE_TOKENS, TILE_VECTORS = (6, 4) if _WIDE else (3, 2)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The layout of one kind.

    Args:
        stored: what is read of sixteen rows at a time.
        words: of activations, that a step is multiplied with; it is the least that is stored of a row.
        inputs: weights of a row in one word.
        integer: whether sums are int32, to be scaled.
        lane_bytes: that a step takes of one row.
        offset: how much more than the weight is multiplied.
    """

    stored: Any
    words: int
    inputs: int
    integer: bool
    lane_bytes: int
    offset: int = 0


_HALVES = ir.VectorType(F16, LANES)
_BYTES, _SCALES = ir.VectorType(I8, 2 * LANES), ir.VectorType(I8, LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)

ARITHMETIC = {
    types.float32: Arithmetic(WORDS, 1, 1, False, 4),
    types.int16: Arithmetic(_HALVES, 1, 1, False, 2),
    types.uint16: Arithmetic(WORDS, 1, 2, False, 4),
    types.uint8: Arithmetic(WORDS, 1, 4, True, 4, offset=128),
    types.int8: Arithmetic(_BYTES, 1, 2, True, 2),
    types.uint32: Arithmetic(WORDS, 8, 4, True, 17, offset=128),
}
_TYPE_OF = {
    np.float32: types.float32, np.int16: types.int16, np.uint16: types.uint16, np.uint8: types.uint8,
    np.int8: types.int8, np.uint32: types.uint32,
}  # fmt: skip
assert set(_TYPE_OF) == {type(kind) for kind in (FLOAT32, FLOAT16, BFLOAT16, INT8, WIDE_INT8, INT4)}


def arithmetic_of(kind: Any) -> Arithmetic:
    """The layout of a kind given as a numpy scalar."""
    return ARITHMETIC[_TYPE_OF[type(kind)]]


def _constant(value: int) -> ir.Constant:
    return ir.Constant(WORDS, [value] * LANES)


def _short(value: int) -> ir.Constant:
    return ir.Constant(_SHORTS, [value] * (2 * LANES))


def operands(builder: Any, kind: Any, step: Any, vector: int) -> list[Any]:
    """One operand for each word of activations, of sixteen rows: a vector of the panel step at an address."""
    if kind == types.uint32:
        return _scaled_nibbles(builder, step, vector)
    layout = ARITHMETIC[kind]
    return [operand(builder, kind, builder.add(step, index(vector * LANES * layout.lane_bytes)))]


def operand(builder: Any, kind: Any, address: Any) -> Any:
    """Sixteen rows at an address, for one word of activations; not of INT4."""
    stored = read(builder, address, ARITHMETIC[kind].stored)
    if kind == types.int16:
        return builder.fpext(stored, FLOATS)
    if kind == types.int8:
        return builder.bitcast(builder.sext(stored, _SHORTS), WORDS)
    return stored


def _scaled_nibbles(builder: Any, step: Any, vector: int) -> list[Any]:
    """Words of bytes, 128 more than weight times scale, from [row] scales, then [half word, row] two words of weights.

    A stored weight is at most 15 and a scale at most 16, so that bytes are multiplied in pairs without a carry.
    """
    scales = builder.zext(read(builder, builder.add(step, index(vector * LANES)), _SCALES), WORDS)
    scales = builder.bitcast(builder.or_(scales, builder.shl(scales, _constant(16))), _SHORTS)
    starts = builder.sub(_short(0x8080), builder.mul(scales, _short(8 * 0x0101)))
    result = []
    for pair in range(4):
        place = PANEL + (pair * PANEL_VECTORS + vector) * VECTOR_BYTES
        stored = read(builder, builder.add(step, index(place)), WORDS)
        for nibbles in (stored, builder.lshr(stored, _constant(4))):
            weights = builder.bitcast(builder.and_(nibbles, _constant(0x0F0F0F0F)), _SHORTS)
            result.append(builder.bitcast(builder.add(builder.mul(weights, scales), starts), WORDS))
    return result


def multiply_add(builder: Any, kind: Any, total: Any, weights: Any, x: Any) -> Any:
    """total + weights * x, lane by lane; x is one word in all lanes."""
    if kind in (types.float32, types.int16):
        return fused(builder, total, builder.bitcast(weights, FLOATS), builder.bitcast(x, FLOATS))
    if kind == types.uint16:
        if _HAS_BF16:
            dot = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, PAIRS, PAIRS])
            return builder.call(dot, [total, builder.bitcast(weights, PAIRS), builder.bitcast(x, PAIRS)])
        for half in (_low_half, _high_half):
            total = fused(builder, total, half(builder, weights), half(builder, x))
        return total
    if kind == types.int8:
        if _HAS_VNNI:
            return _dot(builder, "llvm.x86.avx512.vpdpwssd.512", total, weights, x)
        return _sum_of_parts(builder, total, weights, x, 16, signed=True)
    if _HAS_VNNI:
        return _dot(builder, "llvm.x86.avx512.vpdpbusd.512", total, weights, x)
    return _sum_of_parts(builder, total, weights, x, 8, signed=False)


def fused(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right of float32 vectors, rounded once."""
    return builder.call(declare(builder, "llvm.fma.v16f32", FLOATS, [FLOATS, FLOATS, FLOATS]), [left, right, total])


def _dot(builder: Any, name: str, total: Any, weights: Any, x: Any) -> Any:
    return builder.call(declare(builder, name, WORDS, [WORDS, WORDS, WORDS]), [total, weights, x])


def _low_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, _constant(16)), FLOATS)


def _high_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, _constant(0xFFFF0000)), FLOATS)


def _sum_of_parts(builder: Any, total: Any, weights: Any, x: Any, bits: int, signed: bool) -> Any:
    """The parts of a word, `bits` wide, multiplied one after the other; those of x are signed."""
    for low in range(0, 32, bits):
        left, right = (builder.shl(word, _constant(32 - bits - low)) for word in (weights, x))
        left = (builder.ashr if signed else builder.lshr)(left, _constant(32 - bits))
        total = builder.add(total, builder.mul(left, builder.ashr(right, _constant(32 - bits))))
    return total
