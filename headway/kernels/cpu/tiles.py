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
from headway.kernels.cpu.ir import FLOATS, I32, I64, LANES, WORDS, index, loop, prefetch, read, splat, transpose, write
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
