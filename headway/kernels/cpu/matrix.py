"""Products on matrix tiles (AMX): sixteen tokens times sixteen weight rows at a time, written as LLVM IR for Numba.

A tile is up to sixteen rows of 64 bytes. Sixteen words of a vector of a panel are one just as they are packed: a row
of the tile is a word, and its columns are weight rows. Tokens are the rows of another tile, and of the sums.

Whole numbers of eight bits are summed in int32, exactly: tokens' signed and weights' not, or, where the kind is
WIDE_INT8, weights' signed and tokens' as multiply_two says. In bfloat16 a tile's even
and odd inputs are added up apart, each with one rounding a product, then together, then to the sum so far; numbers too
small for a normal float32 count as zero. So sums differ in their last bits from those of vectors, and a weight that is
multiplied on tiles is so for any number of tokens. A row of sums depends on its token's row alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir

from headway.kernels.cpu.arithmetic import FLOAT4, GROUPS4, GROUPS8, INT4, INT8, PANEL, WIDE_INT8
from headway.kernels.cpu.compile import Kind, compiled, emitted, int64, types
from headway.kernels.cpu.ir import I8, I64, VECTOR_BYTES, declare, index, loop, prefetch
from headway.kernels.cpu.simd import BFLOAT16, IS_X86, cpu_features

TILE_ROWS = 16
# Words of a lane that one instruction multiplies, and the bytes that they take of a panel.
STEP_WORDS = 16
STEP_BYTES = STEP_WORDS * PANEL * 4
_PANEL_ROW = PANEL * 4
# Bytes of a panel that are fetched ahead of their use, because loads of tiles alone do not keep memory busy.
_AHEAD = 8192
# The instructions of each kind, for both groups of tokens of multiply_two.
_MULTIPLY = {
    "uint16": ("llvm.x86.tdpbf16ps",) * 2,
    "uint8": ("llvm.x86.tdpbsud",) * 2,
    "int8": ("llvm.x86.tdpbssd", "llvm.x86.tdpbusd"),
}
SPLIT = (WIDE_INT8, GROUPS4, GROUPS8, FLOAT4)  # whose activations of 16 bits are cut into bytes; see cpu.planes
ON_TILES = (BFLOAT16, INT8, INT4, *SPLIT)  # INT4 is unpacked to INT8
# Linux's arch_prctl, which permits this process to use a part of the processor's state, and the part of the tiles.
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
# The tiles: four of sums, two of tokens, two of weights.
_TOKENS, _WEIGHTS = (4, 5), (6, 7)
_kept: dict[tuple[int, int, int], np.ndarray] = {}  # configurations, at addresses that code has


def _ask_the_system() -> bool:
    """Ask for the permission, for this process and its threads to come; a container may refuse it."""
    libc = ctypes.CDLL(None)
    return libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0  # type: ignore[no-any-return]


def may_use_tiles(features: set[str], ask: Callable[[], bool] = _ask_the_system) -> bool:
    """Whether a processor with these extensions, by LLVM's names, has tiles for all kinds and the system permits it."""
    return {"amx-tile", "amx-bf16", "amx-int8"} <= features and ask()


@lru_cache(maxsize=1)
def has_matrix_tiles() -> bool:
    """Whether this process multiplies on tiles; asked for once."""
    return may_use_tiles(cpu_features() if IS_X86 else set())


@lru_cache
def configurations(least: int = 0, words: int = STEP_WORDS, other_words: int = 0) -> int:
    """The address of a table of TILE_ROWS + 1 lines of 64 bytes: how tiles are laid out for 1 to TILE_ROWS tokens.

    Each is palette 1, then columns and rows of each tile. The first line, of no token, begins with `least`, an int64.

    Args:
        least: tokens from which on a product is on tiles.
        words: words of a step, STEP_WORDS or fewer.
        other_words: those of the second tile of tokens and the second of weights, where they differ.
    """
    table = np.zeros((TILE_ROWS + 1, 64), np.uint8)
    table[0, :8].view(np.int64)[0] = least
    table[1:, 0] = 1
    for tokens in range(1, TILE_ROWS + 1):
        for tile in range(8):
            own_words = other_words or words if tile in (_TOKENS[1], _WEIGHTS[1]) else words
            table[tokens, 16 + 2 * tile] = 4 * own_words if tile in _TOKENS else VECTOR_BYTES
            table[tokens, 48 + tile] = own_words if tile in _WEIGHTS else tokens
    # If two threads come first, both get the same table: code keeps the address of one that would be dropped otherwise.
    return int(_kept.setdefault((least, words, other_words), table).ctypes.data)


@compiled()
def first_of(group, groups, tokens, rows):  # type: ignore[no-untyped-def]
    """The first token of a group of `rows`: groups overlap where tokens are not a multiple of their size."""
    return group * (tokens - rows) // max(1, groups - 1)


def _emit(builder: Any, name: str, tiles: tuple[int, ...], *operands: Any) -> None:
    """An instruction on tiles by number, and on memory at an address with a stride, where there are operands."""
    values: list[Any] = [ir.Constant(I8, tile) for tile in tiles]
    if operands:
        values.append(builder.inttoptr(operands[0], I8.as_pointer()))
        values.extend(operands[1:])
    builder.call(declare(builder, name, ir.VoidType(), [value.type for value in values]), values)


@emitted
def configure(builder: Any, address: int64) -> None:
    """Lay out this thread's tiles."""
    _emit(builder, "llvm.x86.ldtilecfg", (), address)


@emitted
def release(builder: Any) -> None:
    """Give this thread's tiles up, so that they need not be saved when it is interrupted."""
    _emit(builder, "llvm.x86.tilerelease", ())


@emitted
def multiply_one(
    builder: Any, kind: Kind, x: int64, x_stride: int64, packed: int64, steps: int64, sums: int64, fresh: int64,
) -> None:  # fmt: skip
    """sums[t, row] (+)= the sum over steps of a panel's weights packed[step, row] times x[t, step].

    For as many tokens as the tiles are laid out for, x_stride bytes between them, and all rows of the panel; a step is
    STEP_WORDS words. Sums start from zero if fresh is not 0; they are float32, or int32 for an integer kind,
    _PANEL_ROW bytes a token.
    """

    def weights(step: Any, vector: int) -> Any:
        at = _place(builder, packed, step, STEP_BYTES)
        for line in range(vector * STEP_BYTES // 4, (vector + 1) * STEP_BYTES // 4, VECTOR_BYTES):
            prefetch(builder, builder.add(at, index(_AHEAD + line)))
        return builder.add(at, index(vector * VECTOR_BYTES))

    row = index(_PANEL_ROW)
    tiles = _TOKENS[0], _WEIGHTS
    _multiply(builder, kind, tiles, (x, x_stride, index(VECTOR_BYTES)), (weights, row), steps, (sums, row, fresh))


def multiply_four(builder: Any, kind: Any, number: int, *operands: Any) -> None:
    """Do as _multiply with the first or the second tile of tokens and that of weights, by number: 0 or 1."""
    _multiply(builder, kind, (_TOKENS[number], _WEIGHTS[number : number + 1]), *operands)


def _multiply(
    builder: Any, kind: Any, tiles: tuple[int, tuple[int, ...]], x: tuple[Any, Any, Any],
    weights: tuple[Callable[[Any, int], Any], Any], steps: Any, sums: tuple[Any, Any, Any],
) -> None:  # fmt: skip
    """Write the product of a tile's tokens with four tiles of weights a step, whose sums stand side by side.

    Args:
        tiles: that of tokens, and those of weights, which take turns.
        x: address, bytes between tokens, bytes between steps.
        weights: the address of a tile, by step and number; bytes between its rows.
        sums: address, bytes between tokens, and whether they start from zero.
    """
    (tokens, by_turns), (first, x_stride, x_step), (address, row) = tiles, x, weights

    def body(step: Any, _: list[Any]) -> tuple[list[Any], int]:
        _load(builder, tokens, builder.add(first, builder.mul(step, x_step)), x_stride)
        for vector in range(4):
            tile = by_turns[vector % len(by_turns)]
            _load(builder, tile, address(step, vector), row)
            _emit(builder, _MULTIPLY[kind.name][0], (vector, tokens, tile))
        return [], 1

    places = [builder.add(sums[0], index(vector * VECTOR_BYTES)) for vector in range(4)]
    _with_sums(builder, places, sums[1], sums[2], lambda: loop(builder, steps, [], body))


@emitted
def multiply_two(
    builder: Any, kind: Kind, x: int64, other: int64, x_stride: int64, packed: int64, steps: int64, sums: int64,
    others: int64, fresh: int64,
) -> None:  # fmt: skip
    """Multiply half a panel with the tokens at x, as multiply_one does, and with as many at other.

    Sums of the tokens at other go to `others`. For WIDE_INT8, tokens at x are signed bytes, those at other unsigned.
    """
    places = [builder.add(to, index(vector * VECTOR_BYTES)) for to in (sums, others) for vector in range(2)]

    def body(step: Any, _: list[Any]) -> tuple[list[Any], int]:
        at = _place(builder, packed, step, STEP_BYTES)
        for group, tokens in enumerate((x, other)):
            _load(builder, _TOKENS[group], _place(builder, tokens, step, VECTOR_BYTES), x_stride)
            for vector, weights in enumerate(_WEIGHTS):
                if group == 0:
                    _load(builder, weights, builder.add(at, index(vector * VECTOR_BYTES)), index(_PANEL_ROW))
                _emit(builder, _MULTIPLY[kind.name][group], (2 * group + vector, _TOKENS[group], weights))
        for word in range(0 if kind == types.int8 else STEP_WORDS):  # which have been unpacked to a near cache
            for vector in range(2):
                ahead = _AHEAD + word * _PANEL_ROW + vector * VECTOR_BYTES
                prefetch(builder, builder.add(at, index(ahead)))
        return [], 1

    _with_sums(builder, places, index(_PANEL_ROW), fresh, lambda: loop(builder, steps, [], body))


def _place(builder: Any, base: Any, number: Any, size: int) -> Any:
    return builder.add(base, builder.mul(number, index(size)))


def _load(builder: Any, tile: int, address: Any, stride: Any) -> None:
    _emit(builder, "llvm.x86.tileloadd64", (tile,), address, stride)


def _with_sums(builder: Any, places: list[Any], row: Any, fresh: Any, multiply: Callable[[], object]) -> None:
    """Bring the sums at four places into tiles, or zeros, and take them back after `multiply`.

    `row` is bytes from one row to the next.
    """
    with builder.if_else(builder.icmp_signed("!=", fresh, ir.Constant(I64, 0))) as (then, otherwise):
        with then:
            for tile in range(4):
                _emit(builder, "llvm.x86.tilezero", (tile,))
        with otherwise:
            for tile, place in enumerate(places):
                _load(builder, tile, place, row)
    multiply()
    for tile, place in enumerate(places):
        _emit(builder, "llvm.x86.tilestored64", (tile,), place, row)
