"""Tiles of matrix products for Numba, written as LLVM IR, so that no compiler is needed to install.

The unit is the word of four bytes: one float32, or a pair of neighbouring bfloat16 that one instruction
(`vdpbf16ps`) multiplies with another pair and adds in float32. Sixteen words make a vector. A tile keeps
its totals in registers: at most 24 of the 32, the rest being for operands. Kinds are FLOAT32 or BFLOAT16.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headway.kernels.cpu_ir import (
    BF16,
    F32,
    FLOATS,
    I16,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    WORDS,
    index,
    loop,
    multiply_add,
    prefetch,
    read,
    shuffle,
    splat,
    sums,
    transpose,
    write,
)

_TILE_KINDS = {types.float32, types.uint16}


def _literals(*arguments: Any) -> list[int] | None:
    if all(isinstance(argument, types.IntegerLiteral) for argument in arguments):
        return [argument.literal_value for argument in arguments]
    return None


def _store_row(builder: Any, kind: Any, values: Any, address: Any, bias: Any) -> None:
    """Add the bias and write one row of results; bias is a vector of as many float32."""
    values = builder.fadd(values, bias)
    if kind == types.uint16:
        values = builder.fptrunc(values, ir.VectorType(BF16, values.type.count))
    write(builder, values, address)


def _bias_or_zeros(builder: Any, kind: Any, address: Any, count: int) -> Any:
    """The float32 vector of the `count` elements at address, or of zeros where address is 0."""
    stored = ir.VectorType(BF16 if kind == types.uint16 else F32, count)
    zeros = ir.Constant(ir.VectorType(F32, count), [0.0] * count)
    with builder.if_else(builder.icmp_signed("!=", address, index(0))) as (then, otherwise):
        with then:
            loaded = builder.load(builder.inttoptr(address, stored.as_pointer()))
            loaded.align = 2
            loaded = builder.fpext(loaded, zeros.type) if kind == types.uint16 else loaded
            then_block = builder.block
        with otherwise:
            else_block = builder.block
    bias = builder.phi(zeros.type)
    bias.add_incoming(loaded, then_block)
    bias.add_incoming(zeros, else_block)
    return bias


@intrinsic(prefer_literal=True)
def dot_rows(
    typing: Any, kind: Any, rows: Any, tokens: Any, weight: Any, x: Any, words: Any, bias: Any, out: Any, stride: Any
) -> Any:
    """out[t, r] = sum over words of weight[r] * x[t] (+ bias[r]), reading `rows` rows of weight and all of x once.

    weight and x are dense rows of `words` words, a multiple of sixteen; out has `stride` bytes between
    tokens; a bias at address 0 is none.
    """
    constants = _literals(rows, tokens)
    if constants is None or kind not in _TILE_KINDS:
        return None
    rows_, tokens_ = constants

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weight, x, words, bias, out, stride = arguments[3:]
        row_bytes = builder.mul(words, index(4))
        weights = [builder.add(weight, builder.mul(row_bytes, index(r))) for r in range(rows_)]
        inputs = [builder.add(x, builder.mul(row_bytes, index(t))) for t in range(tokens_)]
        following = builder.add(weight, builder.mul(row_bytes, index(rows_)))

        def body(word: Any, totals: list[Any]) -> tuple[list[Any], int]:
            at = builder.mul(word, index(4))
            left = [read(builder, builder.add(address, at), WORDS) for address in weights]
            right = [read(builder, builder.add(address, at), WORDS) for address in inputs]
            ahead = builder.add(following, builder.mul(at, index(rows_)))
            for line in range(rows_):
                prefetch(builder, builder.add(ahead, index(line * VECTOR_BYTES)))
            pairs = [(t, r) for t in range(tokens_) for r in range(rows_)]
            return [
                multiply_add(builder, kind, total, left[r], right[t])
                for total, (t, r) in zip(totals, pairs, strict=True)
            ], LANES

        totals = loop(builder, words, rows_ * tokens_, body)
        per_vector = LANES // rows_
        addend = _bias_or_zeros(builder, kind, bias, rows_)
        for first in range(0, tokens_, per_vector):
            group = range(first, min(first + per_vector, tokens_))
            summed = sums(builder, [totals[t * rows_ + r] for t in group for r in range(rows_)])
            for place, t in enumerate(group):
                values = shuffle(builder, summed, summed, [place * rows_ + r for r in range(rows_)])
                _store_row(builder, kind, values, builder.add(out, builder.mul(stride, index(t))), addend)
        return context.get_dummy_value()

    signature = types.void(kind, rows, tokens, *[types.int64] * 6)
    return signature, generate


def _broadcast_tile(
    builder: Any, kind: Any, rows: int, panels: int, left: Any, left_stride: Any, packed: Any, panel_stride: Any,
    words: Any, following: Any = None,
) -> list[Any]:  # fmt: skip
    """Totals [rows * panels] of left[row, word] times packed[panel, word, lane], summed over words."""
    lefts = [builder.add(left, builder.mul(left_stride, index(r))) for r in range(rows)]
    panels_at = [builder.add(packed, builder.mul(panel_stride, index(p))) for p in range(panels)]

    def body(word: Any, totals: list[Any]) -> tuple[list[Any], int]:
        at, vector_at = builder.mul(word, index(4)), builder.mul(word, index(VECTOR_BYTES))
        right = [read(builder, builder.add(address, vector_at), WORDS) for address in panels_at]
        if following is not None:
            prefetch(builder, builder.add(following, builder.mul(at, index(rows))))
        results = []
        for r, address in enumerate(lefts):
            value = splat(builder, read(builder, builder.add(address, at), I32), WORDS)
            for p in range(panels):
                results.append(multiply_add(builder, kind, totals[r * panels + p], value, right[p]))
        return results, 1

    return loop(builder, words, rows * panels, body)


@intrinsic(prefer_literal=True)
def product_tile(
    typing: Any, kind: Any, rows: Any, panels: Any, left: Any, left_stride: Any, packed: Any, panel_stride: Any,
    words: Any, out: Any, out_stride: Any, accumulate: Any,
) -> Any:  # fmt: skip
    """out[row, 16 * panel + lane] (+)= sum over words of left[row, word] * packed[panel, word, lane].

    left rows are left_stride bytes apart, packed panels panel_stride bytes, out is float32 with out_stride
    bytes between rows and is added to if accumulate is not zero.
    """
    constants = _literals(rows, panels)
    if constants is None or kind not in _TILE_KINDS:
        return None
    rows_, panels_ = constants

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, left_stride, packed, panel_stride, words, out, out_stride, accumulate = arguments[3:]
        totals = _broadcast_tile(
            builder, kind, rows_, panels_, left, left_stride, packed, panel_stride, words
        )  # fmt: skip
        places = [
            builder.add(builder.add(out, builder.mul(out_stride, index(r))), index(p * VECTOR_BYTES))
            for r in range(rows_)
            for p in range(panels_)
        ]
        with builder.if_else(builder.icmp_signed("!=", accumulate, index(0))) as (then, otherwise):
            with then:
                for total, place in zip(totals, places, strict=True):
                    write(builder, builder.fadd(total, read(builder, place, FLOATS)), place)
            with otherwise:
                for total, place in zip(totals, places, strict=True):
                    write(builder, total, place)
        return context.get_dummy_value()

    signature = types.void(kind, rows, panels, *[types.int64] * 8)
    return signature, generate


@intrinsic(prefer_literal=True)
def product_tile_transposed(
    typing: Any, kind: Any, rows: Any, panels: Any, left: Any, left_stride: Any, packed: Any, panel_stride: Any,
    words: Any, bias: Any, out: Any, out_stride: Any, tokens: Any,
) -> Any:  # fmt: skip
    """out[16 * panel + lane, row] = sum over words of left[row, word] * packed[panel, word, lane] (+ bias[row]).

    out and bias are of the kind itself, out_stride bytes between tokens; lanes at or beyond `tokens` are
    not written. A bias at address 0 is none.
    """
    constants = _literals(rows, panels)
    if constants is None or kind not in _TILE_KINDS:
        return None
    rows_, panels_ = constants

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, left_stride, packed, panel_stride, words, bias, out, out_stride, tokens = arguments[3:]
        following = builder.add(left, builder.mul(left_stride, index(rows_)))
        totals = _broadcast_tile(
            builder, kind, rows_, panels_, left, left_stride, packed, panel_stride, words, following
        )  # fmt: skip
        addend = _bias_or_zeros(builder, kind, bias, rows_)
        undefined = ir.Constant(FLOATS, ir.Undefined)
        for p in range(panels_):
            block = [totals[r * panels_ + p] for r in range(rows_)] + [undefined] * (LANES - rows_)
            for lane, column in enumerate(transpose(builder, block)):
                token = p * LANES + lane
                with builder.if_then(builder.icmp_signed("<", index(token), tokens)):
                    values = shuffle(builder, column, column, list(range(rows_)))
                    _store_row(
                        builder, kind, values, builder.add(out, builder.mul(out_stride, index(token))), addend
                    )  # fmt: skip
        return context.get_dummy_value()

    signature = types.void(kind, rows, panels, *[types.int64] * 9)
    return signature, generate


@intrinsic
def transpose_words(typing: Any, addresses: Any, offset: Any, out: Any) -> Any:
    """out[word, lane] = word of the row at addresses[lane] + offset: sixteen words of sixteen rows.

    addresses points to sixteen int64 addresses; out takes 1,024 dense bytes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses, offset, out = arguments
        rows = []
        for lane in range(LANES):
            row = read(builder, builder.add(addresses, index(8 * lane)), I64)
            rows.append(read(builder, builder.add(row, offset), WORDS))
        for word, column in enumerate(transpose(builder, rows)):
            write(builder, column, builder.add(out, index(word * VECTOR_BYTES)))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic(prefer_literal=True)
def pair_rows(typing: Any, lanes: Any, first: Any, second: Any, out: Any) -> Any:
    """out[lane] = the 16-bit elements first[lane] and second[lane] as one word; lanes beyond `lanes` are 0."""
    constants = _literals(lanes)
    if constants is None:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        halves, words = (ir.VectorType(type_, constants[0]) for type_ in (I16, I32))
        low, high = (builder.load(builder.inttoptr(at, halves.as_pointer())) for at in arguments[1:3])
        low.align = high.align = 2
        shift = ir.Constant(words, [16] * constants[0])
        paired = builder.or_(builder.zext(low, words), builder.shl(builder.zext(high, words), shift))
        if constants[0] < LANES:
            zeros = ir.Constant(words, [0] * constants[0])
            paired = shuffle(builder, paired, zeros, [min(i, constants[0]) for i in range(LANES)])
        write(builder, paired, arguments[3])
        return context.get_dummy_value()

    return types.void(lanes, types.int64, types.int64, types.int64), generate
