"""The inner loop of matrix products over packed weights, written as LLVM IR for Numba.

A panel is PANEL weight rows, PANEL_VECTORS vectors of sixteen, packed so that a product reads memory straight through:
[step, vector, lane], a step being what one read of a lane is multiplied with. A tile multiplies some tokens with some
vectors over a block of words; its sums stay in registers meanwhile. In which order the products of one token and row
are added depends on nothing else in the step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headway.kernels.cpu.arithmetic import (
    ARITHMETIC,
    PANEL,
    PANEL_VECTORS,
    TILE_TOKENS,
    fused,
    multiply_add,
    operands,
    tile_vectors,
)
from headway.kernels.cpu.compile import Kind, Number, emitted, int64
from headway.kernels.cpu.ir import (
    F32,
    FLOATS,
    I32,
    LANES,
    VECTOR_BYTES,
    WORDS,
    index,
    loop,
    prefetch,
    read,
    splat,
    write,
)

TOTALS_BYTES = PANEL * 4  # the bytes of one token's sums
_LINE = 64


@emitted
def multiply_panel(
    builder: Any, kind: Kind, tokens: Number, x: int64, x_stride: int64, packed: int64, words: int64, totals: int64,
    scales: int64, scales_stride: int64, ahead: int64,
) -> None:  # fmt: skip
    """totals[t, row] += the sum over words of a panel's weights packed[step, row] times x[t, word].

    For 1 to TILE_TOKENS tokens. x has x_stride bytes between tokens; totals are float32, TOTALS_BYTES a token. For an
    integer kind, scales has scales_stride bytes between tokens and gives a float32 that this block's sums are
    multiplied with, and an int32 that they start from. What lies `ahead` bytes on in packed is prefetched. Code for a
    number of tokens that is a literal is for no other.
    """
    layout = ARITHMETIC[kind.name]

    def tile(count: int, vector: int) -> None:
        """The product of `count` tokens with as many vectors as suit them, from number `vector` on."""
        vector_bytes = layout.lane_bytes * LANES
        inputs = [builder.add(x, builder.mul(x_stride, index(t))) for t in range(count)]
        vectors = range(vector, vector + tile_vectors(count, kind))

        def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
            step = builder.sdiv(word, index(layout.words))
            at = builder.add(packed, builder.mul(step, index(PANEL_VECTORS * vector_bytes)))
            for line in range(vector * vector_bytes, vectors.stop * vector_bytes, _LINE):
                prefetch(builder, builder.add(builder.add(at, ahead), index(line)))
            weights = [operands(builder, kind, at, v) for v in vectors]
            sums = list(sums)
            for part in range(layout.words):
                place = builder.mul(builder.add(word, index(part)), index(4))
                for t, address in enumerate(inputs):
                    value = splat(builder, read(builder, builder.add(address, place), I32), WORDS)
                    for v, lanes in enumerate(weights):
                        number = t * len(weights) + v
                        sums[number] = multiply_add(builder, kind, sums[number], lanes[part], value)
            return sums, layout.words

        places = [builder.add(totals, index(t * TOTALS_BYTES + v * LANES * 4)) for t in range(count) for v in vectors]
        if layout.integer:
            of_tokens = [builder.add(scales, builder.mul(scales_stride, index(t))) for t in range(count)]
            starts = [splat(builder, read(builder, builder.add(at, index(4)), I32), WORDS) for at in of_tokens]
            sums = loop(builder, words, [start for start in starts for _ in vectors], body)
            factors = [splat(builder, read(builder, at, F32), FLOATS) for at in of_tokens for _ in vectors]
            results = [
                fused(builder, read(builder, place, FLOATS), builder.sitofp(total, FLOATS), factor)
                for place, total, factor in zip(places, sums, factors, strict=True)
            ]
        else:
            results = loop(builder, words, [read(builder, place, FLOATS) for place in places], body)
        for result, place in zip(results, places, strict=True):
            write(builder, result, place)

    if isinstance(tokens, int):
        each_vector(kind, tokens, tile)
    else:
        tiles_of(builder, kind, tokens, tile)


def tiles_of(builder: Any, kind: Any, tokens: Any, tile: Callable[[int, int], None]) -> None:
    """Go through a panel, for the number of tokens that there is: `tile(tokens, vector)` writes the product of so many
    tokens with the vectors from number `vector` on.
    """
    end = builder.append_basic_block("end")
    choice = builder.switch(tokens, end)
    for count in range(1, TILE_TOKENS + 1):
        case = builder.append_basic_block(f"tokens_{count}")
        choice.add_case(index(count), case)
        builder.position_at_end(case)
        each_vector(kind, count, tile)
        builder.branch(end)
    builder.position_at_end(end)


def each_vector(kind: Any, tokens: int, tile: Callable[[int, int], None]) -> None:
    """Go through a panel with so many tokens."""
    for vector in range(0, PANEL_VECTORS, tile_vectors(tokens, kind)):
        tile(tokens, vector)


@emitted
def add_scaled(builder: Any, sums: int64, totals: int64, scales: int64) -> None:
    """totals[row] += sums[row] of a token and block, int32, scaled as multiply_panel does, bit for bit."""
    factor = splat(builder, read(builder, scales, F32), FLOATS)
    start = splat(builder, read(builder, builder.add(scales, index(4)), I32), WORDS)
    for vector in range(PANEL_VECTORS):
        place = index(vector * VECTOR_BYTES)
        total = builder.add(read(builder, builder.add(sums, place), WORDS), start)
        to = builder.add(totals, place)
        write(builder, fused(builder, read(builder, to, FLOATS), builder.sitofp(total, FLOATS), factor), to)


@emitted
def unpack_panel(builder: Any, kind: Kind, packed: int64, words: int64, unpacked: int64) -> None:
    """Write the operands of a panel's words to unpacked[word, row], where several tiles read them."""
    layout = ARITHMETIC[kind.name]

    def body(word: Any, nothing: list[Any]) -> tuple[list[Any], int]:
        step = builder.sdiv(word, index(layout.words))
        at = builder.add(packed, builder.mul(step, index(PANEL * layout.lane_bytes)))
        to = builder.add(unpacked, builder.mul(word, index(PANEL_VECTORS * VECTOR_BYTES)))
        for vector in range(PANEL_VECTORS):
            for part, lanes in enumerate(operands(builder, kind, at, vector)):
                place = (part * PANEL_VECTORS + vector) * VECTOR_BYTES
                write(builder, lanes, builder.add(to, index(place)))
        return nothing, layout.words

    loop(builder, words, [], body)
