"""The inner loop of matrix products over packed weights, written as LLVM IR for Numba.

A panel is PANEL weight rows, PANEL_VECTORS vectors of sixteen, packed so that a product reads memory straight through:
[step, vector, lane], a step being what one read of a lane is multiplied with. A tile multiplies some tokens with some
vectors over a block of words; its sums stay in registers meanwhile. In which order the products of one token and row
are added depends on nothing else in the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from headway.kernels.cpu_arithmetic import ARITHMETIC, TILE_TOKENS, TILE_VECTORS, fused, multiply_add, operands
from headway.kernels.cpu_ir import F16, F32, FLOATS, I32, LANES, WORDS, index, loop, prefetch, read, splat, write

PANEL_VECTORS = 4
PANEL = PANEL_VECTORS * LANES
TOTALS_BYTES = PANEL * 4  # of one token's sums
_LINE = 64
_HALVES = ir.VectorType(F16, LANES)
# A tile of fewer tokens is done before what it could ask for ahead would come.
_LEAST_AHEAD = 3


@intrinsic
def multiply_panel(
    typing: Any, kind: Any, tokens: Any, x: Any, x_stride: Any, packed: Any, words: Any, totals: Any, scales: Any,
    scales_stride: Any, weight_scales: Any, ahead: Any,
) -> Any:  # fmt: skip
    """totals[t, row] += the sum over words of a panel's weights packed[step, row] times x[t, word].

    For 1 to TILE_TOKENS tokens. x has x_stride bytes between tokens; totals are float32, TOTALS_BYTES a token. For an
    integer kind, scales has scales_stride bytes between tokens and gives a float32 that this block's sums are
    multiplied with, and an int32 that they start from; weight_scales, where it is not 0, a float16 for each row
    besides. What lies `ahead` bytes on in packed is prefetched.
    """
    if kind not in ARITHMETIC:
        return None

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        block = _Block(kind, *arguments[2:])
        end = builder.append_basic_block("end")
        choice = builder.switch(arguments[1], end)
        for tokens in range(1, TILE_TOKENS + 1):
            case = builder.append_basic_block(f"tokens_{tokens}")
            choice.add_case(index(tokens), case)
            builder.position_at_end(case)
            for vector in range(0, PANEL_VECTORS, TILE_VECTORS):
                _tile(builder, block, tokens, vector)
            builder.branch(end)
        builder.position_at_end(end)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 10), generate


@dataclass(frozen=True, slots=True)
class _Block:
    """The arguments of multiply_panel as LLVM values."""

    kind: Any
    x: Any
    x_stride: Any
    packed: Any
    words: Any
    totals: Any
    scales: Any
    scales_stride: Any
    weight_scales: Any
    ahead: Any


def _tile(builder: Any, block: _Block, tokens: int, vector: int) -> None:
    """The product of `tokens` tokens with TILE_VECTORS vectors from number `vector` on."""
    layout = ARITHMETIC[block.kind]
    vector_bytes = layout.lane_bytes * LANES
    inputs = [builder.add(block.x, builder.mul(block.x_stride, index(t))) for t in range(tokens)]
    vectors = range(vector, vector + TILE_VECTORS)

    def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
        step = builder.sdiv(word, index(layout.words)) if layout.words > 1 else word
        at = builder.add(block.packed, builder.mul(step, index(PANEL_VECTORS * vector_bytes)))
        if tokens >= _LEAST_AHEAD:
            for line in range(vector * vector_bytes, vectors.stop * vector_bytes, _LINE):
                prefetch(builder, builder.add(builder.add(at, block.ahead), index(line)))
        stored = [read(builder, builder.add(at, index(v * vector_bytes)), layout.stored) for v in vectors]
        weights = [operands(builder, block.kind, lanes) for lanes in stored]
        sums = list(sums)
        for part in range(layout.words):
            place = builder.mul(builder.add(word, index(part)), index(4))
            for t, address in enumerate(inputs):
                value = splat(builder, read(builder, builder.add(address, place), I32), WORDS)
                for v in range(TILE_VECTORS):
                    number = t * TILE_VECTORS + v
                    sums[number] = multiply_add(builder, block.kind, sums[number], weights[v][part], value)
        return sums, layout.words

    places = [
        builder.add(block.totals, index(t * TOTALS_BYTES + v * LANES * 4)) for t in range(tokens) for v in vectors
    ]
    if layout.integer:
        scales = [builder.add(block.scales, builder.mul(block.scales_stride, index(t))) for t in range(tokens)]
        starts = [splat(builder, read(builder, builder.add(at, index(4)), I32), WORDS) for at in scales]
        sums = loop(builder, block.words, [start for start in starts for _ in vectors], body)
        of_rows = _row_scales(builder, block.weight_scales, vectors)
        of_tokens = [splat(builder, read(builder, at, F32), FLOATS) for at in scales]
        factors = [builder.fmul(token, row) for token in of_tokens for row in of_rows]
        results = [
            fused(builder, read(builder, place, FLOATS), builder.sitofp(total, FLOATS), factor)
            for place, total, factor in zip(places, sums, factors, strict=True)
        ]
    else:
        results = loop(builder, block.words, [read(builder, place, FLOATS) for place in places], body)
    for result, place in zip(results, places, strict=True):
        write(builder, result, place)


def _row_scales(builder: Any, address: Any, vectors: range) -> list[Any]:
    """The float16 scales at address of the rows of some vectors, as float32; ones where the address is 0."""
    ones = ir.Constant(FLOATS, [1.0] * LANES)
    with builder.if_else(builder.icmp_signed("!=", address, index(0))) as (then, otherwise):
        with then:
            places = [builder.add(address, index(v * LANES * 2)) for v in vectors]
            loaded = [builder.fpext(read(builder, place, _HALVES), FLOATS) for place in places]
            then_block = builder.block
        with otherwise:
            else_block = builder.block
    scales = []
    for lanes in loaded:
        scale = builder.phi(FLOATS)
        scale.add_incoming(lanes, then_block)
        scale.add_incoming(ones, else_block)
        scales.append(scale)
    return scales
