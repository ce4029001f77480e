"""How weights of each kind are multiplied with activations and summed, sixteen weight rows at a time.

The unit is the word: four bytes of one token's activations, which every lane of a vector is multiplied with. A lane
belongs to a weight row and holds the row's weights for that word.

| kind | a word of activations | a lane of weights | sum |
|---|---|---|---|
| FLOAT32 | one float32 | one float32 | float32 |
| FLOAT16 | one float32 | one float16 | float32 |
| BFLOAT16, WIDENED | two bfloat16 | two bfloat16 | float32 |
| INT8 | four int8 | four uint8, 128 more than the weight | int32 |
| WIDE_INT8 | two int16 | two int8 | int32 |
| INT4 | eight words of four int8 | a scale of one byte, 32 of four bits, 8 more than the weight | int32 |
| GROUPS4 | four words of two int16 | eight of four bits | int32 |
| GROUPS8 | two int16 | two int8 | int32 |
| FLOAT8 | one float32 | one of eight bits, four for the exponent (e4m3fn) | float32 |
| FLOAT4 | four words of two int16 | eight of four bits, two for the exponent (e2m1) | int32 |
| NORMAL4 | eight words of one float32 | eight of four bits, numbers of NF4 | float32 |

A weight of INT4 times its scale, a whole number from -15 to 16, is multiplied like one of INT8. Of the last five kinds
groups of inputs have scales of their own, which cpu_groups multiplies sums with. A weight of FLOAT4 is multiplied as a
whole number, twice what it stands for.

Where the processor has an instruction that multiplies and adds a whole word (VNNI, AVX512-BF16), it is used. But the
two numbers of WIDENED become float32, which some processors multiply faster (cpu_choice). Other x86 multiplies pairs of
int16 and adds the two products (AVX2, AVX512-BW); elsewhere the same sums are put together from multiplications that
LLVM has for every processor. Sums of integers are exact, and so the same, whichever way is taken.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from llvmlite import ir

from headway.kernels.cpu.compile import types
from headway.kernels.cpu.ir import (
    F16,
    FLOATS,
    I8,
    I16,
    I32,
    LANES,
    PAIRS,
    VECTOR_BYTES,
    WORDS,
    declare,
    index,
    read,
    shuffle,
    word_constant,
)
from headway.kernels.cpu.simd import BFLOAT16, FLOAT16, FLOAT32, IS_X86, cpu_features
from headway.kernels.weights import NF4

INT8, WIDE_INT8, INT4 = np.uint8(0), np.int8(0), np.uint32(0)
GROUPS4, GROUPS8, FLOAT8, FLOAT4 = np.int32(0), np.uint64(0), np.float64(0), np.complex64(0)
NORMAL4, WIDENED = np.complex128(0), np.int64(0)
FLOAT8_UNIT = np.float32(256)  # numbers of FLOAT8 are multiplied as so many times less
# FLOAT4's codes are multiplied as these integers.
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

_FEATURES = cpu_features() if IS_X86 else set()
_WIDE = "avx512f" in _FEATURES
HAS_BF16 = _WIDE and "avx512bf16" in _FEATURES
# Bits of a vector for the instructions that multiply four bytes with four and that multiply pairs; 0 without them.
_VNNI = 512 if _WIDE and "avx512vnni" in _FEATURES else 256 if "avxvnni" in _FEATURES else 0
_PAIRS = 512 if _WIDE and "avx512bw" in _FEATURES else 256 if "avx2" in _FEATURES else 0
# Weight rows that are multiplied together: a panel.
PANEL_VECTORS = 4
PANEL = PANEL_VECTORS * LANES
# The most tokens of a tile. Where vectors are not wide, sixteen registers of 32 bytes (on ARM, 32 of 16) hold the sums
# of five tokens and sixteen rows, and what is multiplied; more would be put aside in memory at every word.
TILE_TOKENS = 6 if _WIDE else 5
# The most tokens that go through a panel in one pass, which reads memory straight through.
MOST_STRAIGHT = TILE_TOKENS if _WIDE else 1


def tile_vectors(tokens: int, kind: Any) -> int:
    """Vectors of weight rows in a tile of so many tokens: for few tokens more, so that multiplications overlap.

    Both halves of words that are widened need registers.
    """
    if _WIDE:
        return PANEL_VECTORS // 2 if tokens > 4 and _is_widened(kind) else PANEL_VECTORS
    return PANEL_VECTORS if tokens == 1 else 2 if tokens == 2 else 1


def _is_widened(kind: Any) -> bool:
    return kind == types.int64 or (kind == types.uint16 and not HAS_BF16)


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The layout of one kind."""

    stored: Any  # what is read of sixteen rows at a time
    words: int  # words of activations that a step is multiplied with; it is the least that is stored of a row
    inputs: int  # weights of a row in one word
    integer: bool  # whether sums are int32, to be scaled
    lane_bytes: int  # bytes that a step takes of one row
    offset: int = 0  # how much more than the weight is multiplied


_HALVES, _HALF_WORDS = ir.VectorType(F16, LANES), ir.VectorType(I16, LANES)
_SHORTS = ir.VectorType(I16, 2 * LANES)
_BYTES, _SCALES = ir.VectorType(I8, 2 * LANES), ir.VectorType(I8, LANES)

ARITHMETIC = {
    "float32": Arithmetic(WORDS, 1, 1, False, 4),
    "int16": Arithmetic(_HALVES, 1, 1, False, 2),
    "uint16": Arithmetic(WORDS, 1, 2, False, 4),
    "uint8": Arithmetic(WORDS, 1, 4, True, 4, offset=128),
    "int8": Arithmetic(_BYTES, 1, 2, True, 2),
    "uint32": Arithmetic(WORDS, 8, 4, True, 17, offset=128),
    "int32": Arithmetic(WORDS, 4, 2, True, 4),
    "uint64": Arithmetic(_BYTES, 1, 2, True, 2),
    "float64": Arithmetic(_SCALES, 1, 1, False, 1),
    "complex64": Arithmetic(WORDS, 4, 2, True, 4),
    "complex128": Arithmetic(WORDS, 8, 1, False, 4),
    "int64": Arithmetic(WORDS, 1, 2, False, 4),
}
GROUPED = (GROUPS4, GROUPS8, FLOAT8, FLOAT4, NORMAL4)
ALL_KINDS = (FLOAT32, FLOAT16, BFLOAT16, WIDENED, INT8, WIDE_INT8, INT4, *GROUPED)
assert set(ARITHMETIC) == {type(kind).__name__ for kind in ALL_KINDS}


def arithmetic_of(kind: Any) -> Arithmetic:
    """The layout of a kind given as a numpy scalar."""
    return ARITHMETIC[type(kind).__name__]


def _short(value: int) -> ir.Constant:
    return ir.Constant(_SHORTS, [value] * (2 * LANES))


def operands(builder: Any, kind: Any, step: Any, vector: int) -> list[Any]:
    """One operand for each word of activations, of sixteen rows: a vector of the panel step at an address."""
    if kind == types.uint32:
        return _scaled_nibbles(builder, step, vector)
    layout = ARITHMETIC[kind.name]
    if kind in (types.int32, types.complex64, types.complex128):
        stored = read(builder, builder.add(step, index(vector * VECTOR_BYTES)), WORDS)
        if kind == types.complex128:
            bits = (16 * odd + 4 * pair for pair in range(4) for odd in range(2))
            return [_looked_up(builder, builder.lshr(stored, word_constant(bit))) for bit in bits]
        words = [builder.lshr(stored, word_constant(bit)) for bit in (0, 4, 8, 12)]
        words = [builder.and_(word, word_constant(0x000F000F)) for word in words]
        return [_twice_e2m1(builder, word) for word in words] if kind == types.complex64 else words
    return [operand(builder, kind, builder.add(step, index(vector * LANES * layout.lane_bytes)))]


def operand(builder: Any, kind: Any, address: Any) -> Any:
    """Sixteen rows at an address, for one word of activations; not of INT4."""
    stored = read(builder, address, ARITHMETIC[kind.name].stored)
    if kind == types.int16:
        return builder.fpext(stored, FLOATS)
    if kind in (types.int8, types.uint64):
        return builder.bitcast(builder.sext(stored, _SHORTS), WORDS)
    if kind == types.float64:  # as float16 with the same bits, which is 256 times less
        wide = builder.shl(builder.zext(stored, _HALF_WORDS), ir.Constant(_HALF_WORDS, [8] * LANES))
        bits = builder.ashr(wide, ir.Constant(_HALF_WORDS, [1] * LANES))
        bits = builder.and_(bits, ir.Constant(_HALF_WORDS, [0xBFFF] * LANES))
        return builder.fpext(builder.bitcast(bits, _HALVES), FLOATS)
    return stored


def _twice_e2m1(builder: Any, codes: Any) -> Any:
    """Pairs of codes 0 .. 15 as pairs of int16, as E2M1 has them.

    A magnitude of 0 .. 7 is itself, one more for each above 4, and two more for each above 6.
    """
    codes = builder.bitcast(codes, _SHORTS)
    magnitude = builder.and_(codes, _short(7))
    subtract = declare(builder, "llvm.usub.sat.v32i16", _SHORTS, [_SHORTS, _SHORTS])
    above_four, above_six = (builder.call(subtract, [magnitude, _short(least)]) for least in (4, 6))
    number = builder.add(builder.add(magnitude, above_four), builder.add(above_six, above_six))
    sign = builder.ashr(builder.shl(codes, _short(12)), _short(15))
    return builder.bitcast(builder.sub(builder.xor(number, sign), sign), WORDS)


def _looked_up(builder: Any, codes: Any) -> Any:
    """The numbers of NF4 that the lowest four bits of each word stand for."""
    if _WIDE:
        permute = declare(builder, "llvm.x86.avx512.permvar.sf.512", FLOATS, [FLOATS, WORDS])
        return builder.call(permute, [ir.Constant(FLOATS, list(NF4)), codes])
    if _PAIRS:
        return _looked_up_in_halves(builder, codes)
    numbers = [ir.Constant(FLOATS, [number] * LANES) for number in NF4]
    for bit in range(4):
        is_odd = builder.trunc(builder.lshr(codes, word_constant(bit)), ir.VectorType(ir.IntType(1), LANES))
        numbers = [builder.select(is_odd, odd, even) for even, odd in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


def _looked_up_in_halves(builder: Any, codes: Any) -> Any:
    """The same with AVX2, which looks up eight of eight numbers."""
    floats, words = ir.VectorType(ir.FloatType(), 8), ir.VectorType(I32, 8)
    permute = declare(builder, "llvm.x86.avx2.permps", floats, [floats, words])
    halves = []
    for lanes in (list(range(8)), list(range(8, 16))):
        some = shuffle(builder, codes, codes, lanes)
        low, high = (builder.call(permute, [ir.Constant(floats, list(part)), some]) for part in (NF4[:8], NF4[8:]))
        is_high = builder.trunc(builder.lshr(some, ir.Constant(words, [3] * 8)), ir.VectorType(ir.IntType(1), 8))
        halves.append(builder.select(is_high, high, low))
    return shuffle(builder, halves[0], halves[1], list(range(LANES)))


def _scaled_nibbles(builder: Any, step: Any, vector: int) -> list[Any]:
    """Words of bytes, 128 more than weight times scale, from [row] scales, then [half word, row] two words of weights.

    A stored weight is 0 .. 15 and a scale -15 .. 16, stored as 128 more. So every byte of the result is one and none
    carries into the next, whatever becomes of the pair of bytes on the way.
    """
    scales = builder.zext(read(builder, builder.add(step, index(vector * LANES)), _SCALES), WORDS)
    scales = builder.bitcast(builder.or_(scales, builder.shl(scales, word_constant(16))), _SHORTS)
    scales = builder.sub(scales, _short(128))
    starts = builder.sub(_short(0x8080), builder.mul(scales, _short(8 * 0x0101)))
    result = []
    for pair in range(4):
        place = PANEL + (pair * PANEL_VECTORS + vector) * VECTOR_BYTES
        stored = read(builder, builder.add(step, index(place)), WORDS)
        for nibbles in (stored, builder.lshr(stored, word_constant(4))):
            weights = builder.bitcast(builder.and_(nibbles, word_constant(0x0F0F0F0F)), _SHORTS)
            result.append(builder.bitcast(builder.add(builder.mul(weights, scales), starts), WORDS))
    return result


def multiply_add(builder: Any, kind: Any, total: Any, weights: Any, x: Any) -> Any:
    """total + weights * x, lane by lane; x is one word in all lanes."""
    if kind in (types.float32, types.int16, types.float64, types.complex128):
        return fused(builder, total, builder.bitcast(weights, FLOATS), builder.bitcast(x, FLOATS))
    if _is_widened(kind):
        for half in (_low_half, _high_half):
            total = fused(builder, total, half(builder, weights), half(builder, x))
        return total
    if kind == types.uint16:
        dot = declare(builder, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [FLOATS, PAIRS, PAIRS])
        return builder.call(dot, [total, builder.bitcast(weights, PAIRS), builder.bitcast(x, PAIRS)])
    if _VNNI:
        name = "vpdpwssd" if ARITHMETIC[kind.name].inputs == 2 else "vpdpbusd"
        return _x86(builder, f"llvm.x86.avx512.{name}.{_VNNI}", I32, [total, weights, x], I32, _VNNI)
    if ARITHMETIC[kind.name].inputs == 2:
        return builder.add(total, _sum_of_pairs(builder, weights, x))
    left, right = builder.bitcast(weights, _SHORTS), builder.bitcast(x, _SHORTS)
    for odd in (False, True):
        unsigned = builder.lshr(left, _short(8)) if odd else builder.and_(left, _short(0xFF))
        signed = builder.ashr(right if odd else builder.shl(right, _short(8)), _short(8))
        total = builder.add(total, _sum_of_pairs(builder, unsigned, signed))
    return total


def fused(builder: Any, total: Any, left: Any, right: Any) -> Any:
    """total + left * right of float32 vectors, rounded once."""
    return builder.call(declare(builder, "llvm.fma.v16f32", FLOATS, [FLOATS, FLOATS, FLOATS]), [left, right, total])


def _sum_of_pairs(builder: Any, left: Any, right: Any) -> Any:
    """The products of the two int16 of each word, added, in int32."""
    if _PAIRS:
        name = "avx2.pmadd.wd" if _PAIRS == 256 else "avx512.pmaddw.d.512"
        return _x86(builder, f"llvm.x86.{name}", I32, [left, right], I16, _PAIRS)
    words, sixteen = [builder.bitcast(lanes, WORDS) for lanes in (left, right)], word_constant(16)
    high = [builder.ashr(word, sixteen) for word in words]
    low = [builder.ashr(builder.shl(word, sixteen), sixteen) for word in words]
    return builder.add(builder.mul(*low), builder.mul(*high))


def _x86(builder: Any, name: str, result: Any, vectors: list[Any], lane: Any, bits: int) -> Any:
    """An instruction on operands of sixteen words, taken `bits` at a time as vectors of `lane`; it gives `result`s."""
    taken, given = ir.VectorType(lane, bits // lane.width), ir.VectorType(result, bits // result.width)
    function = declare(builder, name, given, [taken] * len(vectors))
    words = [builder.bitcast(vector, WORDS) for vector in vectors]
    if bits == 512:
        return builder.bitcast(builder.call(function, [builder.bitcast(word, taken) for word in words]), WORDS)
    halves = []
    for numbers in (list(range(8)), list(range(8, 16))):
        parts = [builder.bitcast(shuffle(builder, word, word, numbers), taken) for word in words]
        halves.append(builder.bitcast(builder.call(function, parts), ir.VectorType(I32, 8)))
    return shuffle(builder, halves[0], halves[1], list(range(LANES)))


def _low_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.shl(words, word_constant(16)), FLOATS)


def _high_half(builder: Any, words: Any) -> Any:
    return builder.bitcast(builder.and_(words, word_constant(0xFFFF0000)), FLOATS)
