"""Weights of whole numbers of up to eight bits times activations of sixteen, on matrix tiles, which multiply bytes.

An activation is 256 times its high byte, which has its sign, plus its low byte, which has none. So a sum of products is
256 times that with the high bytes plus that with the low ones. Both are exact, and so is the result: it has the bits
of vectors, and tiles may be taken from any number of tokens on.

A token has its high bytes, its plane, and then its low ones. Of a block of a panel, weights are unpacked to signed
bytes once for all tokens. A group of inputs with a scale of its own is a tile's step, or some of them; sums over it
are scaled as vectors have it.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir

from headway.kernels.cpu.arithmetic import PANEL, PANEL_VECTORS, WIDE_INT8, fused
from headway.kernels.cpu.compile import Kind, compiled, emitted, int64, types
from headway.kernels.cpu.groups import add_token, row_factors
from headway.kernels.cpu.ir import (
    F32,
    FLOATS,
    I8,
    I16,
    LANES,
    VECTOR_BYTES,
    WORDS,
    declare,
    index,
    loop,
    read,
    shuffle,
    splat,
    word_constant,
    write,
)
from headway.kernels.cpu.matrix import SPLIT, STEP_WORDS, first_of, multiply_two
from headway.kernels.cpu.panels import TOTALS_BYTES
from headway.kernels.cpu.simd import FLOAT32, store

LEAST_GROUP = 16
_WORD_BYTES = PANEL * 4  # the bytes of a word of all rows
_ZERO = np.float32(0)
# Eight inputs of a token as four-bit weights are unpacked, which saves moving these.
_BY_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
_HALVES, _ALL_BYTES = ir.VectorType(I16, LANES), ir.VectorType(I8, 4 * LANES)


def words_of_tile(size: int) -> int:
    """Words of a step on tiles for groups of `size` inputs, a multiple of 8; 0: they are not multiplied there.

    They cannot be cut into whole tiles, or are smaller than those that cpu_choice times: to scale the sums of so small
    groups takes as long as the products.
    """
    if size < LEAST_GROUP:
        return 0
    words = size // 4
    return words if words <= STEP_WORDS else 0 if words % STEP_WORDS else STEP_WORDS


def _has_nibbles(kind: Any) -> bool:
    return kind in (types.int32, types.complex64)


@compiled()
def plane_bytes(inputs):
    """The bytes of a plane of so many inputs, in whole lines."""
    return (inputs + VECTOR_BYTES - 1) // VECTOR_BYTES * VECTOR_BYTES


@emitted
def split_token(builder: Any, kind: Kind, x: int64, inputs: int64, x_bytes: int64) -> None:
    """Both planes of a token's int16 inputs, a multiple of 8, for weights of `kind`; nothing for one not of SPLIT.

    They are the last of the token's x_bytes.
    """
    if kind.name not in {type(each).__name__ for each in SPLIT}:
        return
    lines = builder.sdiv(builder.add(inputs, index(VECTOR_BYTES - 1)), index(VECTOR_BYTES))
    of_plane = builder.mul(lines, index(VECTOR_BYTES))
    low_plane = builder.add(x, builder.sub(x_bytes, of_plane))
    order = _BY_NIBBLES if _has_nibbles(kind) else range(8)

    def body(number: Any, nothing: list[Any]) -> tuple[list[Any], int]:
        numbers = read(builder, builder.add(x, builder.mul(number, index(16))), ir.VectorType(I8, 16))
        to = builder.add(low_plane, builder.mul(number, index(8)))
        write(builder, shuffle(builder, numbers, numbers, [2 * place for place in order]), to)
        high = shuffle(builder, numbers, numbers, [2 * place + 1 for place in order])
        write(builder, high, builder.sub(to, of_plane))
        return nothing, 1

    loop(builder, builder.sdiv(inputs, index(8)), [], body)


@emitted
def unpack_bytes(builder: Any, kind: Kind, packed: int64, words: int64, unpacked: int64) -> None:
    """A panel's weights for so many words of four inputs, as signed bytes, to unpacked[word, row]."""
    made = 2 if _has_nibbles(kind) else 1  # words of _WORD_BYTES of the panel

    def body(word: Any, nothing: list[Any]) -> tuple[list[Any], int]:
        at = builder.add(packed, builder.mul(builder.sdiv(word, index(made)), index(_WORD_BYTES)))
        to = builder.add(unpacked, builder.mul(word, index(_WORD_BYTES)))
        for vector in range(PANEL_VECTORS):
            for number, weights in enumerate(_bytes_of(builder, kind, at, vector)):
                place = index(number * _WORD_BYTES + vector * VECTOR_BYTES)
                write(builder, weights, builder.add(to, place))
        return nothing, made

    loop(builder, words, [], body)


def _bytes_of(builder: Any, kind: Any, at: Any, vector: int) -> list[Any]:
    """Words of signed bytes of sixteen rows."""
    if not _has_nibbles(kind):
        places = (index(step * _WORD_BYTES // 2 + vector * VECTOR_BYTES // 2) for step in range(2))
        first, second = (read(builder, builder.add(at, place), _HALVES) for place in places)
        lanes = [lane + half * LANES for lane in range(LANES) for half in range(2)]
        return [builder.bitcast(shuffle(builder, first, second, lanes), WORDS)]
    stored = read(builder, builder.add(at, index(vector * VECTOR_BYTES)), WORDS)
    words = (builder.and_(each, word_constant(0x0F0F0F0F)) for each in (stored, builder.lshr(stored, word_constant(4))))
    return [_twice_e2m1(builder, word) if kind == types.complex64 else word for word in words]


def _twice_e2m1(builder: Any, codes: Any) -> Any:
    """Four codes 0 .. 15 a word, as cpu.arithmetic has them in pairs."""

    def of_all(value: int) -> ir.Constant:
        return ir.Constant(_ALL_BYTES, [value] * (4 * LANES))

    signs = builder.and_(builder.lshr(codes, word_constant(3)), word_constant(0x01010101))
    negative = builder.sub(of_all(0), builder.bitcast(signs, _ALL_BYTES))
    magnitude = builder.and_(builder.bitcast(codes, _ALL_BYTES), of_all(7))
    subtract = declare(builder, "llvm.usub.sat.v64i8", _ALL_BYTES, [_ALL_BYTES, _ALL_BYTES])
    above_four, above_six = (builder.call(subtract, [magnitude, of_all(least)]) for least in (4, 6))
    number = builder.add(builder.add(magnitude, above_four), builder.add(above_six, above_six))
    return builder.sub(builder.xor(number, negative), negative)


@emitted
def _add_planes(
    builder: Any, kind: Kind, tokens: int64, high: int64, low: int64, totals: int64, scales: int64, stride: int64,
    header: int64, row_scales: int64, minima: int64,
) -> None:  # fmt: skip
    """totals[t, row] += the sums of both planes over a group, scaled as multiply_panel or multiply_groups do.

    Sums are int32; they and totals have TOTALS_BYTES a token, scales have `stride`. WIDE_INT8 has no header, and no
    scales of rows.
    """
    in_groups, vectors = kind != types.int8, range(PANEL_VECTORS)
    if in_groups:
        of_rows = [row_factors(builder, header, row_scales, v) for v in vectors]
        less = [row_factors(builder, builder.add(header, index(PANEL)), minima, v) for v in vectors]

    def body(token: Any, nothing: list[Any]) -> tuple[list[Any], int]:
        line = builder.mul(token, index(TOTALS_BYTES))
        places = [builder.add(line, index(v * VECTOR_BYTES)) for v in vectors]
        sums = []
        for place in places:
            upper, lower = (read(builder, builder.add(at, place), WORDS) for at in (high, low))
            sums.append(builder.add(builder.shl(upper, word_constant(8)), lower))
        before = [read(builder, builder.add(totals, place), FLOATS) for place in places]
        of_token = builder.add(scales, builder.mul(token, stride))
        if in_groups:
            results = add_token(builder, of_token, before, sums, of_rows, less)
        else:
            factor = splat(builder, read(builder, of_token, F32), FLOATS)
            pairs = zip(before, sums, strict=True)
            results = [fused(builder, total, builder.sitofp(part, FLOATS), factor) for total, part in pairs]
        for place, result in zip(places, results, strict=True):
            write(builder, result, builder.add(totals, place))
        return nothing, 1

    loop(builder, tokens, [], body)


@compiled()
def multiply_planes(
    kind, tokens, rows, planes, x_stride, of_plane, packed, inputs, size, together, group_bytes, header, totals,
    scales, stride, unpacked, sums, more,
):  # fmt: skip
    """A panel with the tokens whose planes these are, in groups of `rows` tokens, whose sums follow each other.

    A plane has of_plane bytes. `together` groups of `size` inputs are unpacked at a time. A group has group_bytes,
    `header` of them before its numbers. `sums` is room for those of two groups of tokens; `more` is (shift, scales of
    rows, minima, the bytes between these), as multiply_groups has it.
    """
    shift, row_scales, minima, minima_stride = more
    parts = (tokens + rows - 1) // rows
    low = sums + rows * TOTALS_BYTES
    for i in range(parts * rows * PANEL):
        store(totals, i, _ZERO, FLOAT32)
    for first in range(0, inputs, together * size):
        end = min(inputs, first + together * size)
        for start in range(first, end, size):
            at = packed + start // size * group_bytes + header
            unpack_bytes(kind, at, (min(end, start + size) - start) // 4, unpacked + (start - first) * PANEL)
        for part in range(parts):
            token, to = first_of(part, parts, tokens, rows), totals + part * rows * TOTALS_BYTES
            for start in range(first, end, size):
                steps = max(1, (min(end, start + size) - start) // (4 * STEP_WORDS))
                x, weights = planes + token * x_stride + start, unpacked + (start - first) * PANEL
                for half in range(0, TOTALS_BYTES, TOTALS_BYTES // 2):
                    multiply_two(
                        WIDE_INT8, x, x + of_plane, x_stride, weights + half, steps, sums + half, low + half, 1
                    )
                group = start // size
                _add_planes(
                    kind, rows, sums, low, to, scales + token * stride + group * 8, stride,
                    packed + group * group_bytes, row_scales + (group >> shift) * PANEL * 4,
                    minima + (group >> shift) * minima_stride,
                )  # fmt: skip
