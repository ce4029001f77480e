"""The inner loops of attention and the rearranging of memory, written as LLVM IR for Numba.

Both products of attention multiply words of activations with vectors of sixteen lanes, as cpu.arithmetic has it. For
scores, a lane is a key and words run over its elements; for values, a lane is an element and words run over keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import ir

from headway.kernels.cpu.arithmetic import ARITHMETIC, PANEL_VECTORS, multiply_add, operand, tile_vectors
from headway.kernels.cpu.compile import Kind, emitted, int64
from headway.kernels.cpu.ir import (
    FLOATS,
    I32,
    I64,
    LANES,
    VECTOR_BYTES,
    WORDS,
    index,
    loop,
    prefetch,
    read,
    splat,
    transpose,
    write,
)
from headway.kernels.cpu.matrix import STEP_WORDS, multiply_four
from headway.kernels.cpu.panels import tiles_of

PANELS_AT_ONCE = PANEL_VECTORS

AddressOf = Callable[[Any, int], Any]  # takes a word and a vector


@emitted
def multiply_keys(
    builder: Any, kind: Kind, rows: int64, x: int64, x_stride: int64, panels: int64, following: int64, words: int64,
    out: int64, out_stride: int64,
) -> None:  # fmt: skip
    """out[row, panel, lane] = sum over words of x[row, word] times the word of a key.

    For 1 to TILE_TOKENS rows of x and PANELS_AT_ONCE panels, whose addresses stand at `panels`; a panel is [word,
    lane]. The panels whose addresses stand at `following` are prefetched. out is float32, or int32 for an integer
    kind; strides are in bytes.
    """
    vector_bytes = ARITHMETIC[kind.name].lane_bytes * LANES

    def addresses(table: Any) -> AddressOf:
        bases = [read(builder, builder.add(table, index(8 * p)), I64) for p in range(PANELS_AT_ONCE)]
        return lambda word, vector: builder.add(bases[vector], builder.mul(word, index(vector_bytes)))

    lanes = addresses(panels), addresses(following)
    tile = partial(_tile, builder, kind, (x, x_stride), lanes, words, (out, out_stride), False)
    tiles_of(builder, kind, rows, tile)


@emitted
def multiply_values(
    builder: Any, kind: Kind, rows: int64, x: int64, x_stride: int64, lines: int64, following: int64, offset: int64,
    last: int64, words: int64, out: int64, out_stride: int64,
) -> None:  # fmt: skip
    """out[row, lane] (+)= sum over words of x[row, word] times PANELS_AT_ONCE vectors, `offset` bytes into a line.

    For 1 to TILE_TOKENS rows of x; the addresses of the lines, one for each word, stand at `lines`. Vectors after
    number `last` repeat it. The lines whose addresses stand at `following` are prefetched. out is float32 and added to,
    or int32 for an integer kind and written; strides are in bytes.
    """
    vector_bytes = ARITHMETIC[kind.name].lane_bytes * LANES
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
    tiles_of(builder, kind, rows, partial(_tile, builder, kind, (x, x_stride), lanes, words, (out, out_stride), add))


def _tile(
    builder: Any, kind: Any, x: tuple[Any, Any], lanes: tuple[AddressOf, AddressOf], words: Any, out: tuple[Any, Any],
    add: bool, rows: int, first: int,
) -> None:  # fmt: skip
    """The product of so many rows with as many vectors as suit them, from number `first` on."""
    vectors = range(first, first + tile_vectors(rows, kind))
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


@emitted
def keys_on_tiles(
    builder: Any, kind: Kind, x: int64, x_stride: int64, panels: int64, following: int64, step_words: int64,
    steps: int64, out: int64, out_stride: int64,
) -> None:  # fmt: skip
    """Do as multiply_keys for as many rows as the matrix tiles are laid out for, with steps of so many words.

    Nothing is prefetched where `following` is 0.
    """
    step_bytes = builder.mul(step_words, index(VECTOR_BYTES))

    def multiply(fetches: bool) -> None:
        def address(step: Any, panel: int) -> Any:
            offset, place = builder.mul(step, step_bytes), index(8 * panel)
            if fetches:
                ahead = builder.add(read(builder, builder.add(following, place), I64), offset)
                for word in range(STEP_WORDS):
                    prefetch(builder, builder.add(ahead, index(word * VECTOR_BYTES)))
            return builder.add(read(builder, builder.add(panels, place), I64), offset)

        rows = x, x_stride, builder.mul(step_words, index(4))
        multiply_four(builder, kind, 0, rows, (address, index(VECTOR_BYTES)), steps, (out, out_stride, index(1)))

    with builder.if_else(builder.icmp_signed("!=", following, index(0))) as (then, otherwise):
        with then:
            multiply(True)
        with otherwise:
            multiply(False)


@emitted
def values_on_tiles(
    builder: Any, kind: Kind, x: int64, x_stride: int64, lines: int64, line_bytes: int64, steps: int64, out: int64,
    out_stride: int64,
) -> None:  # fmt: skip
    """Do as multiply_values for as many rows as the matrix tiles are laid out for, and lines that follow each other.

    A step is STEP_WORDS lines.
    """
    step_bytes = builder.mul(line_bytes, index(STEP_WORDS))

    def address(step: Any, vector: int) -> Any:
        return builder.add(builder.add(lines, builder.mul(step, step_bytes)), index(vector * VECTOR_BYTES))

    rows = x, x_stride, index(VECTOR_BYTES)
    multiply_four(builder, kind, 1, rows, (address, line_bytes), steps, (out, out_stride, index(0)))


@emitted
def copy_line(builder: Any, line: int64, following: int64, vectors: int64, to: int64) -> None:
    """Copy so many vectors, and prefetch as many of the line at `following`."""

    def body(number: Any, nothing: list[Any]) -> tuple[list[Any], int]:
        place = builder.mul(number, index(VECTOR_BYTES))
        prefetch(builder, builder.add(following, place))
        write(builder, read(builder, builder.add(line, place), WORDS), builder.add(to, place))
        return nothing, 1

    loop(builder, vectors, [], body)


@emitted
def ask_for(builder: Any, address: int64) -> None:
    """Prefetch the line at address, which need not be any memory's."""
    prefetch(builder, address)


@emitted
def transpose_words(builder: Any, addresses: int64, offset: int64, out: int64, stride: int64) -> None:
    """out[word, lane] = word of the row at addresses[lane] + offset: sixteen words of sixteen rows.

    addresses points to sixteen int64 addresses; out has `stride` bytes between words.
    """
    rows = []
    for lane in range(LANES):
        row = read(builder, builder.add(addresses, index(8 * lane)), I64)
        rows.append(read(builder, builder.add(row, offset), WORDS))
    for word, column in enumerate(transpose(builder, rows)):
        write(builder, column, builder.add(out, builder.mul(stride, index(word))))
