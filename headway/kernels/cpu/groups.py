"""Weights whose groups of inputs have scales of their own: their layout in panels, products and rows.

A panel is cut along its inputs into groups, and each group of a row has two signed bytes, a factor and an offset. Some
groups that follow each other, a run, share a scale and a minimum, float32. A stored number stands for

    scale * factor * number - minimum * offset

which is what GGUF, AWQ, GPTQ, MXFP4, NF4 and FP8 in blocks have in common. Of a panel, a group is [factor of each row],
[offset of each row], then its numbers as cpu_arithmetic has them for their kind. Scales and minima are arrays beside
it, [panel, run, row].

Activations have a scale for each token and group. The sum of a token's group, which minima are multiplied with, stands
beside it with the opposite sign.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from headway.kernels.cpu.arithmetic import (
    ARITHMETIC,
    E2M1,
    FLOAT4,
    FLOAT8,
    GROUPS4,
    GROUPS8,
    MOST_STRAIGHT,
    NORMAL4,
    PANEL,
    TILE_TOKENS,
    arithmetic_of,
    fused,
    multiply_add,
    operands,
    tile_vectors,
)
from headway.kernels.cpu.compile import Kind, compiled, emitted, int64
from headway.kernels.cpu.ir import (
    F32,
    FLOATS,
    I8,
    I32,
    LANES,
    WORDS,
    index,
    loop,
    prefetch,
    read,
    splat,
    word_constant,
    write,
)
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_rows
from headway.kernels.cpu.panels import tiles_of
from headway.kernels.cpu.simd import FLOAT32, exponential_of_two, load, read_byte, read_int32, read_int64, store
from headway.kernels.weights import NF4, Groups

HEADER_BYTES = 2  # the bytes of two factors, for a row and group
# The first passes over a block, which fetch the next one into a near cache.
PASSES_AHEAD = 8
_ZERO = np.float32(0)
# FLOAT8's numbers are multiplied as float16 of the same bits, whose exponents begin 8 lower; E2M1 is twice FLOAT4's.
_SCALE_OF = {type(GROUPS4): 1.0, type(GROUPS8): 1.0, type(FLOAT8): 256.0, type(FLOAT4): 0.5, type(NORMAL4): 1.0}
_CODE_OF = {type(GROUPS4): 4, type(FLOAT4): 2, type(NORMAL4): 3, type(FLOAT8): 16, type(GROUPS8): 8}
_PANELS_AT_ONCE = 64
_BYTES, _LINE = ir.VectorType(I8, LANES), 64


@dataclass(frozen=True, slots=True)
class GroupedPanels:
    """The groups of a weight. A group's number, shifted right by `shift`, is the number of its run of scales."""

    scales: Tensor  # [panels, runs, PANEL]
    minima: Tensor  # the same, or one row of zeros for all
    group_bytes: int
    slices: int
    shift: int

    def arguments(self) -> tuple[int, ...]:
        """The arguments of a job from which multiply_groups takes its own."""
        of_panel = self.scales.shape[1] * PANEL * 4
        of_run, of_minima = (PANEL * 4, of_panel) if self.minima.dim() == 3 else (0, 0)
        return (
            self.group_bytes, self.slices, self.shift, self.scales.data_ptr(), of_panel,
            self.minima.data_ptr(), of_minima, of_run,
        )  # fmt: skip


def group_bytes(kind: Any, size: int) -> int:
    """The bytes of a panel's group of `size` inputs."""
    layout = arithmetic_of(kind)
    return PANEL * (HEADER_BYTES + size // (layout.words * layout.inputs) * layout.lane_bytes)


def pack_groups(kind: Any, values: Tensor, groups: Groups, rows: Tensor, out: Tensor) -> GroupedPanels:
    """Fill `out`, bytes of all panels, whose lanes have the rows of values that `rows` numbers, or -1 for none."""
    layout, size = arithmetic_of(kind), groups.size
    lanes = rows.view(-1, PANEL)
    count, of_group = values.shape[1] // size, group_bytes(kind, size)
    panels = out.view(len(lanes), count, of_group)
    element = {4: torch.int32, 2: torch.int16, 1: torch.uint8}[layout.lane_bytes]
    for first in range(0, len(lanes), _PANELS_AT_ONCE):
        some = lanes[first : first + _PANELS_AT_ONCE]
        number, there = some.clamp_min(0).view(-1), (some >= 0).view(-1, 1)
        to = panels[first : first + _PANELS_AT_ONCE]
        for place, header in enumerate((groups.factors, groups.offsets)):
            of_rows = (header[number] * there).view(len(some), PANEL, count).transpose(1, 2)
            to[:, :, place * PANEL : (place + 1) * PANEL].copy_(of_rows.view(torch.uint8))
        stored = values.view(torch.uint8)[number]
        if kind is GROUPS4 or kind is FLOAT4 or kind is NORMAL4:
            stored = _nibbles(stored)
        elements = stored.view(element).view(len(some), PANEL, count, -1).permute(0, 2, 3, 1)
        to[:, :, HEADER_BYTES * PANEL :].view(element).view(elements.shape).copy_(elements)
    factor = _SCALE_OF[type(kind)]
    scales = _by_lanes(groups.scales, lanes) * factor
    minima = scales if groups.minima is None else _by_lanes(groups.minima, lanes)
    if not groups.offsets.any():
        minima = torch.zeros(PANEL)
    shift = 62 if groups.scales.shape[1] == 1 else groups.run.bit_length() - 1
    return GroupedPanels(scales, minima, of_group, size // (layout.words * layout.inputs), shift)


def stacked_panels(parts: Sequence[GroupedPanels]) -> GroupedPanels:
    """The panels of several weights, one after the other."""
    scales, minima = torch.cat([part.scales for part in parts]), parts[0].minima
    if all(part.minima is part.scales for part in parts):
        minima = scales
    elif any(part.minima.dim() == 3 for part in parts):
        minima = torch.cat([part.minima.expand_as(part.scales) for part in parts])
    return replace(parts[0], scales=scales, minima=minima)


def _by_lanes(numbers: Tensor, lanes: Tensor) -> Tensor:
    """[out, runs] as [panels, runs, PANEL], zeros where a lane has no row."""
    padded = torch.cat([numbers.float(), torch.zeros(1, numbers.shape[1])])
    return padded[lanes].transpose(1, 2).contiguous()


def _nibbles(stored: Tensor) -> Tensor:
    """Numbers 0 .. 15 as bytes [rows, in] to words of eight: number 2 k at bit 4 k, number 2 k + 1 at bit 16 + 4 k."""
    first, second = (stored.view(len(stored), -1, 4, 2)[..., odd] for odd in (0, 1))
    halves = [part[..., ::2] | part[..., 1::2] << 4 for part in (first, second)]
    return torch.cat(halves, dim=2).view(len(stored), -1)


@emitted
def multiply_groups(
    builder: Any, kind: Kind, tokens: int64, x: int64, x_stride: int64, packed: int64, groups: int64, totals: int64,
    scales: int64, scales_stride: int64, ahead: int64, group_bytes: int64, slices: int64, first: int64,
    shift: int64, row_scales: int64, minima: int64, minima_stride: int64,
) -> None:  # fmt: skip
    """totals[t, row] += the sum over `groups` groups of a panel, from number `first` on, times x[t].

    It works like multiply_panel, for 1 to TILE_TOKENS tokens. packed and x are where the groups begin. scales gives two
    float32 for each group, from the first on: the activations' scale, and the sum of the group with the opposite sign.
    row_scales and minima are those of the panel.
    """
    block = _Groups(
        kind, x, x_stride, packed, groups, totals, scales, scales_stride, ahead, group_bytes, slices, first, shift,
        row_scales, minima, minima_stride,
    )  # fmt: skip
    tiles_of(builder, kind, tokens, partial(_tile, builder, block))


@dataclass(frozen=True, slots=True)
class _Groups:
    """The arguments of multiply_groups as LLVM values."""

    kind: Any
    x: Any
    x_stride: Any
    packed: Any
    groups: Any
    totals: Any
    scales: Any
    scales_stride: Any
    ahead: Any
    group_bytes: Any
    slices: Any
    first: Any
    shift: Any
    row_scales: Any
    minima: Any
    minima_stride: Any


def _tile(builder: Any, block: _Groups, tokens: int, vector: int) -> None:
    """The product of `tokens` tokens with as many vectors as suit them, from number `vector` on."""
    layout = ARITHMETIC[block.kind.name]
    vectors = range(vector, vector + tile_vectors(tokens, block.kind))
    x_bytes = builder.mul(block.slices, index(layout.words * 4))
    places = [
        builder.add(block.totals, builder.add(index(t * PANEL * 4), index(v * LANES * 4)))
        for t in range(tokens)
        for v in vectors
    ]

    def group(number: Any, totals: list[Any]) -> tuple[list[Any], int]:
        at = builder.add(block.packed, builder.mul(number, block.group_bytes))
        inputs = builder.add(block.x, builder.mul(number, x_bytes))
        rows = [builder.add(inputs, builder.mul(block.x_stride, index(t))) for t in range(tokens)]
        sums = _sums_of_group(builder, block, rows, builder.add(at, index(HEADER_BYTES * PANEL)), vectors)
        run = builder.lshr(builder.add(block.first, number), block.shift)
        scale_at = builder.add(block.row_scales, builder.mul(run, index(PANEL * 4)))
        minimum_at = builder.add(block.minima, builder.mul(run, block.minima_stride))
        scales = [row_factors(builder, at, scale_at, v) for v in vectors]
        if not layout.integer:
            pairs = zip(totals, sums, scales * tokens, strict=True)
            return [fused(builder, total, of_group, scale) for total, of_group, scale in pairs], 1
        minima = [row_factors(builder, builder.add(at, index(PANEL)), minimum_at, v) for v in vectors]
        return _add_integers(builder, block, number, totals, sums, scales, minima), 1

    results = loop(builder, block.groups, [read(builder, place, FLOATS) for place in places], group)
    for result, place in zip(results, places, strict=True):
        write(builder, result, place)


def _sums_of_group(builder: Any, block: _Groups, rows: list[Any], numbers: Any, vectors: range) -> list[Any]:
    """Multiply a group's stored numbers with its inputs, which begin at `rows`; sums for [token, vector], flat."""
    layout = ARITHMETIC[block.kind.name]
    slice_bytes = PANEL * layout.lane_bytes

    def body(place: Any, sums: list[Any]) -> tuple[list[Any], int]:
        step = builder.add(numbers, builder.mul(place, index(slice_bytes)))
        first, last = (v * LANES * layout.lane_bytes for v in (vectors.start, vectors.stop))
        for line in range(first, last, _LINE):
            prefetch(builder, builder.add(builder.add(step, block.ahead), index(line)))
        weights = [operands(builder, block.kind, step, v) for v in vectors]
        sums = list(sums)
        for part in range(layout.words):
            word = builder.mul(builder.add(builder.mul(place, index(layout.words)), index(part)), index(4))
            for t, address in enumerate(rows):
                value = splat(builder, read(builder, builder.add(address, word), I32), WORDS)
                for v, lanes in enumerate(weights):
                    which = t * len(weights) + v
                    sums[which] = multiply_add(builder, block.kind, sums[which], lanes[part], value)
        return sums, 1

    zero = word_constant(0) if layout.integer else ir.Constant(FLOATS, [0.0] * LANES)
    return loop(builder, block.slices, [zero] * (len(rows) * len(vectors)), body)


def _add_integers(
    builder: Any, block: _Groups, number: Any, totals: list[Any], sums: list[Any], scales: list[Any], minima: list[Any]
) -> list[Any]:
    """Totals and a group's sums of whole numbers, with the scales of tokens and rows, less what the minima make."""
    results: list[Any] = []
    count = len(scales)
    for t in range(len(totals) // count):
        of_token = builder.add(block.scales, builder.mul(block.scales_stride, index(t)))
        of_token = builder.add(of_token, builder.mul(number, index(8)))
        some = slice(t * count, (t + 1) * count)
        results += add_token(builder, of_token, totals[some], sums[some], scales, minima)
    return results


def add_token(
    builder: Any, of_token: Any, totals: list[Any], sums: list[Any], scales: list[Any], minima: list[Any]
) -> list[Any]:
    """The same of one token, whose scale and sum of the group are at of_token."""
    scale = splat(builder, read(builder, of_token, F32), FLOATS)
    less = splat(builder, read(builder, builder.add(of_token, index(4)), F32), FLOATS)
    results = []
    for v in range(len(scales)):
        total = fused(builder, totals[v], less, minima[v])
        product = builder.fmul(builder.sitofp(sums[v], FLOATS), scale)
        results.append(fused(builder, total, product, scales[v]))
    return results


def row_factors(builder: Any, header: Any, floats: Any, vector: int) -> Any:
    """Bytes of a vector's rows times float32."""
    stored = read(builder, builder.add(header, index(vector * LANES)), _BYTES)
    number = read(builder, builder.add(floats, index(vector * LANES * 4)), FLOATS)
    return builder.fmul(builder.sitofp(builder.sext(stored, WORDS), FLOATS), number)


@compiled()
def multiply_grouped(kind, tokens, x, x_stride, packed, groups, block, group_bytes, totals, scales, stride, more):
    """A panel with the tokens, `block` groups at a time, which stay in a near cache; `more` as product_job has it."""
    slices, shift, group_x_bytes, row_scales, minima, minima_stride = more
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for i in range(tokens * PANEL):
        store(totals, i, _ZERO, FLOAT32)
    for first in range(0, groups, block):
        inputs, at, count = x + first * group_x_bytes, packed + first * group_bytes, min(block, groups - first)
        for index_ in range(passes):
            token = index_ * tokens // passes
            together = (index_ + 1) * tokens // passes - token
            ahead = block * group_bytes if tokens > MOST_STRAIGHT and index_ < PASSES_AHEAD else 0
            multiply_groups(
                kind, together, inputs + token * x_stride, x_stride, at, count, totals + token * PANEL * 4,
                scales + token * stride + first * 8, stride, ahead, group_bytes, slices, first, shift, row_scales,
                minima, minima_stride,
            )  # fmt: skip


@compiled()
def _number(code, numbers, slice_, lane, place):
    """A stored number of a group, by its place in a slice of the lane."""
    if code <= 4:
        word = (slice_ * PANEL + lane) * 4
        bit = place // 2 * 4 + place % 2 * 16
        stored = (read_byte(numbers, word + bit // 8) >> (bit % 8)) & 15
        if code == 3:
            return np.float32(NF4[stored])
        return np.float32(E2M1[stored] if code == 2 else stored)
    if code == 8:
        byte = read_byte(numbers, (slice_ * PANEL + lane) * 2 + place)
        return np.float32(byte - 256 if byte >= 128 else byte)
    byte = read_byte(numbers, slice_ * PANEL + lane)  # e4m3fn
    magnitude = byte & 127
    exponent, fraction = magnitude // 8, magnitude % 8
    power = exponential_of_two(np.int32(max(exponent, 1) - 15 - 3))
    value = np.float32(fraction + 8 if exponent > 0 else fraction) * power
    return -value if byte >= 128 else value


@compiled()
def _signed(header, lane):
    byte = read_byte(header, lane)
    return np.float32(byte - 256 if byte >= 128 else byte)


GROUPED_ROWS = struct.Struct("16q")


@once_per_kind
def grouped_rows_job(out_kind: Any, kind: Any) -> int:
    """Rows of an ungated weight as numbers of out_kind, dense, their inputs where `order` says."""
    code = _CODE_OF[type(kind)]
    in_slice = arithmetic_of(kind).words * arithmetic_of(kind).inputs

    def rows(a: int) -> None:
        step, count, numbers, packed, groups, size = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        order, out = arg(a, 6), arg(a, 7)
        of_group, slices, shift, scales, of_panel = arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12)
        minima, of_minima, of_run = arg(a, 13), arg(a, 14), arg(a, 15)
        width = groups * slices * in_slice
        first = take_rows(a, step)
        while first < count:
            for i in range(first, min(first + step, count)):
                row = read_int64(numbers, i)
                panel, lane, to = row // PANEL, row % PANEL, out + i * width * size
                for group in range(groups):
                    at, run = packed + (panel * groups + group) * of_group, group >> shift
                    scale = _signed(at, lane) * load(scales + panel * of_panel + run * PANEL * 4, lane, FLOAT32)
                    minimum = load(minima + panel * of_minima + run * of_run, lane, FLOAT32)
                    minimum *= _signed(at + PANEL, lane)
                    for place in range(slices * in_slice):
                        number = _number(code, at + HEADER_BYTES * PANEL, place // in_slice, lane, place % in_slice)
                        column = group * slices * in_slice + place
                        if order != 0:
                            column = read_int32(order, column)
                        store(to, column, scale * number - minimum, out_kind)
            first = take_rows(a, step)

    return job(rows)
