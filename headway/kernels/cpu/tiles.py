"""The inner loops of attention and the rearranging of memory, written as LLVM IR for Numba.

Both products of attention multiply words of activations with vectors of sixteen lanes, as cpu.arithmetic has it. For
scores, a lane is a key and words run over its elements; for values, a lane is an element and words run over keys.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from headway.kernels.cpu.arithmetic import ARITHMETIC, TILE_TOKENS, multiply_add, operand, tile_vectors
from headway.kernels.cpu.compile import intrinsic, types
from headway.kernels.cpu.ir import FLOATS, I32, I64, LANES, WORDS, index, loop, prefetch, read, splat, transpose, write

PANELS_AT_ONCE = 4

AddressOf = Callable[[Any, int], Any]  # takes a word and a vector


@intrinsic
def multiply_keys(
    typing: Any, kind: Any, rows: Any, x: Any, x_stride: Any, panels: Any, following: Any, words: Any, out: Any,
    out_stride: Any,
) -> Any:  # fmt: skip
    """out[row, panel, lane] = sum over words of x[row, word] times the word of a key.

    For 1 to TILE_TOKENS rows of x and PANELS_AT_ONCE panels, whose addresses stand at `panels`; a panel is [word,
    lane]. The panels whose addresses stand at `following` are prefetched. out is float32, or int32 for an integer
    kind; strides are in bytes.
    """
    if kind.name not in ARITHMETIC:
        return None
    vector_bytes = ARITHMETIC[kind.name].lane_bytes * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, x, x_stride, panels, following, words, out, out_stride = arguments[1:]

        def addresses(table: Any) -> AddressOf:
            bases = [read(builder, builder.add(table, index(8 * p)), I64) for p in range(PANELS_AT_ONCE)]
            return lambda word, vector: builder.add(bases[vector], builder.mul(word, index(vector_bytes)))

        lanes = addresses(panels), addresses(following)
        _by_rows(builder, kind, rows, (x, x_stride), lanes, words, (out, out_stride), add=False)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 8), generate


@intrinsic
def multiply_values(
    typing: Any, kind: Any, rows: Any, x: Any, x_stride: Any, lines: Any, following: Any, offset: Any, last: Any,
    words: Any, out: Any, out_stride: Any,
) -> Any:  # fmt: skip
    """out[row, lane] (+)= sum over words of x[row, word] times PANELS_AT_ONCE vectors, `offset` bytes into a line.

    For 1 to TILE_TOKENS rows of x; the addresses of the lines, one for each word, stand at `lines`. Vectors after
    number `last` repeat it. The lines whose addresses stand at `following` are prefetched. out is float32 and added to,
    or int32 for an integer kind and written; strides are in bytes.
    """
    if kind.name not in ARITHMETIC:
        return None
    vector_bytes = ARITHMETIC[kind.name].lane_bytes * LANES

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        rows, x, x_stride, lines, following, offset, last, words, out, out_stride = arguments[1:]
        offsets = []
        for vector in range(PANELS_AT_ONCE):
            inside = builder.icmp_signed("<=", index(vector), last)
            number = builder.select(inside, index(vector), last)
            offsets.append(builder.add(offset, builder.mul(number, index(vector_bytes))))

        def addresses(table: Any) -> AddressOf:
            def address(word: Any, vector: int) -> Any:
                line = read(builder, builder.add(table, builder.mul(word, index(8))), I64)
                return builder.add(line, offsets[vector])

            return address

        add = not ARITHMETIC[kind.name].integer
        lanes = addresses(lines), addresses(following)
        _by_rows(builder, kind, rows, (x, x_stride), lanes, words, (out, out_stride), add)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 10), generate


def _by_rows(
    builder: Any, kind: Any, rows: Any, x: tuple[Any, Any], lanes: tuple[AddressOf, AddressOf], words: Any,
    out: tuple[Any, Any], add: bool,
) -> None:  # fmt: skip
    """A tile for each number of rows, and the choice between them."""
    end = builder.append_basic_block("end")
    choice = builder.switch(rows, end)
    for count in range(1, TILE_TOKENS + 1):
        case = builder.append_basic_block(f"rows_{count}")
        choice.add_case(index(count), case)
        builder.position_at_end(case)
        for vector in range(0, PANELS_AT_ONCE, tile_vectors(count, kind)):
            _tile(builder, kind, count, range(vector, vector + tile_vectors(count, kind)), x, lanes, words, out, add)
        builder.branch(end)
    builder.position_at_end(end)


def _tile(
    builder: Any, kind: Any, rows: int, vectors: range, x: tuple[Any, Any], lanes: tuple[AddressOf, AddressOf],
    words: Any, out: tuple[Any, Any], add: bool,
) -> None:  # fmt: skip
    address, following = lanes
    layout = ARITHMETIC[kind.name]
    inputs = [builder.add(x[0], builder.mul(x[1], index(r))) for r in range(rows)]
    outputs = [builder.add(out[0], builder.mul(out[1], index(r))) for r in range(rows)]
    places = [builder.add(output, index(v * LANES * 4)) for output in outputs for v in vectors]

    def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
        for v in vectors:
            prefetch(builder, following(word, v))
        stored = [operand(builder, kind, address(word, v)) for v in vectors]
        at = builder.mul(word, index(4))
        results = []
        for r, row in enumerate(inputs):
            value = splat(builder, read(builder, builder.add(row, at), I32), WORDS)
            for v, vector in enumerate(stored):
                results.append(multiply_add(builder, kind, sums[r * len(stored) + v], vector, value))
        return results, 1

    kind_of_sum = WORDS if layout.integer else FLOATS
    zeros = ir.Constant(kind_of_sum, [0 if layout.integer else 0.0] * LANES)
    initial = [read(builder, place, kind_of_sum) if add else zeros for place in places]
    for result, place in zip(loop(builder, words, initial, body), places, strict=True):
        write(builder, result, place)


@intrinsic
def ask_for(typing: Any, address: Any) -> Any:
    """Prefetch the line at address, which need not be any memory's."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        prefetch(builder, arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def transpose_words(typing: Any, addresses: Any, offset: Any, out: Any, stride: Any) -> Any:
    """out[word, lane] = word of the row at addresses[lane] + offset: sixteen words of sixteen rows.

    addresses points to sixteen int64 addresses; out has `stride` bytes between words.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        addresses, offset, out, stride = arguments
        rows = []
        for lane in range(LANES):
            row = read(builder, builder.add(addresses, index(8 * lane)), I64)
            rows.append(read(builder, builder.add(row, offset), WORDS))
        for word, column in enumerate(transpose(builder, rows)):
            write(builder, column, builder.add(out, builder.mul(stride, index(word))))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), generate
