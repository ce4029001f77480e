"""Linear layers on CPU: weights packed into panels once at load, in the dtype of the model or quantised.

One layout serves decoding and prompts. A thread takes some panels and reads each straight through while it is
multiplied with the tokens, TILE_TOKENS at a time and a block of inputs at a time, so that what several groups of tokens
need comes from memory once. Activations of quantised layers are quantised as they come, each token and block of inputs
by itself.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import itertools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from headway.kernels.cpu_arithmetic import INT4, INT8, PANEL, TILE_TOKENS, WIDE_INT8, Arithmetic, arithmetic_of
from headway.kernels.cpu_compile import compiled, give_back, take_memory
from headway.kernels.cpu_memory import LargePages
from headway.kernels.cpu_packing import PACK, ROWS, pack_job, rows_job
from headway.kernels.cpu_panels import TOTALS_BYTES, multiply_panel, unpack_panel
from headway.kernels.cpu_rows import REORDER, exp_of_negative
from headway.kernels.cpu_simd import (
    FLOAT16,
    FLOAT32,
    KINDS,
    has_matrix_tiles,
    larger,
    load,
    nearest,
    pause,
    read_shared,
    store,
    take_ticket,
    write_integer,
    write_rounded,
)
from headway.kernels.cpu_team import Team, arg, job, once_per_kind, take_share, tickets
from headway.kernels.interface import Linear, Weight
from headway.kernels.reference import ReferenceGatedLinear, ReferenceKernels, ReferenceLinear

_ZERO, _ONE = np.float32(0), np.float32(1)
_QUANTISED = {"int8": INT8, "int8-weight-only": WIDE_INT8, "int4": INT4}
# A block of a panel, which all tokens are multiplied with before the next, stays in a core's first two caches. For
# integer kinds it is so many inputs, which share a scale of the activations.
_BLOCK_BYTES, _BLOCK_INPUTS = 32 * 1024, 512
# Tokens whose sums a thread keeps at a time, and the least that an item of work is cut down to for many threads.
_MOST_TOKENS, _LEAST_TOKENS = 256, 24
_ITEMS_PER_THREAD = 4
# With more passes over a block than this, its products take longer than fetching the next one when it is due.
_PASSES_AHEAD = 8
# Up to so many tokens, 4-bit weights are unpacked in registers by every tile, with more once for all tiles.
_MOST_FROM_NIBBLES = 8
# Where torch multiplies many tokens faster, it needs the weight unpacked first, which pays from so many on.
MANY_FOR_TORCH = 96


@compiled()
def _prepare_float(source_kind, x, inputs, width, row):
    """A token as float32."""
    for i in range(inputs):
        store(row, i, load(x, i, source_kind), FLOAT32)
    for i in range(inputs, width):
        store(row, i, _ZERO, FLOAT32)


@compiled(fastmath=REORDER)
def _largest_magnitude(source_kind, x, first, last):
    """The greatest |x| among first .. last - 1; NaN if one of them is not a finite number."""
    best, check = _ZERO, _ZERO
    for i in range(first, last):
        value = load(x, i, source_kind)
        best = larger(best, abs(value))
        check += value * _ZERO
    return best + check


@compiled()
def _round_block(source_kind, integer, x, first, last, inverse, row):
    """Elements first .. last - 1 times inverse, as whole numbers of the type of `integer`; returns their sum."""
    total = np.int32(0)
    for i in range(first, last):
        total += write_rounded(row, i, nearest(load(x, i, source_kind) * inverse), integer)
    return total


@compiled()
def _prepare_integers(source_kind, integer, largest, offset, x, inputs, width, block, row, scales):
    """A token as integers, and for each block a float32 scale and the int32 that undoes the weights' offset."""
    for number in range((width + block - 1) // block):
        first, last = number * block, min(width, (number + 1) * block)
        inside = max(first, min(last, inputs))
        best = _largest_magnitude(source_kind, x, first, inside)
        inverse = largest / best if best > _ZERO and best < np.inf else _ZERO
        total = _round_block(source_kind, integer, x, first, inside, inverse, row)
        for i in range(inside, last):
            write_rounded(row, i, _ZERO, integer)
        store(scales, 2 * number, best / largest, FLOAT32)
        write_integer(scales, 2 * number + 1, -np.int64(total) * offset, 32)


@compiled()
def _tiles(kind, tokens, x, x_stride, packed, words, totals, scales, stride, ahead):
    """A block of a panel with the tokens, as many at a time as a tile has."""
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    for index in range(passes):
        token = index * tokens // passes
        count = (index + 1) * tokens // passes - token
        to, scale = totals + token * TOTALS_BYTES, scales + token * stride
        multiply_panel(kind, count, x + token * x_stride, x_stride, packed, words, to, scale, stride, ahead)


@compiled()
def _multiply(
    kind, tokens, x, x_stride, packed, words, block, step_bytes, totals, scales, stride, unpacked_kind, unpacked
):
    """A panel with the tokens, block after block of its words; scales has stride bytes between tokens.

    Where `unpacked` is not 0, each block is put there first, as what its weights are multiplied as.
    """
    passes = (tokens + TILE_TOKENS - 1) // TILE_TOKENS
    fetches = 1 < passes <= _PASSES_AHEAD
    for i in range(tokens * PANEL):
        store(totals, i, _ZERO, FLOAT32)
    for number in range((words + block - 1) // block):
        first = number * block
        inputs, at, count = x + first * 4, packed + first * step_bytes, min(block, words - first)
        following, of_block = at + block * step_bytes, scales + number * 8
        if unpacked != 0:
            unpack_panel(kind, at, count, unpacked)
            ahead = following - unpacked if fetches else 0
            _tiles(unpacked_kind, tokens, inputs, x_stride, unpacked, count, totals, of_block, stride, ahead)
        else:
            ahead = following - at if fetches else 0
            _tiles(kind, tokens, inputs, x_stride, at, count, totals, of_block, stride, ahead)


@compiled(fastmath={"contract"})
def _finish(out_kind, tokens, count, totals, scales, bias, out, stride):
    """Sums, scaled and with the bias, to `count` outputs of each token, stride elements between tokens."""
    for token in range(tokens):
        for i in range(count):
            value = load(totals, token * PANEL + i, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            store(out, token * stride + i, value, out_kind)


@compiled(fastmath={"contract", "arcp"})
def _finish_gated(out_kind, tokens, count, totals, scales, bias, out, stride):
    """silu of the first half of a panel's sums, scaled and with the bias, times the second half."""
    half = PANEL // 2
    for token in range(tokens):
        for i in range(count):
            at = token * PANEL + i
            gate = load(totals, at, FLOAT32) * load(scales, i, FLOAT32) + load(bias, i, FLOAT32)
            up = load(totals, at + half, FLOAT32) * load(scales, i + half, FLOAT32) + load(bias, i + half, FLOAT32)
            decay = exp_of_negative(-abs(gate))
            numerator = _ONE if gate >= _ZERO else decay
            store(out, token * stride + i, gate * numerator / (_ONE + decay) * up, out_kind)


_PRODUCT = struct.Struct("23q")


@once_per_kind
def _product_job(x_kind: Any, kind: Any) -> int:
    """x [tokens, inputs] of x_kind times packed weights of `kind`, to the same kind as x."""
    layout = arithmetic_of(kind)
    prepared = layout.integer or kind is not x_kind or kind is FLOAT16
    integer = np.int8(0) if layout.inputs == 4 else np.int16(0)
    largest, offset, is_integer = np.float32(np.iinfo(integer.dtype).max), layout.offset, layout.integer
    unpacks, unpacked_kind = kind is INT4, INT8 if kind is INT4 else kind

    def product(a: int) -> None:
        threads, panels, tokens, chunks = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3)
        x, x_stride, x_size, inputs = arg(a, 4), arg(a, 5), arg(a, 6), arg(a, 7)
        rows, row_bytes, row_stride, width, block_inputs = arg(a, 8), arg(a, 9), arg(a, 10), arg(a, 11), arg(a, 12)
        packed, words, block, step_bytes, panel_bytes = arg(a, 13), arg(a, 14), arg(a, 15), arg(a, 16), arg(a, 17)
        row_scales, bias, out, features, gated = arg(a, 18), arg(a, 19), arg(a, 20), arg(a, 21), arg(a, 22)
        if prepared:
            token = take_ticket(tickets(a, 0))
            while token < tokens:
                source, row = x + token * x_stride * x_size, rows + token * row_stride
                if is_integer:
                    _prepare_integers(
                        x_kind, integer, largest, offset, source, inputs, width, block_inputs, row, row + row_bytes
                    )
                else:
                    _prepare_float(x_kind, source, inputs, width, row)
                take_ticket(tickets(a, 1))
                token = take_ticket(tickets(a, 0))
            while read_shared(tickets(a, 1)) < tokens:
                pause()
            source, source_stride = rows, row_stride
        else:
            source, source_stride = x, x_stride * x_size
        most = (tokens + chunks - 1) // chunks
        totals = take_memory(most * TOTALS_BYTES)
        each = PANEL // 2 if gated else PANEL
        unpacked = take_memory(block * PANEL * 4) if unpacks and most > _MOST_FROM_NIBBLES else 0
        item, end = take_share(tickets(a, 2), panels * chunks, threads)
        while item < panels * chunks:
            for number in range(item, end):
                panel, chunk = number // chunks, number % chunks
                first, last = chunk * tokens // chunks, (chunk + 1) * tokens // chunks
                at = source + first * source_stride
                _multiply(
                    kind, last - first, at, source_stride, packed + panel * panel_bytes, words, block, step_bytes,
                    totals, at + row_bytes, row_stride, unpacked_kind, unpacked,
                )  # fmt: skip
                to = out + (first * features + panel * each) * x_size
                count = min(each, features - panel * each)
                scales, addends = row_scales + panel * PANEL * 4, bias + panel * PANEL * 4
                if gated:
                    _finish_gated(x_kind, last - first, count, totals, scales, addends, to, features)
                else:
                    _finish(x_kind, last - first, count, totals, scales, addends, to, features)
            item, end = take_share(tickets(a, 2), panels * chunks, threads)
        give_back(totals)
        if unpacked != 0:
            give_back(unpacked)

    return job(product)


class PackedLinear:
    """A weight in panels; see cpu_arithmetic for the kinds.

    Args:
        weight: [out, in], float32, bfloat16 or float16, or its rows in parts; its memory is not needed afterwards.
        bias: [out] or None.
        memory: what the packed weight is cut from.
        quantization: "none" or a key of _QUANTISED.
        gated: the first half of the rows is a gate and the second half is what it lets through: the result is
            silu(gate) * up, half as wide.
    """

    def __init__(
        self,
        weight: Weight,
        bias: Tensor | None,
        team: Team,
        memory: LargePages,
        quantization: str = "none",
        gated: bool = False,
    ) -> None:
        parts = _parts(weight)
        self.in_features, self._dtype = parts[0].shape[1], parts[0].dtype
        self.out_features = sum(map(len, parts)) // (2 if gated else 1)
        self._team, self._gated = team, gated
        self._x_kind = KINDS[self._dtype]
        self._kind = kind = _QUANTISED.get(quantization, self._x_kind)
        layout = arithmetic_of(kind)
        step = layout.words * layout.inputs
        self._padded = -(-self.in_features // step) * step
        self._words = self._padded // layout.inputs
        self._step_bytes = PANEL * layout.lane_bytes // layout.words  # a word of the panel's rows, with its scales
        self._block = _BLOCK_INPUTS // layout.inputs if layout.integer else _BLOCK_BYTES // self._step_bytes
        self._row_bytes = self._words * layout.lane_bytes // layout.words
        self._panels = -(-self.out_features // (PANEL // 2 if gated else PANEL))
        self._packed = memory.empty(self._panels * PANEL * self._row_bytes)
        self._row_scales = torch.ones(self._panels * PANEL)
        self._bias = torch.zeros(self._panels * PANEL)
        if bias is not None:
            self._bias = _in_lanes(bias, self._panels, gated)
        self._fill([part.contiguous() for part in parts], layout)
        # A token as it is multiplied: four bytes a word, then scale and start of each block of an integer kind.
        self._x_bytes = -(-self._words * 4 // 64) * 64
        self._x_stride = self._x_bytes + (-(-self._words // self._block) * 8 if layout.integer else 0)
        self._prepared = layout.integer or kind is FLOAT16
        self._code = _product_job(self._x_kind, kind)

    def _fill(self, parts: list[Tensor], layout: Arithmetic) -> None:
        starts = itertools.accumulate((len(part) for part in parts), initial=0)
        table = np.array([(start, part.data_ptr()) for start, part in zip(starts, parts, strict=False)], np.int64)
        arguments = (
            1, self._panels, table.ctypes.data, len(table), sum(map(len, parts)), self.in_features,
            parts[0].element_size(), self._padded, self._row_bytes, layout.lane_bytes, self._packed.data_ptr(),
            self._row_scales.data_ptr(), int(self._gated),
        )  # fmt: skip
        self._team.run(pack_job(self._x_kind, self._kind), PACK, arguments)

    @staticmethod
    def takes(weight: Weight) -> bool:
        """Whether a row is whole words; integer kinds pad theirs."""
        part = _parts(weight)[0]
        return part.shape[1] % arithmetic_of(KINDS[part.dtype]).inputs == 0

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        tokens = x.shape[0]
        if x.stride(1) != 1:
            x = x.contiguous()
        out = self._team.empty((tokens, self.out_features), x.dtype)
        if tokens == 0:
            return out
        rows = self._team.empty((tokens * self._x_stride if self._prepared else 0,), torch.uint8)
        arguments = (
            self._team.threads, self._panels, tokens, self._chunks(tokens), x.data_ptr(), x.stride(0),
            x.element_size(), self.in_features, rows.data_ptr(), self._x_bytes, self._x_stride, self._padded,
            self._block * self._padded // self._words, self._packed.data_ptr(), self._words, self._block,
            self._step_bytes, PANEL * self._row_bytes, self._row_scales.data_ptr(), self._bias.data_ptr(),
            out.data_ptr(), self.out_features, int(self._gated),
        )  # fmt: skip
        self._team.run(self._code, _PRODUCT, arguments)
        return out

    def _chunks(self, tokens: int) -> int:
        """Into how many pieces the tokens are cut, so that sums stay in cache and every thread has work."""
        wanted = -(-_ITEMS_PER_THREAD * self._team.threads // self._panels)
        return max(-(-tokens // _MOST_TOKENS), min(wanted, tokens // _LEAST_TOKENS), 1)

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [T] int64 of the weight -> [T, in], in the model's dtype."""
        numbers = numbers.contiguous()
        out = self._team.empty((numbers.shape[0], self.in_features), self._dtype)
        layout = arithmetic_of(self._kind)
        arguments = (
            4, numbers.shape[0], numbers.data_ptr(), self._packed.data_ptr(), self.in_features, self._row_bytes,
            layout.lane_bytes, out.element_size(), self._row_scales.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self._team.run(rows_job(self._x_kind, self._kind), ROWS, arguments)
        return out


def _parts(weight: Weight) -> list[Tensor]:
    return [weight] if isinstance(weight, Tensor) else weight


def _in_lanes(bias: Tensor, panels: int, gated: bool) -> Tensor:
    """bias [out] in the order of the panels' lanes, float32."""
    parts = bias.float().chunk(2) if gated else (bias.float(),)
    width = PANEL // len(parts)
    lanes = [F.pad(part, (0, panels * width - len(part))).view(panels, width) for part in parts]
    return torch.cat(lanes, dim=1).view(-1)


class TorchForMany:
    """A packed bfloat16 weight whose larger products are left to torch, which has the processor's matrix tiles."""

    def __init__(self, packed: PackedLinear, bias: Tensor | None) -> None:
        self.out_features = packed.out_features
        self._packed, self._bias = packed, bias
        self._numbers = torch.arange(packed.out_features)
        self.rows = packed.rows

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in] -> [T, out]."""
        if x.shape[0] < MANY_FOR_TORCH:
            return self._packed(x)
        return F.linear(x, self._packed.rows(self._numbers), self._bias)


def linear_for(
    weight: Weight, bias: Tensor | None, team: Team, memory: LargePages, quantization: str = "none"
) -> Linear:
    """The fastest way to multiply with weight [out, in] on this processor."""
    if quantization == "none" and not PackedLinear.takes(weight):
        return ReferenceLinear(weight, bias)
    packed = PackedLinear(weight, bias, team, memory, quantization)
    # AMX multiplies many tokens several times faster than vectors do, and oneDNN, under torch, has it.
    if quantization == "none" and _parts(weight)[0].dtype == torch.bfloat16 and has_matrix_tiles():
        return TorchForMany(packed, bias)
    return packed


def gated_linear_for(
    weight: Weight, bias: Tensor | None, team: Team, memory: LargePages, quantization: str = "none"
) -> Callable[[Tensor], Tensor]:
    """The fastest way to a gated product with weight [2 * F, in] on this processor."""
    if quantization == "none" and not PackedLinear.takes(weight):
        return ReferenceGatedLinear(ReferenceLinear(weight, bias), ReferenceKernels().silu_and_mul)
    return PackedLinear(weight, bias, team, memory, quantization, gated=True)
