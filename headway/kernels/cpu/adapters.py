"""Low-rank adapters on CPU: what those of a step's rows add to the sums of a product, before these become its results.

They are parts of the product's own job. Before it looks at a panel, a thread multiplies segments of rows with sixteen
rows of their adapter's A, over some of the inputs; the product makes the sums of a panel as ever; and whoever did that
scales them and adds B's part, once all of A is done. So a row without an adapter gets the bits that it gets without the
others, no job is added to a step, and a rank's part of a product has its part of the adapters. Of experts, whose rows
a plan deals out, A is multiplied row by row.

A and B are in strips: sixteen rows, word by word, as a vector of a panel is (see cpu.panels). Those of B for the same
outputs follow each other, slot by slot, and are fetched while the panel before them is finished.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import math
from typing import Any

import torch
from llvmlite import ir
from torch import Tensor

from headway.kernels.adapters import AdapterRows, AdapterSpec
from headway.kernels.cpu.arithmetic import ARITHMETIC, PANEL, PANEL_VECTORS, arithmetic_of, fused, multiply_add, operand
from headway.kernels.cpu.compile import Kind, Number, address_of, compiled, emitted, give_back, int64, take_memory
from headway.kernels.cpu.expert_plan import ROWS, row_of, rows_of
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
    shuffle,
    splat,
    write,
)
from headway.kernels.cpu.jobs import arg, job, once_per_kind, take_share, tickets
from headway.kernels.cpu.linear import PackedLinear
from headway.kernels.cpu.memory import LargePages
from headway.kernels.cpu.panels import TOTALS_BYTES
from headway.kernels.cpu.product import copy_token, finish
from headway.kernels.cpu.simd import (
    FLOAT16,
    FLOAT32,
    KINDS,
    add_to,
    pause,
    read_int32,
    read_int64,
    read_shared,
    round_to_bfloat16,
    store,
)
from headway.kernels.cpu.team import Team

_SPLIT_WORDS = 512  # words of inputs that a thread takes at a time: a strip of them stays in a core's first cache
_UNROLLED = 4  # words of A whose sums are kept apart, so that multiplications overlap, and words of B at a time
_FEW_ROWS = 64  # of more rows, the product takes longer than B's strips take to come
_ZERO = FLOAT32
# Where things are at a product's address of adapters, behind what cpu.product looks at.
_ONES, _ZEROS, _SEGMENTS, _ORDER, _SLOT_OF, _DOWN, _RANKS, _PARTS, _RANK = range(2, 11)
_SPLITS, _UP, _ENTRIES, _ENTRIES_OF, _SLOTS, _EXPERTS = range(11, 17)


@emitted
def _strip(
    builder: Any, kind: Kind, unrolled: Number, ahead: Number, x: int64, packed: int64, words: int64, totals: int64
) -> None:
    """totals[lane] += the sum over words, a multiple of `unrolled` and not 0, of a strip times a token; float32.

    What lies `ahead` bytes on is fetched, if that is not 0.
    """
    strip_bytes = ARITHMETIC[kind.name].lane_bytes * LANES

    def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
        results = []
        for part, total in enumerate(sums):
            at = builder.add(word, index(part))
            place = builder.add(packed, builder.mul(at, index(strip_bytes)))
            if ahead:
                prefetch(builder, builder.add(place, index(ahead)))
            value = read(builder, builder.add(x, builder.mul(at, index(4))), I32)
            results.append(
                multiply_add(builder, kind, total, operand(builder, kind, place), splat(builder, value, WORDS))
            )
        return results, unrolled

    zeros = ir.Constant(FLOATS, [0.0] * LANES)
    sums = loop(builder, words, [read(builder, totals, FLOATS), *[zeros] * (unrolled - 1)], body)
    while len(sums) > 1:
        sums = [builder.fadd(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
    write(builder, sums[0], totals)


def _scaled(builder: Any, vector: int, totals: Any, scales: Any, bias: Any) -> Any:
    """A vector of a token's sums, scaled and with the bias, as cpu.product's finish_plain has them."""
    at = index(vector * VECTOR_BYTES)
    total, factor, start = (read(builder, builder.add(each, at), FLOATS) for each in (totals, scales, bias))
    return fused(builder, start, total, factor)


@emitted
def _scale(builder: Any, totals: int64, scales: int64, bias: int64) -> None:
    """A token's sums of a panel, in their place."""
    for vector in range(PANEL_VECTORS):
        value = _scaled(builder, vector, totals, scales, bias)
        write(builder, value, builder.add(totals, index(vector * VECTOR_BYTES)))


def _raise_strips(
    builder: Any, kind: Any, lows: list[Any], apart: Any, splits: Any, strips: list[Any], words: Any, sums: list[Any]
) -> list[Any]:
    """The sums and those over words of each strip of B times what A made of a row, of which `lows` has a part for each.

    That comes in `splits` pieces, float32, `apart` bytes from each other; their sum is rounded as inputs are. Words are
    a multiple of _UNROLLED and not 0.
    """
    layout = ARITHMETIC[kind.name]
    floats = ir.VectorType(F32, _UNROLLED * layout.inputs)

    def made(low: Any, word: Any) -> Any:
        first = builder.add(low, builder.mul(word, index(4 * layout.inputs)))

        def add(split: Any, pieces: list[Any]) -> tuple[list[Any], int]:
            piece = read(builder, builder.add(first, builder.mul(split, apart)), floats)
            return [builder.fadd(pieces[0], piece)], 1

        (value,) = loop(builder, splits, [ir.Constant(floats, [0.0] * floats.count)], add)
        if layout.inputs == 2:
            value = round_to_bfloat16(builder, value)
        return builder.bitcast(value, ir.VectorType(I32, _UNROLLED))

    def body(word: Any, sums: list[Any]) -> tuple[list[Any], int]:
        values, sums = {low: made(low, word) for low in dict.fromkeys(lows)}, list(sums)
        for part in range(_UNROLLED):
            inputs = {low: shuffle(builder, value, value, [part] * LANES) for low, value in values.items()}
            place = builder.mul(builder.add(word, index(part)), index(layout.lane_bytes * LANES))
            for number, (low, strip) in enumerate(zip(lows, strips, strict=True)):
                lanes = operand(builder, kind, builder.add(strip, place))
                sums[number] = multiply_add(builder, kind, sums[number], lanes, inputs[low])
        return sums, _UNROLLED

    return loop(builder, words, sums, body)


@emitted
def _raise_strip(
    builder: Any, kind: Kind, low: int64, apart: int64, splits: int64, strip: int64, words: int64, total: int64
) -> None:
    """Do as _raise_strips for a strip, in the memory of its sums."""
    sums = _raise_strips(builder, kind, [low], apart, splits, [strip], words, [read(builder, total, FLOATS)])
    write(builder, sums[0], total)


@emitted
def _raise_panel(
    builder: Any, kind: Kind, low: int64, other: int64, apart: int64, splits: int64, strip: int64, stride: int64,
    words: int64, totals: int64, scales: int64, bias: int64,
) -> None:  # fmt: skip
    """Do so for a panel whose vectors have a strip each, the second half's those of `other`; it is scaled before."""
    half = PANEL_VECTORS // 2
    strips = [builder.add(strip, builder.mul(stride, index(vector))) for vector in range(PANEL_VECTORS)]
    sums = [_scaled(builder, vector, totals, scales, bias) for vector in range(PANEL_VECTORS)]
    sums = _raise_strips(builder, kind, [low] * half + [other] * half, apart, splits, strips, words, sums)
    for vector, value in enumerate(sums):
        write(builder, value, builder.add(totals, index(vector * VECTOR_BYTES)))


@emitted
def _fetch(builder: Any, address: int64) -> None:
    prefetch(builder, address)


@compiled()
def _add_strip(kind, lane_bytes, fetches, x, packed, words, totals):
    whole = words // _UNROLLED * _UNROLLED
    if whole > 0:
        if fetches:  # a page ahead
            _strip(kind, 4, 4096, x, packed, whole, totals)
        else:
            _strip(kind, 4, 0, x, packed, whole, totals)
    if whole < words:
        _strip(kind, 1, 0, x + whole * 4, packed + whole * lane_bytes * LANES, words - whole, totals)


@compiled()
def _items(a, beside):
    """What there is to do before B: segments, or rows of experts, by strips of A and parts of their inputs."""
    plan, strips = arg(a, 22), read_int64(beside, _PARTS) * read_int64(beside, _RANK) // LANES
    together = rows_of(plan, 0) if plan != 0 else read_int32(read_int64(beside, _SEGMENTS), 0)
    return together * strips * read_int64(beside, _SPLITS)


@compiled()
def _slot_of(a, beside, row):
    """The slot of a row of the product, which a plan may have taken from any row of the step."""
    plan = arg(a, 22)
    return read_int32(read_int64(beside, _SLOT_OF), row if plan == 0 else read_int64(read_int64(plan, ROWS), 2 * row))


@once_per_kind
def lower_job(kind: Any) -> int:
    """What A makes of the rows with adapters, float32 [splits, rows, parts * rank]. Arguments are the product's."""
    size, layout, copies = (4 if kind is FLOAT32 else 2), arithmetic_of(kind), kind is FLOAT16
    lane_bytes, per_word = layout.lane_bytes, layout.inputs

    def lower(a: int) -> None:
        threads, rows, x, x_stride, inputs = arg(a, 0), arg(a, 2), arg(a, 4), arg(a, 5), arg(a, 6)
        plan, gathers, beside, out = arg(a, 22), arg(a, 23), arg(a, 32), arg(a, 33)
        segments, order, down = read_int64(beside, _SEGMENTS), read_int64(beside, _ORDER), read_int64(beside, _DOWN)
        ranks, rank, splits = read_int64(beside, _RANKS), read_int64(beside, _RANK), read_int64(beside, _SPLITS)
        words, strips = inputs // per_word, read_int64(beside, _PARTS) * rank // LANES
        copied = take_memory(_SPLIT_WORDS * 4) if copies else 0
        items = _items(a, beside)
        item, end = take_share(tickets(a, 3), items, threads)
        while item < items:
            for number in range(item, end):
                together, strip, split = number // (strips * splits), number // splits % strips, number % splits
                _, expert = row_of(plan, gathers, together)
                slot, first, count = 0, together, 1
                if plan != 0:
                    slot = _slot_of(a, beside, together)
                else:
                    slot, first = read_int32(segments, 3 + together * 3), read_int32(segments, 4 + together * 3)
                    count = read_int32(segments, 5 + together * 3)
                if slot >= 0 and strip * LANES % rank < read_int32(ranks, max(slot, 0)):
                    begin = split * _SPLIT_WORDS
                    length = min(_SPLIT_WORDS, words - begin)
                    matrix = (slot * read_int64(beside, _EXPERTS) + expert) * strips + strip
                    matrix = down + (matrix * words + begin) * lane_bytes * LANES
                    for entry in range(first, first + count):
                        row = entry if plan != 0 else read_int32(order, entry)
                        source, _ = row_of(plan, gathers, row)
                        source = x + (source * x_stride + begin * per_word) * size
                        if copies:
                            copy_token(kind, FLOAT32, source, length, length, copied)
                            source = copied
                        to = out + ((split * rows + row) * strips + strip) * VECTOR_BYTES
                        for lane in range(LANES):
                            store(to, lane, _ZERO, FLOAT32)
                        _add_strip(kind, lane_bytes, entry == first, source, matrix, length, to)
            add_to(tickets(a, 4), end - item)
            item, end = take_share(tickets(a, 3), items, threads)
        if copies:
            give_back(copied)

    return job(lower)


@compiled()
def _fetch_strips(strip, count, stride, size):
    """Ask for strips of B, of so many bytes, `stride` bytes from each other."""
    for number in range(count):
        for line in range(0, size, VECTOR_BYTES):
            _fetch(strip + number * stride + line)


@compiled()
def _is_whole(entries, first, end):
    """Whether each vector of a panel has one strip, and both halves of the panel are of one part each."""
    for strip in range(first, end):
        other = first if strip - first < PANEL_VECTORS // 2 else end - 1
        of_one = read_int64(entries, strip * 2 + 1) == read_int64(entries, other * 2 + 1)
        if not of_one or read_int64(entries, strip * 2) != strip - first:
            return False
    return end - first == PANEL_VECTORS


@once_per_kind
def raise_job(kind: Any) -> int:
    """Finish a panel for some rows, from `row` on, with what B makes of what A made of them added to their sums."""
    size, layout = (4 if kind is FLOAT32 else 2), arithmetic_of(kind)
    lane_bytes, per_word = layout.lane_bytes, layout.inputs

    def raise_(a: int, tokens: int, totals: int, of_all: int, row: int) -> None:
        panels, rows, beside = arg(a, 1), arg(a, 2), arg(a, 32)
        rank, splits, slots = read_int64(beside, _RANK), read_int64(beside, _SPLITS), read_int64(beside, _SLOTS)
        width, entries = read_int64(beside, _PARTS) * rank * 4, read_int64(beside, _ENTRIES)
        fetch_bytes = lane_bytes * LANES // per_word  # of each rank
        strip_bytes, entries_of = rank // per_word * lane_bytes * LANES, read_int64(beside, _ENTRIES_OF)
        expert, panel = of_all // panels, of_all % panels
        first, end = read_int64(entries_of, panel), read_int64(entries_of, panel + 1)
        following = 0  # strips of the next panel, which are fetched slot by slot while this one's are multiplied
        if arg(a, 22) == 0 and rows <= _FEW_ROWS and panel + 1 < panels:
            following = read_int64(entries_of, panel + 2) - end
        items, of_expert = _items(a, beside), expert * read_int64(entries_of, panels)
        up = read_int64(beside, _UP) + of_expert * slots * strip_bytes
        is_whole = _is_whole(entries, first, end)
        while read_shared(tickets(a, 4)) < items:
            pause()
        scales, bias = arg(a, 17) + of_all * TOTALS_BYTES, arg(a, 18) + of_all * TOTALS_BYTES
        fetched = 0  # the slots whose strips were, a bit for each
        begin, had = 0, False  # rows that follow each other and have adapters, or have none, are finished together
        for token in range(tokens + 1):
            slot = _slot_of(a, beside, row + token) if token < tokens else -1
            used = read_int32(read_int64(beside, _RANKS), slot) if slot >= 0 else 0
            if token == tokens or (token > begin and (used > 0) != had):
                to, at, factors, starts = totals + begin * TOTALS_BYTES, row + begin, scales, bias
                if had:
                    factors, starts = read_int64(beside, _ONES), read_int64(beside, _ZEROS)
                finish(a, kind, size, token - begin, to, panel, at, factors, starts)
                begin = token
            had = used > 0
            to, packed = totals + token * TOTALS_BYTES, up + slot * strip_bytes
            low = arg(a, 33) + (row + token) * width
            if had and following > 0 and fetched >> (slot & 63) & 1 == 0:
                fetched |= 1 << (slot & 63)
                _fetch_strips(packed + end * slots * strip_bytes, following, slots * strip_bytes, used * fetch_bytes)
            if had and is_whole:
                _raise_panel(
                    kind, low + read_int64(entries, first * 2 + 1) * rank * 4,
                    low + read_int64(entries, end * 2 - 1) * rank * 4, rows * width, splits,
                    packed + first * slots * strip_bytes, slots * strip_bytes, used // per_word, to, scales, bias,
                )  # fmt: skip
            elif had:
                _scale(to, scales, bias)
                for strip in range(first, end):
                    vector, part = read_int64(entries, strip * 2), read_int64(entries, strip * 2 + 1)
                    _raise_strip(
                        kind, low + part * rank * 4, rows * width, splits, packed + strip * slots * strip_bytes,
                        used // per_word, to + vector * VECTOR_BYTES,
                    )  # fmt: skip

    return address_of(raise_)


class AdaptedLinear(PackedLinear):
    """A packed product, gated or not, with adapters beside it; or those of experts. The weights are the plain one's.

    Args:
        experts: how many products there are.

    Raises:
        ValueError: the product has a number of inputs that is not a whole number of words.
    """

    def __init__(
        self, team: Team, linear: PackedLinear, spec: AdapterSpec, rows: AdapterRows, experts: int = 1
    ) -> None:
        vars(self).update(vars(linear))
        self.adapters = self._strips = _Strips(team, spec, rows, linear.rows_in_lanes(len(spec.part_of)), experts)

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        """See Adapted. Of experts, both have those of all."""
        self._strips.write(slot, down, up)


_memory = LargePages()  # of all slots


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return _memory.empty(math.prod(shape) * dtype.itemsize).view(dtype).view(shape)


class _Strips:
    """The adapters of a product.

    Args:
        lanes: which output each lane of the product's panels is.

    Attributes:
        address: where the product's job finds them.
    """

    def __init__(self, team: Team, spec: AdapterSpec, rows: AdapterRows, lanes: Tensor, experts: int) -> None:
        kind = KINDS[spec.dtype]
        self._team, self._per_word = team, arithmetic_of(kind).inputs
        if spec.inputs % self._per_word:
            raise ValueError(
                f"a layer has {spec.inputs} inputs; adapters need an even number in {spec.dtype}; use float32"
            )
        self._parts, self._rank, self._experts = spec.parts, spec.padded_rank(LANES), experts
        parts = torch.where(lanes < 0, -1, spec.part_of[lanes.clamp(min=0)]).view(-1, LANES)
        # A vector whose lanes are of several parts has a strip for each, with zeros for the lanes of others.
        strips = [(vector, part) for vector, row in enumerate(parts.tolist()) for part in sorted({*row} - {-1})]
        vectors, of_strips = (torch.tensor(each, dtype=torch.int64) for each in zip(*strips, strict=True))
        self._lanes = torch.where(parts[vectors] == of_strips[:, None], lanes.view(-1, LANES)[vectors], -1)
        entries = torch.stack([vectors % PANEL_VECTORS, of_strips], 1).contiguous()
        entries_of = torch.searchsorted(vectors // PANEL_VECTORS, torch.arange(len(lanes) // PANEL + 1))
        self._splits = -(-spec.inputs // self._per_word // _SPLIT_WORDS)
        self._down = _zeros(spec.dtype, spec.slots, experts, self._parts * self._rank * spec.inputs)
        self._up = _zeros(spec.dtype, experts, len(strips), spec.slots, self._rank * LANES)
        self._ranks = torch.zeros(spec.slots, dtype=torch.int32)
        self._kept = torch.ones(PANEL), torch.zeros(PANEL), rows, entries, entries_of
        of_step = rows.segments.data_ptr(), rows.order.data_ptr(), rows.slot_of.data_ptr()
        self._record = torch.tensor([
            lower_job(kind), raise_job(kind), self._kept[0].data_ptr(), self._kept[1].data_ptr(), *of_step,
            self._down.data_ptr(), self._ranks.data_ptr(), self._parts, self._rank, self._splits,
            self._up.data_ptr(), entries.data_ptr(), entries_of.data_ptr(), spec.slots, experts,
        ])  # fmt: skip
        self.address = self._record.data_ptr()

    def room(self, rows: int) -> Tensor:
        return self._team.empty((self._splits, rows, self._parts * self._rank), torch.float32)

    def write(self, slot: int, down: Tensor, up: Tensor) -> None:
        """Put an adapter into a slot: A [parts, r, in] and B [r, out], with the number of experts before if many."""
        rank, inputs, step = down.shape[-2], down.shape[-1], _UNROLLED * self._per_word
        used = -(-rank // step) * step
        rows = torch.zeros(self._experts, self._parts, self._rank, inputs, dtype=down.dtype)
        rows[:, :, :rank] = down.view(self._experts, self._parts, rank, inputs)
        self._down[slot].copy_(self._in_strips(rows.view(-1, LANES, inputs)).view(self._experts, -1))
        beside = torch.zeros(self._experts, used, up.shape[-1] + 1, dtype=up.dtype)  # the last is of lanes of no row
        beside[:, :rank, :-1] = up.view(self._experts, rank, up.shape[-1])
        strips = beside[:, :, self._lanes].permute(0, 2, 3, 1)  # [experts, strips, LANES, ranks]
        packed = self._in_strips(strips.flatten(0, 1)).reshape(*strips.shape[:2], used * LANES)
        self._up[:, :, slot, : used * LANES].copy_(packed)
        self._ranks[slot] = used

    def _in_strips(self, rows: Tensor) -> Tensor:
        """Strips of rows [N, LANES, in] -> [N, words, LANES, inputs of a word]."""
        return rows.unflatten(2, (-1, self._per_word)).transpose(1, 2).contiguous()
