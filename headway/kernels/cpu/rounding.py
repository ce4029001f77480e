"""Sixteen rows of weights, a lane each, rounded and put together into words: the inner loops of packing, in LLVM IR.

The rows come transposed: vectors of sixteen words, word by word, each of one float32 or of two bfloat16 or float16. All
that is done to a row happens in its lane, in the order of its elements.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from headway.kernels.cpu.arithmetic import ARITHMETIC, PANEL
from headway.kernels.cpu.compile import Kind, emitted, int64, types
from headway.kernels.cpu.ir import (
    F16,
    FLOATS,
    I8,
    I16,
    I32,
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

# For INT4: inputs that share a scale, the largest scale in units of the row's, and a group's largest rounded weight.
GROUP, LARGEST_SCALE, LARGEST_INT4 = 32, 16, 7.5
# -8 times the least scale still fits into a byte.
_LEAST_SCALE = -15
# Scales are tried between these fractions of the one that keeps a group's largest weight.
_LEAST_FRACTION, _MOST_FRACTION = 0.65, 1.1
_CANDIDATES = 9  # the most that lie between them
_BYTES, _SHORTS, _HALVES = (ir.VectorType(element, LANES) for element in (I8, I16, F16))
_SIZES = {"float32": 4, "uint16": 2, "int16": 2}


@emitted
def largest_of_rows(builder: Any, source: Kind, rows: int64, words: int64, out: int64) -> None:
    """out[lane] = the greatest magnitude of the row, float32; 1 for a row of zeros."""
    largest = _largest(builder, *_range(builder, source, rows, words))
    write(builder, _if_greater(builder, largest, _floats(0.0), largest, _floats(1.0)), out)


@emitted
def write_bytes(
    builder: Any, source: Kind, kind: Kind, rows: int64, steps: int64, largest: int64, offset: int64, out: int64,
    stride: int64,
) -> None:  # fmt: skip
    """Each element as a whole number, its row's largest as 127, and more by offset: `steps` lanes of a byte kind.

    out has `stride` bytes between steps.
    """
    assert kind in (types.uint8, types.int8), kind
    stored = WORDS if ARITHMETIC[kind.name].lane_bytes == 4 else _SHORTS
    words = ARITHMETIC[kind.name].inputs * _SIZES[source.name] // 4
    inverse = builder.fdiv(_floats(127.0), read(builder, largest, FLOATS))
    more = splat(builder, builder.trunc(offset, I32), WORDS)

    def body(step: Any, _: list[Any]) -> tuple[list[Any], int]:
        total = word_constant(0)
        first = builder.mul(step, index(words))
        for place, value in enumerate(_elements(builder, source, rows, first, words)):
            whole = builder.fptosi(_nearest(builder, builder.fmul(value, inverse)), WORDS)
            byte = builder.and_(builder.add(whole, more), word_constant(255))
            total = builder.or_(total, builder.shl(byte, word_constant(8 * place)))
        lanes = total if stored is WORDS else builder.trunc(total, stored)
        write(builder, lanes, builder.add(out, builder.mul(step, stride)))
        return [], 1

    loop(builder, steps, [], body)


@emitted
def write_groups(
    builder: Any, source: Kind, rows: int64, steps: int64, units: int64, vector: int64, out: int64, stride: int64,
) -> None:  # fmt: skip
    """The rows as `steps` groups of 4-bit weights, each group's scale first, to vector number `vector` of a panel.

    units are the rows' float32 scales. Byte b of a word has weights b and 4 + b. out has `stride` bytes between steps.
    """
    group_words, step_words = GROUP * _SIZES[source.name] // 4, 8 * _SIZES[source.name] // 4
    unit = read(builder, units, FLOATS)

    def body(step: Any, _: list[Any]) -> tuple[list[Any], int]:
        first = _place(builder, rows, builder.mul(step, index(group_words)))
        to = builder.add(out, builder.mul(step, stride))
        scale = _best_scale(builder, source, first, group_words, unit)
        stored = builder.trunc(builder.add(scale, word_constant(128)), _BYTES)
        write(builder, stored, builder.add(to, builder.mul(vector, index(LANES))))
        inverse = builder.fdiv(_floats(1.0), builder.fmul(builder.sitofp(scale, FLOATS), unit))
        for number in range(GROUP // 8):
            total = word_constant(0)
            elements = _elements(builder, source, first, index(number * step_words), step_words)
            for place, value in enumerate(elements):
                whole = builder.fptosi(_four_bits(builder, value, inverse), WORDS)
                shift = 8 * (place % 4) + 4 * (place // 4)
                total = builder.or_(total, builder.shl(builder.add(whole, word_constant(8)), word_constant(shift)))
            at = builder.add(to, builder.mul(vector, index(VECTOR_BYTES)))
            write(builder, total, builder.add(at, index(PANEL + number * PANEL * 4)))
        return [], 1

    loop(builder, steps, [], body)


def _best_scale(builder: Any, source: Any, rows: Any, words: int, unit: Any) -> Any:
    """The scale of each row's group, in units, that has the least square error; int32.

    Its sign makes the group's weight of greatest magnitude negative, because there is one more negative number.
    """
    least, greatest = _range(builder, source, rows, index(words))
    negative = builder.fcmp_ordered(">", builder.fadd(least, greatest), _floats(0.0))
    sign = builder.select(negative, word_constant(-1), word_constant(1))
    largest = _largest(builder, least, greatest)
    plain = builder.fdiv(largest, builder.fmul(_floats(LARGEST_INT4), unit))
    lowest = builder.fptosi(builder.fmul(plain, _floats(_LEAST_FRACTION)), WORDS)
    lowest = builder.select(builder.icmp_signed(">", lowest, word_constant(1)), lowest, word_constant(1))
    highest = builder.fptosi(builder.fmul(plain, _floats(_MOST_FRACTION)), WORDS)
    highest = builder.add(highest, word_constant(1))
    limit = builder.select(negative, word_constant(-_LEAST_SCALE), word_constant(LARGEST_SCALE))
    highest = builder.select(builder.icmp_signed("<", highest, limit), highest, limit)
    scales = [builder.add(lowest, word_constant(number)) for number in range(_CANDIDATES)]
    unit = builder.fmul(unit, builder.sitofp(sign, FLOATS))
    wide = [builder.fmul(builder.sitofp(scale, FLOATS), unit) for scale in scales]
    inverses = [builder.fdiv(_floats(1.0), each) for each in wide]

    def add_losses(word: Any, so_far: list[Any]) -> tuple[list[Any], int]:
        losses = list(so_far)
        for value in _elements(builder, source, rows, word, 1):
            for number, (scale, inverse) in enumerate(zip(wide, inverses, strict=True)):
                lost = builder.fsub(value, builder.fmul(_four_bits(builder, value, inverse), scale))
                losses[number] = builder.fadd(losses[number], builder.fmul(lost, lost))
        return losses, 1

    losses = loop(builder, index(words), [_floats(0.0)] * _CANDIDATES, add_losses)
    best, lowest_loss = lowest, _floats(float("inf"))
    for scale, loss in zip(scales, losses, strict=True):
        inside = builder.icmp_signed("<=", scale, highest)
        less = builder.and_(inside, builder.fcmp_ordered("<", loss, lowest_loss))
        best, lowest_loss = builder.select(less, scale, best), builder.select(less, loss, lowest_loss)
    return builder.mul(best, sign)


@emitted
def write_words(builder: Any, kind: Kind, rows: int64, steps: int64, out: int64, stride: int64) -> None:
    """The rows as they are, but for a byte kind's offset, in `steps` lanes; out has `stride` bytes between steps."""
    assert ARITHMETIC[kind.name].words == 1, kind
    in_word = 4 // ARITHMETIC[kind.name].lane_bytes

    def body(step: Any, _: list[Any]) -> tuple[list[Any], int]:
        word = builder.sdiv(step, index(in_word))
        lanes = read(builder, _place(builder, rows, word), WORDS)
        if ARITHMETIC[kind.name].offset:
            lanes = builder.xor(lanes, word_constant(0x80808080))  # 128 more, for each of four bytes
        if in_word == 2:
            half = builder.trunc(builder.srem(step, index(2)), I32)
            shift = splat(builder, builder.mul(half, ir.Constant(I32, 16)), WORDS)
            lanes = builder.trunc(builder.lshr(lanes, shift), _SHORTS)
        write(builder, lanes, builder.add(out, builder.mul(step, stride)))
        return [], 1

    loop(builder, steps, [], body)


def _largest(builder: Any, least: Any, greatest: Any) -> Any:
    """The greatest magnitude of what _range() gave."""
    return _if_greater(builder, greatest, builder.fneg(least), greatest, builder.fneg(least))


def _range(builder: Any, source: Any, rows: Any, words: Any) -> tuple[Any, Any]:
    """The least and the greatest in some words of each row, float32, as if there were a zero too."""

    def body(word: Any, so_far: list[Any]) -> tuple[list[Any], int]:
        least, greatest = so_far
        for value in _elements(builder, source, rows, word, 1):
            least = _if_greater(builder, least, value, value, least)
            greatest = _if_greater(builder, value, greatest, value, greatest)
        return [least, greatest], 1

    least, greatest = loop(builder, words, [_floats(0.0)] * 2, body)
    return least, greatest


def _elements(builder: Any, source: Any, rows: Any, first: Any, words: int) -> list[Any]:
    """The elements in some words of each row, from word `first` on, as float32."""
    elements = []
    for number in range(words):
        word = read(builder, _place(builder, rows, builder.add(first, index(number))), WORDS)
        if source == types.float32:
            elements.append(builder.bitcast(word, FLOATS))
        elif source == types.uint16:
            elements.append(builder.bitcast(builder.shl(word, word_constant(16)), FLOATS))
            elements.append(builder.bitcast(builder.and_(word, word_constant(0xFFFF0000)), FLOATS))
        else:
            for half in (word, builder.lshr(word, word_constant(16))):
                elements.append(builder.fpext(builder.bitcast(builder.trunc(half, _SHORTS), _HALVES), FLOATS))
    return elements


def _place(builder: Any, rows: Any, word: Any) -> Any:
    return builder.add(rows, builder.mul(word, index(VECTOR_BYTES)))


def _four_bits(builder: Any, value: Any, inverse: Any) -> Any:
    """value * inverse as a whole number of -8 .. 7, in float32."""
    low, high = _floats(-8.0), _floats(7.0)
    nearest = _nearest(builder, builder.fmul(value, inverse))
    nearest = _if_greater(builder, nearest, low, nearest, low)
    return _if_greater(builder, high, nearest, nearest, high)


def _nearest(builder: Any, value: Any) -> Any:
    return builder.call(declare(builder, "llvm.nearbyint.v16f32", FLOATS, [FLOATS]), [value])


def _if_greater(builder: Any, left: Any, right: Any, then: Any, otherwise: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", left, right), then, otherwise)


def _floats(value: float) -> ir.Constant:
    return ir.Constant(FLOATS, [float(value)] * LANES)
