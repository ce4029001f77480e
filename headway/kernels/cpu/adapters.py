"""Low-rank adapters on CPU: what those of a step's rows add to the sums of a product, and the result behind that.

Three jobs follow each other. A thread multiplies a segment of rows with sixteen rows of its adapter's A, over some of
the inputs; the product writes its sums; and a thread takes a segment and some panels of these, adds B's part, and
rounds them or lets them through the gate as the product itself would. So a row without an adapter gets the bits that it
gets without the others.

A and B are in strips: sixteen rows, word by word, as a vector of a panel is (see cpu.panels).
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import struct
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from headway.kernels.adapters import AdapterRows, AdapterSpec
from headway.kernels.cpu.arithmetic import ARITHMETIC, PANEL, arithmetic_of, multiply_add, operand
from headway.kernels.cpu.compile import Kind, Number, compiled, emitted, give_back, int64, take_memory
from headway.kernels.cpu.ir import FLOATS, I32, LANES, VECTOR_BYTES, WORDS, index, loop, read, splat, write
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_share, tickets
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.product import copy_token, finish_gated, finish_plain
from headway.kernels.cpu.simd import BFLOAT16, FLOAT16, FLOAT32, KINDS, load, read_int32, read_int64, store
from headway.kernels.cpu.team import Team

_SPLIT_WORDS = 512  # words of inputs that a thread takes at a time: a strip of them stays in a core's first cache
_PANELS_AT_ONCE = 8
_UNROLLED = 4  # words whose sums are kept apart, so that multiplications overlap
_ZERO = np.float32(0)


@emitted
def _strip(builder: Any, kind: Kind, unrolled: Number, x: int64, packed: int64, words: int64, totals: int64) -> None:
    """totals[lane] += the sum over words, a multiple of `unrolled` and not 0, of a strip times a token; float32."""
    strip_bytes = ARITHMETIC[kind.name].lane_bytes * LANES

    def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
        results = []
        for part, total in enumerate(sums):
            at = builder.add(word, index(part))
            lanes = operand(builder, kind, builder.add(packed, builder.mul(at, index(strip_bytes))))
            value = read(builder, builder.add(x, builder.mul(at, index(4))), I32)
            results.append(multiply_add(builder, kind, total, lanes, splat(builder, value, WORDS)))
        return results, unrolled

    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    sums = loop(builder, words, [read(builder, totals, FLOATS), *[zeros] * (unrolled - 1)], body)
    while len(sums) > 1:
        sums = [builder.fadd(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    write(builder, sums[0], totals)


@compiled()
def _add_strip(kind, lane_bytes, x, packed, words, totals):
    whole = words // _UNROLLED * _UNROLLED
    if whole > 0:
        _strip(kind, 4, x, packed, whole, totals)
    if whole < words:
        _strip(kind, 1, x + whole * 4, packed + whole * lane_bytes * LANES, words - whole, totals)


LOWER = struct.Struct("13q")


@once_per_kind
def lower_job(kind: Any) -> int:
    """What A makes of the rows with adapters, float32 [splits, rows, parts * rank]."""
    size, layout, copies = (4 if kind is FLOAT32 else 2), arithmetic_of(kind), kind is FLOAT16
    lane_bytes, per_word = layout.lane_bytes, layout.inputs

    def lower(a: int) -> None:
        threads, segments, order, x, x_stride, inputs = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4), arg(a, 5)
        down, ranks, parts, rank, out = arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9), arg(a, 10)
        rows, splits = arg(a, 11), arg(a, 12)
        words, strips = inputs // per_word, parts * rank // LANES
        copied = take_memory(_SPLIT_WORDS * 4) if copies else 0
        items = read_int32(segments, 0) * strips * splits
        item, end = take_share(tickets(a, 0), items, threads)
        while item < items:
            for number in range(item, end):
                segment, strip, split = number // (strips * splits), number // splits % strips, number % splits
                slot, first = read_int32(segments, 3 + segment * 3), read_int32(segments, 4 + segment * 3)
                if slot >= 0 and strip * LANES % rank < read_int32(ranks, max(slot, 0)):
                    begin = split * _SPLIT_WORDS
                    count = min(_SPLIT_WORDS, words - begin)
                    matrix = down + ((slot * strips + strip) * words + begin) * lane_bytes * LANES
                    for entry in range(first, first + read_int32(segments, 5 + segment * 3)):
                        row = read_int32(order, entry)
                        source = x + (row * x_stride + begin * per_word) * size
                        if copies:
                            copy_token(kind, FLOAT32, source, count, count, copied)
                            source = copied
                        to = out + ((split * rows + row) * strips + strip) * VECTOR_BYTES
                        for lane in range(LANES):
                            store(to, lane, _ZERO, FLOAT32)
                        _add_strip(kind, lane_bytes, source, matrix, count, to)
            item, end = take_share(tickets(a, 0), items, threads)
        if copies:
            give_back(copied)

    return job(lower)


@compiled()
def _joined(kind, lowered, rows, width, splits, part, used, out):
    """The parts of a row's lowered numbers added in their order, as numbers of `kind`."""
    for i in range(used):
        value = load(lowered, part + i, FLOAT32)
        for split in range(1, splits):
            value += load(lowered, split * rows * width + part + i, FLOAT32)
        store(out, i, value, kind)


RAISE = struct.Struct("20q")


@once_per_kind
def raise_job(kind: Any) -> int:
    """Add what B makes of the lowered rows to the sums of a product, and write its results from these."""
    size, layout, copied = (4 if kind is FLOAT32 else 2), arithmetic_of(kind), BFLOAT16 if kind is BFLOAT16 else FLOAT32
    lane_bytes, per_word = layout.lane_bytes, layout.inputs

    def raise_(a: int) -> None:
        threads, segments, order, sums, panels = arg(a, 0), arg(a, 1), arg(a, 2), arg(a, 3), arg(a, 4)
        up, ranks, parts, rank, lowered = arg(a, 5), arg(a, 6), arg(a, 7), arg(a, 8), arg(a, 9)
        entries, entries_of, out, features, gate = arg(a, 10), arg(a, 11), arg(a, 12), arg(a, 13), arg(a, 14)
        ones, zeros, rows, splits, num_entries = arg(a, 15), arg(a, 16), arg(a, 17), arg(a, 18), arg(a, 19)
        each, strip_bytes = PANEL // 2 if gate != 0 else PANEL, rank // per_word * lane_bytes * LANES
        groups, width = (panels + _PANELS_AT_ONCE - 1) // _PANELS_AT_ONCE, parts * rank
        joined = take_memory(width * 4)
        items = read_int32(segments, 0) * groups
        item, end = take_share(tickets(a, 0), items, threads)
        while item < items:
            for number in range(item, end):
                segment, begin = number // groups, number % groups * _PANELS_AT_ONCE
                slot, first = read_int32(segments, 3 + segment * 3), read_int32(segments, 4 + segment * 3)
                used = read_int32(ranks, slot) if slot >= 0 else 0
                strips = up + max(slot, 0) * num_entries * strip_bytes
                for entry in range(first, first + read_int32(segments, 5 + segment * 3)):
                    row = read_int32(order, entry)
                    if used > 0:
                        for part in range(parts):
                            _joined(
                                copied, lowered + row * width * 4, rows, width, splits, part * rank, used,
                                joined + part * rank * 4,
                            )  # fmt: skip
                    for panel in range(begin, min(begin + _PANELS_AT_ONCE, panels)):
                        of_panel = sums + (row * panels + panel) * PANEL * 4
                        if used > 0:
                            for strip in range(read_int64(entries_of, panel), read_int64(entries_of, panel + 1)):
                                vector, part = read_int64(entries, strip * 2), read_int64(entries, strip * 2 + 1)
                                _add_strip(
                                    kind, lane_bytes, joined + part * rank * 4, strips + strip * strip_bytes,
                                    used // per_word, of_panel + vector * VECTOR_BYTES,
                                )  # fmt: skip
                        count, to = min(each, features - panel * each), out + (row * features + panel * each) * size
                        if gate != 0:
                            finish_gated(kind, 1, count, of_panel, ones, zeros, to, features, gate)
                        else:
                            finish_plain(kind, 1, count, of_panel, ones, zeros, to, features)
            item, end = take_share(tickets(a, 0), items, threads)
        give_back(joined)

    return job(raise_)


class AdaptedLinear:
    """A packed product, gated or not, with adapters beside it.

    Raises:
        ValueError: the product has a number of inputs that is not a whole number of words.
    """

    def __init__(self, team: Team, linear: PackedLinear, spec: AdapterSpec, rows: AdapterRows) -> None:
        self._team, self._linear, self._rows, self._kind = team, linear, rows, KINDS[spec.dtype]
        self._per_word = arithmetic_of(self._kind).inputs
        self._lower, self._raise = lower_job(self._kind), raise_job(self._kind)
        if spec.inputs % self._per_word:
            raise ValueError(
                f"a layer has {spec.inputs} inputs; adapters need an even number in {spec.dtype}; use float32"
            )
        self._parts, self._rank = spec.parts, spec.padded_rank(LANES)
        lanes = linear.rows_in_lanes(len(spec.part_of))
        self._panels = len(lanes) // PANEL
        parts = torch.where(lanes < 0, -1, spec.part_of[lanes.clamp(min=0)]).view(-1, LANES)
        # A vector whose lanes are of several parts has a strip for each, with zeros for the lanes of others.
        strips = [(vector, part) for vector, row in enumerate(parts.tolist()) for part in sorted({*row} - {-1})]
        vectors, of_strips = (torch.tensor(each, dtype=torch.int64) for each in zip(*strips, strict=True))
        self._lanes = torch.where(parts[vectors] == of_strips[:, None], lanes.view(-1, LANES)[vectors], -1)
        self._entries = torch.stack([vectors % (PANEL // LANES), of_strips], 1).contiguous()
        self._entries_of = torch.searchsorted(vectors // (PANEL // LANES), torch.arange(self._panels + 1))
        self._splits = -(-spec.inputs // self._per_word // _SPLIT_WORDS)
        self._down = torch.zeros(spec.slots, self._parts * self._rank * spec.inputs, dtype=spec.dtype)
        self._up = torch.zeros(spec.slots, len(strips), self._rank * LANES, dtype=spec.dtype)
        self._ranks = torch.zeros(spec.slots, dtype=torch.int32)
        self._ones, self._zeros = torch.ones(PANEL), torch.zeros(PANEL)

    def __call__(self, x: Tensor) -> Tensor:
        """See Adapted."""
        x = x if x.stride(1) == 1 else x.contiguous()
        team, linear, count = self._team, self._linear, x.shape[0]
        lowered = team.empty((self._splits, count, self._parts * self._rank), torch.float32)
        of_step = self._rows.segments.data_ptr(), self._rows.order.data_ptr()
        sizes = self._ranks.data_ptr(), self._parts, self._rank, lowered.data_ptr()
        arguments = (
            team.threads, *of_step, x.data_ptr(), x.stride(0), x.shape[1], self._down.data_ptr(), *sizes, count,
            self._splits,
        )  # fmt: skip
        team.run(self._lower, LOWER, arguments)
        sums, out = linear.sums(x), team.empty((count, linear.out_features), x.dtype)
        more = (
            team.threads, *of_step, sums.data_ptr(), self._panels, self._up.data_ptr(), *sizes,
            self._entries.data_ptr(), self._entries_of.data_ptr(), out.data_ptr(), linear.out_features,
            linear.gate_address, self._ones.data_ptr(), self._zeros.data_ptr(), count, self._splits,
            len(self._entries),
        )  # fmt: skip
        team.run(self._raise, RAISE, more)
        return out

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        """See Adapted."""
        rank = down.shape[1]
        used = -(-rank // _UNROLLED) * _UNROLLED
        rows = torch.zeros(self._parts, self._rank, down.shape[2], dtype=down.dtype)
        rows[:, :rank] = down
        self._down[slot].copy_(self._in_strips(rows.view(-1, LANES, down.shape[2])).flatten())
        beside = torch.zeros(used, up.shape[1] + 1, dtype=up.dtype)  # lanes of no row take the last column
        beside[:rank, :-1] = up
        strips = beside[:, self._lanes].permute(1, 2, 0)
        self._up[slot, :, : used * LANES].copy_(self._in_strips(strips).flatten(1))
        self._ranks[slot] = used

    def _in_strips(self, rows: Tensor) -> Tensor:
        """Strips of rows [N, LANES, in] -> [N, words, LANES, inputs of a word]."""
        return rows.unflatten(2, (-1, self._per_word)).transpose(1, 2)
